"""Sources: where the whole of each parameter and buffer is, over all processes, and how it comes to those that ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.base.errors import StrategyError
from ...core.base.tensors import dtype_name
from ...core.checkpoint.chunks import FlatShard, full_tensor
from ...core.comm.agreement import gather_differing
from ...core.comm.collectives import as_sent

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
        shape: the whole shape; of a buffer it may have changed since set-up.
    """

    kind: str
    kept: str = ""
    wanted: str = ""
    shape: Sequence[int] = ()


class Sources:
    """Every tensor of a model: who has it whole, who has a shard of it, and who has nothing; making it is a collective.

    Args:
        shapes: the whole shapes of the parameters and buffers at set-up, by name; the same on every process.
        buffers: the names of buffers among them.
        own: what this process has, see ``held``.
        live: the tensors that this process computes with, by the same names.
        rank: of this process.

    Raises:
        StrategyError: the model has lost a parameter since set-up.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        buffers: Collection[str],
        own: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        rank: int,
    ) -> None:
        self._own, self._live, self._rank, self._buffers = own, own, rank, buffers
        mine = []
        for name, shape in shapes.items():
            if (found := own.get(name)) is None:
                mine.append(Source(_NOTHING))
                continue
            whole = found.shape if name in buffers else shape
            mine.append(Source(_kind_of(found), dtype_name(found.dtype), dtype_name(live[name].dtype), list(whole)))
        everyones = gather_differing(mine)
        by_name = {name: [Source(*one[i]) for one in everyones] for i, name in enumerate(shapes)}
        self.by_name = {name: every for name, every in by_name.items() if any(one.kind != _NOTHING for one in every)}
        """What each process has, by rank; without buffers that have become None since set-up."""
        if lost := next((name for name in shapes if name not in self.by_name and name not in buffers), None):
            raise StrategyError(f"full_weights: no process has model.{lost} any more, it was there at set-up")

    def replace(self, by: Mapping[Tensor, Tensor]) -> None:
        """Give out other tensors in place of live ones, of the same shapes."""
        self._own = {name: by.get(tensor, tensor) for name, tensor in self._live.items()}

    def want(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Give the floating-point tensors of these names this dtype, in place of the one that they are computed with."""
        for name in names:
            self.by_name[name] = [
                each._replace(wanted=dtype_name(dtype)) if each.kept and _dtype(each.kept).is_floating_point else each
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

        A parameter that this process has already is not copied: it shares memory with the live one.
        """
        sources, found = self.by_name[name], self._own.get(name)
        source = sources[self._rank]
        is_everywhere = all(each.kind != _NOTHING for each in sources)
        if source.kind == _WHOLE and is_everywhere and not keep:
            return None
        holder = self._holder(name)
        shape, dtype = tuple(sources[holder].shape), _dtype(sources[holder].wanted)
        value: Tensor | None = None
        with torch.no_grad():
            if found is not None:
                value = _gathered(found, device).reshape(shape) if source.kind in _GATHERING else found.detach()
                value = value.to(device, dtype)
                if keep and name in self._buffers and _share_memory(value, self._live[name]):
                    value = value.clone()  # forward writes to buffers
            if not is_everywhere:
                # A process that has it leaves its own as it is: a replica of the holder's may be another.
                sends = value if self._rank == holder else None
                passed = torch.empty(shape, dtype=dtype, device=device) if sends is None else sends.contiguous()
                if passed.numel():
                    dist.broadcast(as_sent(passed.view(-1)), holder)
                value = passed if value is None else value
        return value if keep else None

    def _holder(self, name: str) -> int:
        """Return the rank that gives the tensor to those that have nothing of it: of a buffer the one that saves it."""
        return next(rank for rank, each in enumerate(self.by_name[name]) if each.kind != _NOTHING)

    def _is_made(self, name: str, rank: int) -> bool:
        source = self.by_name[name][rank]
        return source.kind != _WHOLE or source.kept != source.wanted or name in self._buffers

    def _size(self, name: str) -> int:
        source = self.by_name[name][self._holder(name)]
        return math.prod(source.shape) * _dtype(source.wanted).itemsize

    def _passing(self, name: str) -> int:
        """What a gathered tensor is put together from, and the tensor as it is kept if that is another dtype."""
        sources = [source for source in self.by_name[name] if source.kind != _NOTHING]
        size = math.prod(sources[0].shape) * max(_dtype(source.kept).itemsize for source in sources)
        is_cast = any(source.kept != source.wanted for source in sources)
        is_received = 1 < len(sources) < len(self.by_name[name])  # and dropped, where it is already
        return (max(_GATHERING.get(source.kind, 0) for source in sources) + is_cast + is_received) * size


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


def _share_memory(value: Tensor, live: Tensor) -> bool:
    own = live.to_local() if isinstance(live, DTensor) else live
    return value.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
