"""DeepSpeed's optimizers by name, imported when one is asked for."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from ...core.errors import ConfigError, StrategyError
from ...core.registry import OPTIMIZERS

_HOMES = {
    "FusedAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdagrad": "deepspeed.ops.adagrad",
    "DeepSpeedCPULion": "deepspeed.ops.lion",
    "FusedLion": "deepspeed.ops.lion",
    "FusedLamb": "deepspeed.ops.lamb",
}

_ERROR_FEEDBACK = "keeps compression errors that differ by process and fit no checkpoint; choose FusedAdam or AdamW"
_REFUSED = {
    **dict.fromkeys(("OnebitAdam", "OnebitLamb", "ZeroOneAdam"), _ERROR_FEEDBACK),
    "MuonWithAuxAdam": "is made from DeepSpeed's own configuration only; choose torch's Muon, at stage 0",
}
# ZeRO gives an optimizer pieces of flattened parameters, so it must treat every element alike.
_MATRICES = "works on whole matrices, ZeRO gives it pieces of flattened ones; choose AdamW, or stage 0"
_REFUSED_ZERO = {
    **dict.fromkeys(("Muon", "Adafactor"), _MATRICES),
    "FusedLamb": "needs norms of whole parameters, ZeRO gives it pieces; choose FusedAdam, or stage 0",
    "Adagrad": "is rebuilt by DeepSpeed without its parameter groups; choose AdamW, or stage 0",
    "SparseAdam": "takes sparse gradients, which ZeRO does not; choose AdamW, or stage 0",
}


def register_optimizers() -> None:
    """Make DeepSpeed's optimizers known to the registry, by their names."""
    OPTIMIZERS.add_lookup(_find, lambda: _HOMES)


def _find(name: str) -> Any:
    if name in _REFUSED:
        raise ConfigError(f'optimizer "{name}": {_REFUSED[name]}')
    if name not in _HOMES:
        return None
    try:
        return _with_params(getattr(importlib.import_module(_HOMES[name]), name))
    except ModuleNotFoundError as error:
        advice = "pip install flextrain[deepspeed]" if error.name == "deepspeed" else f"install {error.name}"
        raise ConfigError(f'optimizer "{name}": is one of DeepSpeed\'s and cannot be imported, {advice}') from None


@functools.cache
def _with_params(cls: Any) -> Any:
    """An optimizer class whose first argument is called ``params``, as torch calls it; some here say ``model_params``."""
    signature = inspect.signature(cls)
    first, *rest = signature.parameters.values()
    if first.name != "model_params":
        return cls

    def make(self: Any, params: Any, **kwargs: Any) -> None:
        cls.__init__(self, params, **kwargs)

    renamed = signature.replace(parameters=[first.replace(name="params"), *rest])
    return type(cls.__name__, (cls,), {"__init__": make, "__signature__": renamed, "__module__": cls.__module__})


def check_supported(optimizer: Any, stage: int, where: str) -> None:
    """Raise StrategyError if DeepSpeed's engine cannot run this optimizer as it is meant."""
    for kind in (base.__name__ for base in type(optimizer).__mro__):
        reason = _REFUSED.get(kind) or (_REFUSED_ZERO.get(kind) if stage else None)  # the class may have been given
        if reason:
            raise StrategyError(f'{where}.optimizer.type: "{kind}" {reason}')
