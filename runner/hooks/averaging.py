"""WeightAverage: running averages of a model's weights, which can be swapped into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.torch_private import foreach_copy_, foreach_lerp_

_HALF = (torch.float16, torch.bfloat16)


class WeightAverage:
    """Averages of live tensors, with the same layout; every process updates its own shards, without synchronisation.

    Args:
        tensors: the live tensors by name; they stay the same objects while the model trains.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._model = [tensor.detach() for tensor in tensors.values()]
        with torch.no_grad():
            # With a momentum of 1e-4 every change would be lost in the rounding of a half-precision average.
            self._averages = [
                tensor.to(torch.float32) if tensor.dtype in _HALF else tensor.clone() for tensor in self._model
            ]
        self._own: list[Tensor] | None = None

    @property
    def averages(self) -> dict[str, Tensor]:
        """The averages by name; the live tensors, not copies."""
        return dict(zip(self._names, self._averages, strict=True))

    @property
    def is_swapped_in(self) -> bool:
        """True while the model holds the averages."""
        return self._own is not None

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Make the averages equal to the weights."""
        _copy(self._averages, self._model)

    @torch.no_grad()
    def lerp_to_model(self, weight: float) -> None:
        """Move the averages towards the weights by the share ``weight`` of the distance."""
        move_towards(self._averages, self._model, weight)

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Copy the averages by name; a tensor without one takes the model's weights."""
        for name, mine, tensor in zip(self._names, self._averages, self._model, strict=True):
            source = averages.get(name, tensor)
            # The source may be the average itself, when it was loaded in place.
            if source is not mine:
                mine.copy_(source)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages into the model; no effect if they are there already."""
        if self._own is None:
            own = [tensor.clone() for tensor in self._model]
            _copy(self._model, self._averages)
            self._own = own

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the model's own weights, bit for bit."""
        if self._own is not None:
            _copy(self._model, self._own)
            self._own = None


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    foreach_copy_(list(map(local_part, to)), list(map(local_part, source)))


def move_towards(averages: Sequence[Tensor], tensors: Sequence[Tensor], share: float) -> None:
    """Move averages towards tensors of the same layout by ``share`` of the distance; they may have another dtype."""
    pairs = list(zip(map(local_part, averages), map(local_part, tensors), strict=True))
    alike = [(average, tensor) for average, tensor in pairs if average.dtype == tensor.dtype]
    if alike:
        foreach_lerp_([average for average, _ in alike], [tensor for _, tensor in alike], share)
    if len(alike) < len(pairs):
        for average, tensor in pairs:
            if average.dtype != tensor.dtype:
                average.lerp_(tensor.to(average.dtype), share)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor, which shares its memory; any other tensor itself."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()
