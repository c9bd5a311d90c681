"""Let a constructor set values of parameters that ZeRO stage 3 has sharded already: they are gathered for the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from ...core.errors import StrategyError
from .swapping import is_in_file

_NO_WRITING = frozenset({"requires_grad_", "share_memory_", "detach_", "retain_grad_"})
_WHOLE = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
_PART = "_flextrain_part_of"
"""Attribute of what stands for a part of a sharded parameter, such as ``weight.data`` or ``weight[0]``."""


def is_sharded(value: Any) -> bool:
    """Whether a value is a parameter of which this process has no whole values."""
    return isinstance(value, Tensor) and hasattr(value, "ds_id") and value.numel() == 0


class WritingIntoShards(TorchFunctionMode):
    """Gathers a sharded parameter for every operation that changes it in place, and gives all processes rank 0's result.

    Models of transformers set the values of all layers when the last one is built. Sharded parameters are empty: nothing
    would be written. Each operation draws as many random numbers as on one device, because it sees the whole parameter.

    Args:
        deepspeed: the package.
        check: called with a description of the operation; raises unless all processes do the same.
    """

    def __init__(self, deepspeed: Any, check: Callable[[str], None]) -> None:
        super().__init__()
        self._deepspeed, self._check = deepspeed, check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner, indices = _owner_of(args[0] if args else None)
        if is_sharded(owner):
            if func in _WHOLE:
                return _standing_for(owner, indices)
            if name == "__getitem__":
                return _standing_for(owner, (*indices, args[1]))
        if _writes(name):
            owners = [_owner_of(value)[0] for value in (*args, *kwargs.values())]
            if sharded := list({id(owner): owner for owner in owners if is_sharded(owner)}.values()):
                self._write(func, name, sharded, args, kwargs)
                return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **kwargs)

    def _write(self, func: Any, name: str, sharded: list[Any], args: Any, kwargs: Any) -> None:
        if any(map(is_in_file, sharded)):
            raise StrategyError(
                f"model: its constructor calls {name} on a parameter of a layer that is split already and kept in files, "
                "give strategy.zero_init=False to have the model built whole"
            )
        self._check(f"{name} on {' and '.join(str(tuple(owner.ds_shape)) for owner in sharded)}")
        own = set(map(id, sharded))

        def whole(value: Any) -> Any:
            owner, indices = _owner_of(value)
            if id(owner) not in own:
                return value
            current = owner.data
            for index in indices:
                current = current[index]
            return current

        with torch.no_grad(), self._deepspeed.zero.GatheredParameters(sharded, modifier_rank=0):
            func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})


def asking_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An initialiser that asks ``WritingIntoShards`` before it looks at its tensor; torch's ask late, or never."""

    @functools.wraps(function)
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_sharded(_owner_of(tensor)[0]):
            handle_torch_function(function, (tensor,), tensor, *args, **kwargs)
            return tensor
        return function(tensor, *args, **kwargs)

    return initialise


def _owner_of(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the tensor that a value is or stands for, and the indices of the part of it."""
    found: tuple[Any, tuple[Any, ...]] = getattr(value, _PART, (value, ())) if isinstance(value, Tensor) else (None, ())
    return found


def _standing_for(parameter: Tensor, indices: tuple[Any, ...]) -> Tensor:
    empty = parameter.data
    setattr(empty, _PART, (parameter, indices))
    return empty


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITING)
