"""Build a model for ZeRO stage 3: the parameters of each layer are sharded as soon as it is built."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.comm.agreement import first_difference
from ...core.errors import StrategyError
from ...core.initializers import ALL, initializing_with
from .swapping import shard_numel
from .writing_into_shards import WritingIntoShards, asking_first, parameters_of_values


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
