"""Build a model for ZeRO stage 3: the parameters of each layer are sharded as soon as it is built."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from ...core.base.errors import StrategyError
from ...core.base.initializers import ALL, initializing_with
from ...core.base.trees import tree_map_only
from ...core.comm.agreement import first_difference
from ...core.model.deferred import LooksAtValues
from ...core.torch_compat.torch_private import tree_flatten
from .swapping import is_in_file, shard_numel

# Let a constructor set values of parameters that ZeRO stage 3 has sharded already: they are gathered for the call.
#
# One that looks at their values has to be built with memory.


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


@contextlib.contextmanager
def split_at_once(
    deepspeed: Any,
    keys: dict[str, Any],
    world_size: int,
    largest: int | None,
    generators: dict[torch.Generator, Tensor],
) -> Iterator[None]:
    """Shard the parameters of every layer built inside, with rank 0's values; needs the process group.

    It raises LooksAtValues if what is built there looks at values of sharded parameters.

    Args:
        keys: DeepSpeed's configuration, for float32 in any case: masters start from these values, and ZeRO must not cast
            buffers.
        world_size: number of processes.
        largest: the largest possible shard, in elements; None: there is no limit.
        generators: gets the user's generators that are drawn from, with their states before.
    """
    split = _init(deepspeed, keys)
    alike = _Alike(split, world_size, largest)
    asking = initializing_with(asking_first, ALL)
    writing = WritingIntoShards(deepspeed, alike.check)
    writing.generators = generators
    with split, asking, writing, _copies_are_split(split), parameters_of_values():
        try:
            yield
            alike.check("nothing")
        except RuntimeError as error:
            if "self.stride(-1) must be 1" in str(error):
                raise StrategyError(
                    "model: DeepSpeed cannot split a parameter that is not contiguous while the model is built, call contiguous() before, "
                    "or give strategy.zero_init=False to have the model built whole"
                ) from error
            if "self.dim() cannot be 0" not in str(error):
                raise
            # DeepSpeed 0.19.8 broadcasts a byte view of the parameter, which a scalar does not have.
            raise StrategyError(
                "model: DeepSpeed cannot split a parameter without dimensions while the model is built, give it shape "
                "(1,), or strategy.zero_init=False to have the model built whole"
            ) from error


def _init(deepspeed: Any, keys: dict[str, Any]) -> Any:
    # With the argument dtype=float32, 0.19.8 would use bfloat16; it keeps the configuration's float32. By default it would
    # give every new tensor this dtype, also what the constructor makes in another one.
    own_dtypes = [deepspeed.zero.DeepSpeedTensorOverride.device]
    return deepspeed.zero.Init(config_dict_or_path=keys, tensor_overrides=own_dtypes)


def drop_values(model: nn.Module) -> None:
    """Free the memory of a model's parameters, which get rank 0's values in ``split_whole``."""
    for parameter in model.parameters():
        if parameter.ndim:
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def split_whole(deepspeed: Any, keys: dict[str, Any], model: nn.Module) -> None:
    """Shard the parameters of a model, with rank 0's values, one after the other; a collective."""
    split = _init(deepspeed, keys)
    for parameter in model.parameters():
        if parameter.ndim:  # DeepSpeed shards others when it makes the engine only
            # contiguous() leaves a stride of 0 to one element, of which DeepSpeed cannot take the bytes.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format).to(split.local_device)
            split._zero_init_param(parameter)


@contextlib.contextmanager
def _copies_are_split(split: Any) -> Iterator[None]:
    """Make ``copy.deepcopy`` of a sharded parameter a sharded parameter too; torch's would be empty, without its shard."""
    usual: Any = nn.Parameter.__deepcopy__

    def deepcopy(parameter: Any, memo: dict[int, Any]) -> Any:
        if not hasattr(parameter, "ds_id") or id(parameter) in memo:
            return usual(parameter, memo)
        parameter.all_gather([parameter])
        copied = nn.Parameter(parameter.data.clone(), parameter.requires_grad)
        parameter.partition([parameter])
        split._zero_init_param(copied)
        memo[id(parameter)] = copied
        return copied

    nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = usual  # type: ignore[method-assign]


class _Alike:
    """Checks that all processes build the same layers, before the parameters of a layer are broadcast and sharded."""

    def __init__(self, split: Any, world_size: int, largest: int | None) -> None:
        self._number = 0
        self._world_size, self._largest = world_size, largest
        self._split = split._post_init_method
        split._post_init_method = self._after

    def _after(self, module: nn.Module) -> None:
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not hasattr(parameter, "ds_id")
        }
        if own:
            forms = [f"{name} {'x'.join(map(str, p.shape))} {str(p.dtype)[6:]}" for name, p in own.items()]
            self.check(f"{type(module).__name__} with {', '.join(forms)}")
            self._check_sizes(module, own)
        self._split(module)

    def _check_sizes(self, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
        for name, parameter in own.items() if self._largest is not None else ():
            if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                raise StrategyError(
                    f"strategy.zero_optimization.offload_param: {name} in a {type(module).__name__} is "
                    f"{str(parameter.dtype)[6:]}, and DeepSpeed writes float32 while the model is built; build it in float32, or "
                    "give strategy.zero_init=False"
                )
            if (numel := shard_numel(parameter, self._world_size)) > (self._largest or 0):
                raise StrategyError(
                    f"strategy.zero_optimization.offload_param.buffer_size: {self._largest} is not enough to build the model, a "
                    f"process's shard of {name} in a {type(module).__name__} has {numel} elements; give at least as many"
                )

    def check(self, layer: str) -> None:
        """Raise StrategyError if another process builds a different layer; a collective."""
        self._number += 1
        if found := first_difference({f"layer {self._number}": layer}):
            raise StrategyError(f"model: {found}; every process has to build the same model")


def restore_linear() -> None:
    """Restore torch's ``linear``, which stage 3 replaces for good; its own fails under another device's autocast."""
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    original = getattr(getattr(module, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original
