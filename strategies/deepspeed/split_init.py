"""Give a model that was built without memory its values for ZeRO stage 3: one parameter after the other, each sharded at once."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ...core.base.errors import StrategyError
from ...core.torch_compat.torch_private import swappable
from ..sharding import has_shards
from ..without_memory import ModelWithoutMemory, give_memory
from .engine_internals import is_partitioned, own_shard
from .swapping import is_in_file


class SplitInit:
    """Shards the parameters of a model that are on the meta device, with the values that its constructor has computed.

    Args:
        deepspeed: the package.
        keys: DeepSpeed's configuration, for float32 in any case: masters start from these values.
        device: of the parameters that are not sharded.
    """

    def __init__(self, deepspeed: Any, keys: dict[str, Any], device: torch.device) -> None:
        self._deepspeed, self._device = deepspeed, device
        # With the argument dtype=float32, 0.19.8 would use bfloat16; it keeps the configuration's float32.
        self._split = deepspeed.zero.Init(config_dict_or_path=keys)

    def run(self, model: nn.Module, memory: ModelWithoutMemory) -> None:
        """Shard all of them, one after the other; a collective."""
        with self._split:  # it puts a linear in torch's place that keeps no whole weight from forward to backward
            pass
        with swappable(model):
            for parameter in [*model.parameters()]:
                if parameter.is_meta:
                    give_memory(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device))
                    if has_shards(parameter):  # DeepSpeed shards others when it makes the engine only
                        self._split._zero_init_param(parameter)
                        _check_dtype(parameter)
        memory.initialise(model, _read, _write)


def _read(parameter: nn.Parameter) -> Tensor:
    return (own_shard(parameter).full_tensor() if is_partitioned(parameter) else parameter.detach()).cpu()


def _write(parameter: nn.Parameter, whole: Tensor) -> None:
    if not is_partitioned(parameter):
        parameter.detach().copy_(whole)
        return
    own = own_shard(parameter)
    local = own.to_local()
    local.copy_(whole.reshape(-1)[own.start : own.start + local.numel()])


def _check_dtype(parameter: Any) -> None:
    """Raise StrategyError for a parameter in a file that holds another dtype."""
    if is_in_file(parameter) and parameter.dtype is not torch.float32:
        raise StrategyError(
            f"strategy.zero_optimization.offload_param: a parameter of shape {tuple(parameter.ds_shape)} is {str(parameter.dtype)[6:]}, "
            "and DeepSpeed writes float32 while the model is built; build it in float32, or give strategy.zero_init=False"
        )


def restore_linear() -> None:
    """Restore torch's ``linear``, which stage 3 replaces for good; its own fails under another device's autocast."""
    module: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    original = getattr(getattr(module, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if original is not None:
        torch.nn.functional.linear = original
