"""DeepSpeed's own kinds of model parallelism: refused by name, with the MeshStrategy that does the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...core.config import Config
from ...core.errors import ConfigError, StrategyError, suggest
from . import engine_internals
from .offloading import WHERE


class LeafModules(Config):
    """Modules that stage 3 gathers whole, such as mixtures whose processes use different experts."""

    classes: list[str] | None = None
    """Names of classes; None is DeepSpeed's list of mixtures in transformers."""
    names: list[str] | None = None
    """Names of modules."""
    name_suffixes: list[str] | None = None
    """Ends of names of modules."""


_UNEVEN = "of which checkpoints for every layout cannot be made"
_ULYSSES = "DeepSpeed's Ulysses needs batches and a loss that are cut by hand"
# By key: the entry in it that has the size, the reason, and the axis to use.
_KEYS: dict[str, tuple[str, str, str | None]] = {
    "tensor_parallel": ("autotp_size", f"AutoTP leaves slices of weights, {_UNEVEN}", "tp"),
    "expert_parallel": ("autoep_size", f"AutoEP leaves each process experts of its own, {_UNEVEN}", "ep"),
    "use_data_before_expert_parallelism": ("", "it arranges experts of DeepSpeed, which are not supported", "ep"),
    "sequence_parallel_size": ("", _ULYSSES, "cp"),
    "data_parallel_size": ("", "it is the number of processes divided by sequence_parallel_size", None),
    "seq_parallel_communication_data_type": ("", _ULYSSES, "cp"),
    "pipeline": ("stages", "DeepSpeed's pipelines need a model that is written for them", "pp"),
}
# By the module of DeepSpeed that has a layer's class: what a process has of it, and the axis to use.
_LAYERS = {
    "deepspeed.moe": ("every process would train experts of its own, and one process's would be saved", "ep"),
    "deepspeed.sequence": ("processes have different samples here, not parts of a sequence", "cp"),
    "deepspeed.runtime.sequence_parallel": ("processes have different samples here, not parts of a sequence", "cp"),
    "deepspeed.module_inject": ("it holds a slice of a weight, and checkpoints are of whole ones", "tp"),
    "deepspeed.runtime.pipe": ("processes have the whole model here, not stages", "pp"),
}


def refuse_options(options: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for keys of DeepSpeed's configuration that divide a model over processes."""
    for key, (name, reason, axis) in _KEYS.items():
        if (given := options.get(key)) is not None:
            path, value = key, given
            if isinstance(given, Mapping):
                path, value = (f"{key}.{name}", given[name]) if name in given else (key, dict(given))
            is_off = axis is None or (isinstance(value, int) and value < 2)
            advice = "leave it out" if is_off else _instead(axis, value)
            raise ConfigError(f"{where}.{path}: {value!r} is not possible, {reason}; {advice}")


def _instead(axis: str | None, size: object = None) -> str:
    """Return the advice to use an axis of MeshStrategy, with 2 for a size that is no number."""
    kind = ', cp_kind="ulysses"' if axis == "cp" else ""
    return f'give strategy=dict(type="MeshStrategy", {axis}={size if isinstance(size, int) else 2}{kind})'


def check_layers(model: nn.Module, leaf_modules: LeafModules | None) -> None:
    """Check that no layer of a model is DeepSpeed's for processes that work together, and that ``leaf_modules`` are there.

    DeepSpeedStrategy gives every process samples of its own and the whole model: such layers would train wrongly.

    Raises:
        StrategyError: it has such a layer, or a call of DeepSpeed has prepared for them.
        ConfigError: an entry of ``leaf_modules`` is no module of the model.
    """
    _check_leaf_modules(leaf_modules, model)
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            package = next((package for package in _LAYERS if f"{kind.__module__}.".startswith(f"{package}.")), None)
            if package is not None:
                reason, axis = _LAYERS[package]
                path = f"model.{name}" if name else "model"
                raise StrategyError(f"{path}: is DeepSpeed's {kind.__name__}, but {reason}; {_instead(axis)}")
    if (size := engine_internals.prepared_tensor_parallelism()) is not None:
        raise StrategyError(
            "model: deepspeed.tp_model_init() was called, but a slice of each weight is in no checkpoint; leave the call out and "
            f"{_instead('tp', size)}"
        )
    if engine_internals.has_sequence_groups():
        raise StrategyError(
            "model: DeepSpeed's sequence parallelism was initialised, but processes have different samples here; leave the call "
            f"out and {_instead('cp')}"
        )


def _check_leaf_modules(given: LeafModules | None, model: nn.Module) -> None:
    modules = dict(model.named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    classes |= {f"{type(module).__module__}.{type(module).__qualname__}" for module in modules.values()}
    for key, entries in (given.model_dump() if given is not None else {}).items():
        for number, entry in enumerate(entries or ()):
            known = classes if key == "classes" else modules
            matches = any(name.endswith(entry) for name in known) if key == "name_suffixes" else entry in known
            if not matches:
                what = "class of a module" if key == "classes" else "module"
                raise ConfigError(
                    f'{WHERE}.zero_optimization.leaf_module.{key}[{number}]: "{entry}" is no {what} of the model'
                    f"{suggest(entry, known)}"
                )
