"""Registration of DeepSpeed's optimizers by name, and the check that DeepSpeed's engine can run an optimizer."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core.errors import ConfigError, StrategyError
from ...core.registry import OPTIMIZERS
from ...core.rehearsing import with_values
from ...optim.adapters.trial import Samples, why_not_flat_shards, why_not_usable
from ...optim.wrapper import OptimWrapper

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
_REFUSED_ZERO = {
    "FusedLamb": "needs norms of whole parameters, ZeRO gives it shards; choose FusedAdam, or stage 0",
    "Adagrad": "is rebuilt by DeepSpeed without its parameter groups; choose AdamW, or stage 0",
    "SparseAdam": "takes sparse gradients, which ZeRO does not; choose AdamW, or stage 0",
}


def register_optimizers() -> None:
    """Add DeepSpeed's optimizers to the registry, by name; each is imported on use."""
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
    """Return the class with ``params`` as first argument, as in torch; some of DeepSpeed's call it ``model_params``."""
    signature = inspect.signature(cls)
    first, *rest = signature.parameters.values()
    if first.name != "model_params":
        return cls

    def make(self: Any, params: Any, **kwargs: Any) -> None:
        cls.__init__(self, params, **kwargs)

    renamed = signature.replace(parameters=[first.replace(name="params"), *rest])
    return type(cls.__name__, (cls,), {"__init__": make, "__signature__": renamed, "__module__": cls.__module__})


def check_supported(wrapper: OptimWrapper, stage: int) -> None:
    """Raise StrategyError if DeepSpeed's engine cannot run this optimizer correctly.

    ZeRO gives an optimizer shards of flattened parameters, so it must update element by element; a trial checks this.
    """
    optimizer = wrapper.optimizer
    kind = type(optimizer)
    for base in (base.__name__ for base in kind.__mro__):
        reason = _REFUSED.get(base) or (_REFUSED_ZERO.get(base) if stage else None)  # a class was not refused by _find
        if reason:
            raise StrategyError(f'{wrapper.where}.optimizer.type: "{base}" {reason}')
    if wrapper.adapter.is_elementwise or (kind.__name__ in _HOMES and kind.__module__.startswith("deepspeed.")):
        return
    samples = Samples.like(
        optimizer, lambda parameter: getattr(parameter, "ds_shape", getattr(parameter, "whole_shape", parameter.shape))
    )
    with with_values():
        reason = (why_not_flat_shards if stage else why_not_usable)(wrapper.make_another, samples)
    if reason and stage == 0:
        raise StrategyError(f"{wrapper.where}.optimizer: {kind.__name__} {reason}")
    if reason:
        raise StrategyError(
            f"{wrapper.where}.optimizer: {kind.__name__} {reason}; ZeRO gives it shards of flattened parameters, choose "
            "AdamW, stage 0, or DDPStrategy"
        )


def take_out_frozen(optimizer: Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Leave the frozen parameters out of an optimizer, and groups without any other; return the latter, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        # The group object itself, so that frozen parameters get the values that schedulers set for the group.
        frozen = [parameter for parameter in group["params"] if not parameter.requires_grad]
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not group["params"]:  # otherwise the trained ones say the same
            found |= {names[id(parameter)]: group for parameter in frozen}
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return found
