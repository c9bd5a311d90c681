"""Let a constructor set values of parameters that ZeRO stage 3 has sharded already: they are gathered for the call.

One that looks at their values has to be built with memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from ...core.deferred import LooksAtValues
from ...core.errors import StrategyError
from ...core.torch_private import tree_flatten
from ...core.trees import tree_map_only
from .swapping import is_in_file

_NO_WRITING = frozenset({"requires_grad_", "share_memory_", "detach_", "retain_grad_"})
_WHOLE = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OF_WHOLE = frozenset({"shape", "ndim", "nbytes", "T", "mT", "H", "mH", "real", "imag"})
"""Properties of a tensor that a parameter without values has others of."""
_OF_OBJECT = frozenset(
    {"__set__", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__reduce_ex__"}
)
"""Functions that need neither shape nor values."""
_BETWEEN = (__name__, "torch._tensor", "torch.functional", "torch.overrides")
_AROUND = ("wrapped_fn", "wrapper")
"""Modules, and functions of DeepSpeed around torch's and around constructors, that stand between a call and who made it."""
_PART = "_flextrain_part_of"
"""Attribute of what stands for a part of a sharded parameter, such as ``weight.data`` or ``weight[0]``."""


def is_sharded(value: Any) -> bool:
    """Whether a value is a parameter of which this process has no whole values."""
    # Not by its size, which WritingIntoShards answers for the whole.
    return isinstance(value, Tensor) and hasattr(value, "ds_id") and value.ds_status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]


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
        self.generators: dict[torch.Generator, Tensor] = {}
        """The user's generators that were drawn from, with their states before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if isinstance(generator := kwargs.get("generator"), torch.Generator):
            self.generators.setdefault(generator, generator.get_state())
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
        elif any(is_sharded(_owner_of(value)[0]) for value in tree_flatten((args, kwargs))[0]) and _reads(func, name):
            return _answer(func, name, args, kwargs)
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


def _reads(func: Any, name: str) -> bool:
    """Whether a function needs the shape or the values of a parameter; not what DeepSpeed itself calls."""
    needs = name not in _OF_OBJECT | _NO_WRITING or func == _SET_DATA
    if name == "__get__":
        needs = getattr(func.__self__, "__name__", "") in _OF_WHOLE
    frame = sys._getframe(1)
    while (
        needs
        and frame.f_back is not None
        and (frame.f_globals.get("__name__", "").startswith(_BETWEEN) or frame.f_code.co_name in _AROUND)
    ):
        frame = frame.f_back
    return needs and not frame.f_globals.get("__name__", "").startswith("deepspeed.")


def _answer(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what a function of parameters says that depends on their shapes only.

    Raises:
        LooksAtValues: it depends on their values.
    """

    def without_values(value: Tensor) -> Tensor:
        owner, indices = _owner_of(value)
        if not is_sharded(owner):
            return value
        found = torch.empty(owner.ds_shape, dtype=owner.dtype, device="meta")
        for index in indices:
            found = found[index]
        return found

    args, kwargs = tree_map_only(Tensor, without_values, (args, kwargs))
    try:
        found = func(*args, **kwargs)
    except Exception as error:
        raise LooksAtValues(f"{name}: {' '.join(str(error).split())}") from error
    if func == _SET_DATA or any(isinstance(value, Tensor) for value in tree_flatten(found)[0]):
        raise LooksAtValues(name)
    return found


@contextlib.contextmanager
def parameters_of_values() -> Iterator[None]:
    """Context in which making a parameter from a sharded one, of which torch would make an empty one, raises LooksAtValues."""
    usual: Any = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_sharded(_owner_of(data)[0]):
            raise LooksAtValues(cls.__name__)
        return usual(cls, data, *args, **kwargs)

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = usual  # type: ignore[method-assign]


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITING)
