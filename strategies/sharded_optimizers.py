"""Whether optimizers can have parameters that are DTensors, and how what they keep of one lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor.placement_types import Placement

from ..core.comm import collectives as dist
from ..core.errors import StrategyError
from ..optim.adapters.trial import Samples, why_not_dtensors
from ..optim.wrapper import OptimWrapper

_ROWS_EACH = 16


class ShardedOptimizers:
    """The optimizers of a run whose parameters are sharded by their first dimension over the last dimension of a mesh.

    Args:
        mesh: with copies of the shards along its first dimension, if it has two.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        self._layouts: dict[int, dict[tuple[int, str], tuple[Placement, ...]]] = {}

    def check(self, wrapper: OptimWrapper) -> None:
        """Try the optimizer on small parameters that lie as the model's do, unless it is known to do without; collective.

        Raises:
            StrategyError: on every process, if what comes out on any is not what comes of whole parameters.
        """
        if wrapper.adapter.is_elementwise:
            return
        # Not divisible, since a model's parameters need not be; and with a part for every process.
        samples = Samples.like(wrapper.optimizer, rows=_ROWS_EACH * self._mesh.size(-1) - 1)
        reason, self._layouts[id(wrapper)] = why_not_dtensors(wrapper.make_another, samples, self._spread)
        if found := next((one for one in dist.all_gather_object(reason) if one is not None), None):
            raise StrategyError(
                f"{wrapper.where}.optimizer: {type(wrapper.optimizer).__name__} {found}; FSDP spreads every parameter over "
                "processes, choose AdamW, or DDPStrategy"
            )

    def _spread(self, whole: Tensor) -> Tensor:
        if whole.ndim == 0:
            return whole  # as FSDP leaves them
        size, index = self._mesh.size(-1), self._mesh.get_local_rank(-1)
        local = whole.chunk(size)[index].contiguous()
        spread = DTensor.from_local(
            local, self._mesh, self._placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return spread.to(whole.device)

    def empty_state(self, wrapper: OptimWrapper, parameter: Tensor, key: str, info: Any) -> Tensor | None:
        """A tensor for state of ``info.shape`` and ``info.dtype``, lying as the optimizer's own; None if that is whole."""
        placements = self._layouts.get(id(wrapper), {}).get((parameter.ndim, key))
        if placements is None:
            return None
        made = empty_dtensor(info.shape, dtype=info.dtype, device_mesh=self._mesh, placements=placements)
        return torch.empty_like(made, device=parameter.device)
