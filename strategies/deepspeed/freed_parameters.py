"""Parameters that stage 3 has freed: their shapes are told, and what needs their values raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.base.errors import StrategyError
from ...core.base.trees import tensors_in
from .engine_internals import call_when_freed, is_partitioned

# Names of functions and attributes, without underscores before and behind them.
_OF_WHOLE = {"shape", "ndim", "size", "dim", "numel", "nelement", "len", "nbytes", "stride"}
_OF_LAYOUT = {
    "dtype",
    "device",
    "layout",
    "is_meta",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_floating_point",
    "is_complex",
}
_OF_GRAPH = {"is_leaf", "requires_grad", "grad", "grad_fn", "output_nr", "version"}
_HOOKS = {"backward_hooks", "post_accumulate_grad_hooks", "register_hook", "register_post_accumulate_grad_hook"}
_ALWAYS_TRUE = _OF_LAYOUT | _OF_GRAPH | _HOOKS | {"element_size", "itemsize", "untyped_storage", "names", "repr"}


def refuse_use(model: nn.Module) -> None:
    """Let every use of a parameter's values raise StrategyError while they are freed: DeepSpeed leaves an empty tensor, whose sum is 0.

    Such a parameter has another class. It gets its own again when DeepSpeed begins to gather it, so what modules compute with it takes
    no more time.

    Args:
        model: set up; its parameters have values again inside ``deepspeed.zero.GatheredParameters``, as in calls of their modules.
    """
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and is_partitioned(parameter):
            parameter.name_in_model = name  # type: ignore[attr-defined]
            call_when_freed(parameter, _take_class)


def _take_class(parameter: Tensor) -> None:
    parameter.__class__ = _Freed


class _Freed(nn.Parameter):
    """A parameter whose values are on no process as a whole."""

    name_in_model: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = func.__name__
        name = getattr(func.__self__, "__name__", own) if own in ("__get__", "__set__") else own
        disabled = super().__torch_function__
        bare = name.strip("_")
        if bare in _OF_WHOLE and own != "__set__":
            whole = torch.empty(args[0].ds_shape, dtype=args[0].dtype, device="meta")
            return func(whole, *args[1:], **(kwargs or {}))
        # Torch and DeepSpeed find a parameter's node in the graph by a view of it.
        if bare in _ALWAYS_TRUE or (name in ("view_as", "expand_as") and args[0] is args[1]):
            return disabled(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        parameter = next(each for each in tensors_in((args, kwargs)) if isinstance(each, _Freed))
        raise StrategyError(
            f"model.{parameter.name_in_model}: {name} of a parameter that DeepSpeed has freed, as stage 3 does outside of the calls of the "
            "module that has it; use it inside of full_weights or deepspeed.zero.GatheredParameters, or choose stage 1 or 2, or "
            'strategy="fsdp"'
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data" or (name == "ds_status" and value.name != "NOT_AVAILABLE"):
            self.__class__ = nn.Parameter  # type: ignore[assignment]
        object.__setattr__(self, name, value)
