"""Apply transforms to a model that was built, and tell what they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...core.deferred import LooksAtValues
from ...core.errors import ConfigError, FlexTrainError
from ...core.hugging_face.pretrained import pretrained_in
from ...core.tta_model import BaseTTAModel
from .build import Transform
from .changes import ModelState, differences


class Changes(Protocol):
    """What a strategy says about a model that is not set up yet."""

    def change_context(self, model: nn.Module, state: Tensor) -> AbstractContextManager[Any]:
        """See Strategy."""

    def shape_of(self, tensor: Tensor) -> Sequence[int]:
        """See Strategy."""


def transform(
    model: nn.Module, transforms: Sequence[Transform], strategy: Changes, seed: int, load_from: Any = None
) -> tuple[nn.Module, tuple[tuple[str, str], ...]]:
    """Apply transforms in their order.

    Args:
        model: as it was built, with initial weights or without memory; of a BaseTTAModel the model inside is changed.
        transforms: from ``build_transforms``.
        strategy: that will set the model up.
        seed: of the run. A transform draws from a seed made of it and the transform's index, under every strategy the same.
        load_from: of the run.

    Returns:
        The model, and for each transform its name and what it has changed.

    Raises:
        ConfigError: a transform needs values that the model does not have yet, or returns something else than a module.
    """
    if isinstance(model, BaseTTAModel):
        model.module, said = transform(model.module, transforms, strategy, seed, load_from)
        return model, said
    lines = []
    for index, each in enumerate(transforms):
        _check_values(each, model, strategy, load_from)
        before = ModelState.of(model, strategy.shape_of)
        is_whole = _has_values(model, strategy)
        with strategy.change_context(model, _generator_state(seed, index)):
            changed = _call(each, model, is_whole)
        _check_read_later(each, model, changed)
        model = changed
        lines.append((each.name, differences(before, ModelState.of(model, strategy.shape_of))))
    return model, tuple(lines)


def _call(each: Transform, model: nn.Module, is_whole: bool) -> nn.Module:
    try:
        changed: object = each.function(model)
    except FlexTrainError:
        raise
    except (Exception, LooksAtValues) as error:
        if not is_whole and isinstance(error, (RuntimeError, NotImplementedError, LooksAtValues)):
            raise ConfigError(
                f"{each.where}: {each.name} failed on a model that the strategy has built without memory "
                f"({_one_line(error)}); if it reads values, give the model as an instance"
            ) from error
        if hasattr(error, "add_note"):  # Python 3.11; the interpreter prints it below the traceback
            error.add_note(f"flextrain: failed in {each.where}, {each.name}")
        raise
    if changed is None:
        return model
    if not isinstance(changed, nn.Module):
        raise ConfigError(
            f"{each.where}: {each.name} gave {type(changed).__name__}, return a torch.nn.Module, or None if it was changed in place"
        )
    return changed


def _check_values(each: Transform, model: nn.Module, strategy: Changes, load_from: Any) -> None:
    if not each.needs_values:
        return
    if not _has_values(model, strategy):
        raise ConfigError(
            f"{each.where}: {each.name} computes with the model's values, and the strategy builds this model without them; give "
            "the model as an instance, with its weights"
        )
    if any(True for _ in pretrained_in(model)):
        raise ConfigError(
            f"{each.where}: {each.name} computes with the model's values, which are read from model.pretrained afterwards; give the "
            "model as an instance, with its weights"
        )
    if load_from is not None:
        raise ConfigError(
            f"{each.where}: {each.name} computes with the model's values, which load_from would replace afterwards; give the model "
            "as an instance, with its weights, and leave load_from out"
        )


def _check_read_later(each: Transform, model: nn.Module, changed: nn.Module) -> None:
    """Raise ConfigError if a tensor whose values are still to be read was replaced by another of its name."""
    names = {name for name, _ in (*changed.named_parameters(), *changed.named_buffers())}
    for source in pretrained_in(changed):
        lost = {old for old in source.names.values() if old not in source.renamed_in(changed)} & names
        if lost:
            raise ConfigError(
                f"{each.where}: {each.name} replaces {min(lost)}, whose values are read from model.pretrained afterwards; take the "
                "parameter over as it is (new.weight = old.weight)"
            )


def _has_values(model: nn.Module, strategy: Changes) -> bool:
    """Whether this process has every parameter whole."""
    return all(
        not parameter.is_meta and tuple(strategy.shape_of(parameter)) == tuple(parameter.shape)
        for parameter in model.parameters()
        if not isinstance(parameter, nn.UninitializedParameter)
    )


def _generator_state(seed: int, index: int) -> Tensor:
    number = hashlib.sha256(f"transforms[{index}] {seed}".encode()).digest()[:8]
    return torch.Generator("cpu").manual_seed(int.from_bytes(number, "big") >> 1).get_state()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
