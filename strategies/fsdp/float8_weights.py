"""Weights of layers that compute in float8: FSDP gathers them as float8, a byte for each number and a scale for each weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...core.comm import collectives as dist
from ...core.torch_compat.dtensor_private import gather_as, local_tensor
from ..sharding import computes_in_float8


class Float8Weight:
    """One such weight.

    Attributes:
        scale: a float32 tensor without dimensions, that of all processes' shards; None: each gathering asks all processes for it.
        dtype: in which it is gathered.

    Args:
        layer: torchao's Float8Linear.
    """

    def __init__(self, layer: Any) -> None:
        self.scale: Tensor | None = None
        self.dtype: torch.dtype = layer.config.cast_config_weight.target_dtype
        self._products = layer.linear_mm_config

    def __call__(self, shard: Tensor) -> Tensor:
        """Return ``shard`` as torchao's tensor that gathers itself in float8."""
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        made: Tensor = WeightWithDynamicFloat8CastTensor(shard, self._products, self.dtype, self.scale)
        return made


class Float8Weights:
    """The weights of a sharded model that are gathered in float8; what the model holds stays in high precision.

    A layer casts such a weight to float8 anyway, with one scale for all of it, so that it computes the same. Weights that are
    scaled by rows, and those that another module has too, are gathered as all others.

    Args:
        units: the modules that FSDP gathers, with their parameters on their device.
        device: on which gathering computes.
    """

    def __init__(self, units: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        self._scaled: dict[DeviceMesh, list[tuple[DTensor, Float8Weight]]] = {}
        for unit in units:
            for parameter, weight in gather_as(unit, _float8_weight):
                self._scaled.setdefault(parameter.device_mesh, []).append((parameter, weight))

    def __len__(self) -> int:
        return sum(map(len, self._scaled.values()))

    @property
    def have_scales(self) -> bool:
        """Whether the scales are known; on every process or on none."""
        return all(weight.scale is not None for members in self._scaled.values() for _, weight in members)

    def forget(self) -> None:
        """Drop the scales, because the weights change."""
        for members in self._scaled.values():
            for _, weight in members:
                weight.scale = None

    @torch.no_grad()
    def scale(self) -> None:
        """Find the scales of all weights; a collective of one small message for each dimension of a mesh that divides them."""
        from torchao.float8.float8_utils import amax_to_scale

        for mesh, members in self._scaled.items():
            shards = [local_tensor(parameter) for parameter, _ in members]
            norms = [
                torch.linalg.vector_norm(each if each.numel() else each.new_zeros(1), torch.inf) for each in shards
            ]
            largest = torch.stack(norms).to(self._device, torch.float32)
            for dim in range(mesh.ndim):
                if any(parameter.placements[dim].is_shard() for parameter, _ in members):
                    dist.all_reduce(largest, "max", mesh.get_group(dim))
            scales = amax_to_scale(largest, members[0][1].dtype)
            for (_, weight), scale in zip(members, scales.unbind(), strict=True):
                weight.scale = scale


def _float8_weight(layer: nn.Module, name: str) -> Float8Weight | None:
    if name != "weight" or not computes_in_float8(layer):
        return None
    kind = layer.config.cast_config_weight  # type: ignore[union-attr]  # torchao's
    return Float8Weight(layer) if kind.scaling_granularity.value == "tensorwise" else None  # type: ignore[union-attr]
