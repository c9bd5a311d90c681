"""Sources: where the whole of each parameter and buffer is, over all processes, and how it comes to those that ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.checkpoint.flat_shard import FlatShard
from ...core.comm.joint_errors import gather_differing
from ...core.dtensor_chunks import full_tensor
from ...core.errors import StrategyError

_WHOLE, _ROWS, _SHARD, _NOTHING = "whole", "rows", "shard", "nothing"
_GATHERING = {_ROWS: 1, _SHARD: 3}
"""How many times its size gathering a tensor takes for a moment, beside the tensor itself. Rows of all processes are one
after the other in memory as they come. Other shards are made contiguous, sent, and put together; what was sent for the
tensor before may not be free yet."""


class Source(NamedTuple):
    """What one process has of a tensor.

    Attributes:
        kind: all of it, some of its rows, another shard of it, or nothing.
        kept: dtype in which the process has it; "" if it has nothing.
        wanted: dtype in which it computes.
    """

    kind: str
    kept: str
    wanted: str


class Sources:
    """Every tensor of a model: who has it whole, who has a shard of it, and who has nothing; making it is a collective.

    Args:
        shapes: the whole shapes, by name; the same on every process.
        own: what this process has, see ``held``.
        live: the tensors that this process computes with, by the same names.
        rank: of this process.

    Raises:
        StrategyError: the model has lost a tensor since set-up.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], own: Mapping[str, Tensor], live: Mapping[str, Tensor], rank: int
    ) -> None:
        self._shapes, self._own, self._rank = shapes, own, rank
        mine = []
        for name in shapes:
            if name not in own:
                mine.append(Source(_NOTHING, "", ""))
                continue
            kind = _kind_of(own[name])
            mine.append(Source(kind, _name_of(own[name].dtype), _name_of(live[name].dtype)))
        everyones = gather_differing(mine)
        self.by_name = {name: [Source(*one[i]) for one in everyones] for i, name in enumerate(shapes)}
        for name, sources in self.by_name.items():
            if all(source.kind == _NOTHING for source in sources):
                raise StrategyError(f"full_weights: no process has model.{name} any more, it was there at set-up")

    def want(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Give the floating-point tensors of these names this dtype, in place of the one that they are computed with."""
        for name in names:
            self.by_name[name] = [
                each._replace(wanted=_name_of(dtype)) if each.kept and _dtype(each.kept).is_floating_point else each
                for each in self.by_name[name]
            ]

    @property
    def are_here(self) -> bool:
        """Whether every process has all tensors whole, as it computes with them."""
        return all(
            source.kind == _WHOLE and source.kept == source.wanted
            for sources in self.by_name.values()
            for source in sources
        )

    def bytes_of(self, names: Iterable[str], rank: int) -> int:
        """Return the memory that the whole tensors take on a process, beside what it has already."""
        return sum(self._size(name) for name in names if self._is_made(name, rank))

    def passing_bytes(self, names: Iterable[str]) -> int:
        """Return the memory that making one of the tensors takes for a moment, beside the tensor itself."""
        return max((self._passing(name) for name in names), default=0)

    def make(self, name: str, keep: bool, device: torch.device) -> Tensor | None:
        """Return the whole tensor, or None on a process that does not ``keep`` it; a collective.

        One that this process has already is not copied: it shares memory with the live one.
        """
        sources, found = self.by_name[name], self._own.get(name)
        source = sources[self._rank]
        is_everywhere = all(each.kind != _NOTHING for each in sources)
        if source.kind == _WHOLE and is_everywhere and not keep:
            return None
        holder = next(rank for rank, each in enumerate(sources) if each.kind != _NOTHING)
        dtype = _dtype(sources[holder].wanted)
        value: Tensor | None = None
        with torch.no_grad():
            if found is not None:
                value = found.detach()
                if source.kind in _GATHERING:
                    value = _gathered(found, device).reshape(self._shapes[name])
                value = value.to(dtype)
            if not is_everywhere:
                if value is None:
                    value = torch.empty(self._shapes[name], dtype=dtype, device=device)
                _broadcast(value, holder, device)
        return value if keep else None

    def _is_made(self, name: str, rank: int) -> bool:
        source = self.by_name[name][rank]
        return source.kind != _WHOLE or source.kept != source.wanted

    def _size(self, name: str) -> int:
        wanted = next(source.wanted for source in self.by_name[name] if source.wanted)
        return math.prod(self._shapes[name]) * _dtype(wanted).itemsize

    def _passing(self, name: str) -> int:
        """What a gathered tensor is put together from, and the tensor as it is kept if that is another dtype."""
        sources = [source for source in self.by_name[name] if source.kind != _NOTHING]
        size = math.prod(self._shapes[name]) * max(_dtype(source.kept).itemsize for source in sources)
        is_cast = any(source.kept != source.wanted for source in sources)
        return (max(_GATHERING.get(source.kind, 0) for source in sources) + is_cast) * size


def held(
    shapes: Mapping[str, torch.Size],
    live: Mapping[str, Tensor],
    state: Callable[[], Mapping[str, Tensor]],
    parameters: Collection[str],
) -> dict[str, Tensor]:
    """Return what this process has of each tensor: the live one if it tells what the whole is, else that of the state.

    Args:
        shapes: the whole shapes, by name.
        live: the tensors that this process computes with.
        state: returns ``model_state()``, for those that are neither whole nor DTensors.
        parameters: names of the parameters; the shapes of buffers may change.

    Raises:
        StrategyError: neither tells.
    """
    found: dict[str, Tensor] = {}
    kept: Mapping[str, Tensor] | None = None
    for name, shape in shapes.items():
        tensor = live.get(name)
        if tensor is None:
            continue
        if isinstance(tensor, DTensor) or name not in parameters or (not _is_shard(tensor) and tensor.shape == shape):
            found[name] = tensor
            continue
        kept = state() if kept is None else kept
        if name not in kept or kept[name].shape.numel() != shape.numel():
            raise StrategyError(
                f"full_weights: model.{name} has shape {tuple(tensor.shape)} here, {tuple(shape)} at set-up, and the "
                "strategy's model_state() does not say how it is sharded"
            )
        found[name] = kept[name]
    return found


def _kind_of(tensor: Tensor) -> str:
    if not _is_shard(tensor):
        return _WHOLE
    sharding = [one for one in tensor.placements if not one.is_replicate()] if isinstance(tensor, DTensor) else []
    is_rows = not sharding or (len(sharding) == 1 and sharding[0].is_shard(0))
    return _ROWS if is_rows else _SHARD


def _is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, (DTensor, FlatShard))


def _gathered(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole of a shard, on the device, also of one that is kept in the host's memory."""
    here = tensor.detach() if tensor.device.type == device.type else tensor.detach().to(device)
    return full_tensor(here) if isinstance(here, DTensor) else cast(FlatShard, here).full_tensor()


def _broadcast(value: Tensor, holder: int, device: torch.device) -> None:
    sent = value.to(device).contiguous()  # the same tensor, if it is there and dense
    dist.broadcast(torch.view_as_real(sent) if sent.is_complex() else sent, holder)
    if sent is not value:
        value.copy_(sent)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
