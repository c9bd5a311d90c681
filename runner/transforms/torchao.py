"""Float8Training and Quantize: layers of the package torchao that compute or are stored with few bits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.base.config import check_call
from ...core.base.errors import ConfigError, one_of, suggest
from ...core.base.registry import TRANSFORMS
from ...core.checkpoint.untrusted import one_line
from ...strategies.sharding import FLOAT8_WIDTHS
from ..reporting.reporter import import_extra
from .freeze import compiled, matching

_logger = logging.getLogger("flextrain")
_FLOAT8 = (8, 9)
"""The compute capability from which on GPUs multiply float8."""
_LATER = ("mxfp8", "mxfp4", "nvfp4")
"""Formats with a scale for every 16 or 32 numbers, of whose prototypes the interface changes with every version of torchao."""


@TRANSFORMS.register_module()
class Float8Training:
    """Computes linear layers in float8 by torchao; parameters, their names and what checkpoints hold stay as they are.

    The weight, the input and the gradient of the output are rounded to float8 before they are multiplied, each with scales made
    of its largest values; sums and outputs have the dtype of the input. Evaluation computes so too. FSDP gathers such weights
    as one byte for each number, if ``recipe`` scales them as a whole.

    Args:
        recipe: what has a scale of its own: "tensorwise": a tensor; "rowwise": a row; "rowwise_with_gw_hp": the same, and the
            gradient of the weight is multiplied in high precision.
        patterns: names of linear layers or of modules around them, globs; default: all.
        but: names of those that stay as they are, such as ``"lm_head"``.
        emulate: True: round to float8, and multiply in float32, on any device, to try it out.

    Raises:
        ConfigError: torchao is not installed, the GPU has no float8, a layer's widths are no multiples of 16, or it is no
            torch.nn.Linear itself but of a class derived from it.

    Source: https://github.com/pytorch/ao/tree/main/torchao/float8

    Example:
        transforms=[dict(type="Float8Training", recipe="tensorwise", but=["lm_head"])]
    """

    def __init__(
        self,
        recipe: str = "tensorwise",
        patterns: str | Sequence[str] | None = None,
        but: str | Sequence[str] | None = None,
        emulate: bool = False,
        *,
        where: str = "Float8Training",
    ) -> None:
        self._where, self._emulate = where, emulate
        float8 = import_extra("torchao.float8", "torchao", where)
        names = [each.value for each in float8.config.Float8LinearRecipeName]
        if recipe not in names:
            is_later = str(recipe).lower().startswith(_LATER)
            why = "; torchao trains so by prototypes only, on GPUs of compute capability 10.0" if is_later else ""
            raise ConfigError(
                f'{where}.recipe: "{recipe}" is not allowed, choose {one_of(names)}{suggest(recipe, names)}{why}'
            )
        self._config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        self._chosen = _Layers(patterns, but, where)

    def __call__(self, module: nn.Module) -> None:
        """Change the layers in place, which keep their hooks and all that is theirs."""
        from .float8_linear import to_float8

        chosen = self._chosen.of(module)
        if not self._emulate and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < _FLOAT8):
            raise ConfigError(
                f"{self._where}: Float8Training needs a GPU of compute capability 8.9 or newer; emulate=True computes the same "
                "on any device, slowly"
            )
        for name, layer in chosen.items():
            if why := _unfit(layer):
                raise ConfigError(f'{self._where}: {name} {why}; leave it out with but=["{name}"]')
        for layer in chosen.values():
            to_float8(layer, self._config)


def _unfit(layer: nn.Linear) -> str:
    """Why a layer cannot compute in float8; empty if it can."""
    if type(layer) is not nn.Linear:  # its own forward would be lost, and that of MultiheadAttention is never called
        return f"is a {type(layer).__name__}, float8 takes the place of the forward of torch.nn.Linear only"
    if layer.in_features % FLOAT8_WIDTHS or layer.out_features % FLOAT8_WIDTHS:
        sizes = f"{layer.in_features} inputs and {layer.out_features} outputs"
        return f"has {sizes}, float8 needs multiples of {FLOAT8_WIDTHS}"
    return ""


@TRANSFORMS.register_module()
class Quantize:
    """Stores the weights of linear layers in few bits by torchao, and freezes them: for a base under adapters.

    The model needs its values, so give it as an instance. Strategies of several processes refuse such weights, and checkpoints
    cannot hold them: train with ``exclude_frozen_parameters=True``.

    Args:
        config: a class of ``torchao.quantization``, such as "Int8WeightOnlyConfig", or an instance of one.
        patterns: names of linear layers or of modules around them, globs; default: all.
        but: names of those that stay as they are, such as ``"lm_head"``.
        options: arguments of the class.

    Raises:
        ConfigError: torchao is not installed, or it has no such class.

    Source: https://github.com/pytorch/ao/tree/main/torchao/quantization

    Example:
        transforms=[dict(type="Quantize", config="Int8WeightOnlyConfig", but=["lm_head"])],
        strategy=dict(type="single", exclude_frozen_parameters=True)
    """

    needs_values = True
    quantises = True

    def __init__(
        self,
        config: Any = "Int8WeightOnlyConfig",
        patterns: str | Sequence[str] | None = None,
        but: str | Sequence[str] | None = None,
        *,
        where: str = "Quantize",
        **options: Any,
    ) -> None:
        self._where = where
        quantization = import_extra("torchao.quantization", "torchao", where)
        if isinstance(config, str):
            names = sorted(name for name in dir(quantization) if name.endswith("Config"))
            if config not in names:
                raise ConfigError(
                    f'{where}.config: "{config}" is not allowed, choose {one_of(names)}{suggest(config, names)}'
                )
            kind = getattr(quantization, config)
            check_call(kind, options, where)
            config = kind(**options)
        elif options:
            raise ConfigError(f"{where}.{min(options)}: has no effect beside a config that is built, leave it out")
        self._config = config
        self._chosen = _Layers(patterns, but, where)

    def __call__(self, module: nn.Module) -> None:
        """Quantise the layers in place."""
        quantization = import_extra("torchao.quantization", "torchao", self._where)
        chosen, precision = self._chosen.of(module), torch.get_float32_matmul_precision()
        self._warn_of_ties(module, chosen)
        try:
            quantization.quantize_(module, self._config, filter_fn=lambda _, name: name in chosen)
        except (ImportError, RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"{self._where}: Quantize is not possible here, {one_line(error)[:200]}") from error
        finally:
            torch.set_float32_matmul_precision(
                precision
            )  # earlier versions set "high", for the products of all other layers
        for layer in chosen.values():
            layer.weight.requires_grad_(False)

    def _warn_of_ties(self, module: nn.Module, chosen: Mapping[str, nn.Linear]) -> None:
        """Say which weights other modules have too: those keep theirs, which is trained on unless something freezes it."""
        layers = list(chosen.values())
        others = {
            id(parameter): f"{name}.{key}" if name else key
            for name, each in module.named_modules()
            if each not in layers
            for key, parameter in each.named_parameters(recurse=False)
        }
        for name, layer in chosen.items():
            if (other := others.get(id(layer.weight))) and layer.weight.requires_grad:
                _logger.warning(
                    f"{self._where}: {name}.weight is also {other}, which stays as it is: the two are apart from now on, and {other} is "
                    f'trained unless it is frozen; but=["{name}"] keeps them one'
                )


class _Layers:
    """Chooses linear layers by their names, or those of modules around them.

    Args:
        patterns, but: globs; None: all, and none.
        where: the configuration key, for messages.
    """

    def __init__(self, patterns: Any, but: Any, where: str) -> None:
        self._where = where
        self._patterns = None if patterns is None else compiled(patterns, f"{where}.patterns", regex=False)
        self._but = [] if but is None else compiled(but, f"{where}.but", regex=False)

    def of(self, model: nn.Module) -> dict[str, nn.Linear]:
        """Return the chosen layers of a model by name.

        Raises:
            ConfigError: there are none, or a pattern matches none.
        """
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        names = list(linear)
        chosen = set(names)
        if self._patterns is not None:
            chosen = matching(self._patterns, names, f"{self._where}.patterns", "linear layer")
        chosen -= matching(self._but, names, f"{self._where}.but", "linear layer")
        if not chosen:
            raise ConfigError(f"{self._where}: the model has no linear layer to change")
        return {name: layer for name, layer in linear.items() if name in chosen}
