"""Run a model on tensors without memory, to see which features its operations combine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....core.errors import ConfigError
from ....core.model import overrides, own_run_forward, run_forward, takes_mode
from ....core.random_state import kept_random_state
from ....core.rehearsing import mode_without_values
from ....core.taken_keys import taken_keys
from ....core.torch_private import is_compiled, tree_flatten
from ....core.trees import tree_map_only
from .features import Label
from .operations import RULES
from .recorder import Product, Recorder


class Traced:
    """What was seen in one forward of a model.

    Attributes:
        products: the uses of parameters as matrices, in order.
        outputs: the axes of the last dimension of every tensor that forward has returned.
    """

    def __init__(self, products: list[Product], outputs: list[Label], recorder: Recorder) -> None:
        self.products, self.outputs = products, outputs
        self._recorder = recorder

    def label(self, name: str, dim: int) -> Label:
        """Return the axes of a dimension of a parameter."""
        return self._recorder.label_of_parameter(name, dim)


def trace(model: nn.Module, batch: Any) -> Traced:
    """Return what a forward of the model does with the shapes of a batch; nothing is computed, and nothing changes.

    Args:
        model: parameters may be on the meta device.
        batch: as the dataloader gives it.

    Raises:
        ConfigError: the model cannot run without values, or in one call.
    """
    name = type(model).__name__
    if overrides(model, "train_step"):
        raise ConfigError(f"strategy.plan: {name} defines its own train_step, which cannot be traced; {GIVE}")
    if is_compiled(model):
        raise ConfigError(
            f"strategy.plan: {name} is compiled already and cannot be traced; give strategy.compile, or {GIVE}"
        )
    with without_memory(model, batch) as (parameters, run):
        recorder = Recorder(parameters, RULES)
        try:
            with recorder:
                result = run()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"strategy.plan: {name} could not be traced with the example batch ({type(error).__name__}: {text}); {GIVE}"
            ) from error
        found = [value for value in tree_flatten(_as_dict(result))[0] if isinstance(value, Tensor) and value.ndim]
        return Traced(recorder.products, [recorder.labels(value)[-1] for value in found], recorder)


@contextlib.contextmanager
def without_memory(model: nn.Module, batch: Any) -> Iterator[tuple[dict[str, Tensor], Callable[[], Any]]]:
    """A context in which the model and a batch have tensors without memory; after it, the model is as before.

    Yields:
        The tensors in place of its parameters, by name, and a function that calls the model as an update does.
    """
    with (
        kept_random_state(torch.device("cpu")),
        torch.no_grad(),
        mode_without_values(),
        _without_values(model) as parameters,
    ):
        yield parameters, partial(_forward, model, tree_map_only(Tensor, _without_value, batch))


GIVE = 'give a plan, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'


def _forward(model: nn.Module, batch: Any) -> Any:
    """Call the model as an update does."""
    preprocess = getattr(model, "data_preprocessor", None)
    data = preprocess(batch, True) if callable(preprocess) else batch
    if (own := own_run_forward(model)) is not None:
        return own(data, "loss")
    if takes_mode(model):
        return run_forward(model, data, mode="loss")
    return run_forward(model, taken_keys(model, says=False)(data))


def _as_dict(result: Any) -> Any:
    return dict(result) if isinstance(result, Mapping) else result


def _without_value(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form on the CPU; without memory inside of ``mode_without_values``."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _without_values(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context in which the model has tensors without memory; after it, all its attributes are as before.

    A forward may keep tensors in its module, such as positions of the longest sequence that it has seen.
    """
    kept = [_Kept(module) for module in model.modules()]
    named: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    try:
        for prefix, module in [*model.named_modules()]:
            for key, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if id(parameter) not in made:
                    found = nn.Parameter(_without_value(parameter), requires_grad=False)
                    made[id(parameter)] = named[f"{prefix}.{key}" if prefix else key] = found
                setattr(module, key, made[id(parameter)])
            for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, key, _without_value(buffer))
        model.train()
        yield named
    finally:
        for each in kept:
            each.restore()


class _Kept:
    """The attributes of a module, and what its containers held."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._containers = [(value, value.copy()) for value in (self._attributes, *self._attributes.values())
                            if isinstance(value, (dict, list, set))]  # fmt: skip

    def restore(self) -> None:
        for container, before in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
