"""Replicas of tensors are equal on all processes, and frozen ones are those of the checkpoint.

Otherwise a checkpoint would mix replicas that have diverged, because every process writes a share of the tensors. Rank 0
gets some hashes from each process, and lists of fingerprints only from those that differ from others in the same position.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.errors import counted
from ..base.tensors import SHARES, fingerprints, of_bits, of_bytes, of_chunk, of_name, replica_of
from ..comm.agreement import gather_differing
from ..comm.collectives import all_reduce, is_alone, side_group
from ..device.device import HostBuffer
from ..torch_compat.torch_private import version_of
from .chunks import FlatShard, Offsets, held_chunks, is_cut_by_rule, is_ordinary

_ReplicaId = tuple[int, int]  # hashes of the position in a mesh, and of the tensor's name


class Replicas:
    """Fingerprints of this process's replicas: ordinary tensors, and DTensors that an axis of their mesh replicates.

    Args:
        tensors: key to tensor, for all tensors of this process.
        share: hash only every fourth block of large tensors on the CPU, beginning with this block, 0 to 3; None: hash
            all blocks. Tensors on other devices are hashed completely, because that costs little.
        compared: keys of tensors that need no fingerprint.
    """

    def __init__(self, tensors: Mapping[str, Tensor], share: int | None = None, compared: Collection[str] = ()) -> None:
        self._share = share
        left = {key: tensor for key, tensor in tensors.items() if key not in compared}
        self._open: dict[str, tuple[Tensor, str]] = {}
        for key, tensor in left.items():
            if (shard := replica_of(tensor)) is not None:
                local, coordinates = shard
                self._open[key] = local, _position(tensor, coordinates)
        self._prints: dict[_ReplicaId, int] = {}
        self._names = {of_name(key): key for key in tensors}
        self._later: dict[str, _ReplicaId] = {}
        self._arriving: list[tuple[list[_ReplicaId], HostBuffer, Tensor]] = []  # from devices, to be waited for

    def look(self, later: Iterable[str] = ()) -> None:
        """Compute the missing fingerprints, except those of ``later``, whose copies ``look_at`` will get.

        A device computes those of its tensors in the order of its work, and the host does not wait for them.
        """
        # Only those on the CPU: a device hashes faster than it copies, and compared hashes need the same arithmetic.
        waiting = {key for key in later if key in self._open and self._open[key][0].device.type == "cpu"}
        replicas = {key: (of_name(position), of_name(key)) for key, (_, position) in self._open.items()}
        self._later = {key: replicas[key] for key in waiting}
        on_host: dict[str, Tensor] = {}
        by_device: dict[torch.device, dict[_ReplicaId, Tensor]] = {}
        for key, (tensor, _) in self._open.items():
            if tensor.device.type != "cpu":
                by_device.setdefault(tensor.device, {})[replicas[key]] = of_bits(tensor)
            elif key not in waiting:
                on_host[key] = tensor
        self._prints |= {replicas[key]: value for key, value in fingerprints(on_host, self._share).items()}
        for sums in by_device.values():
            buffer = HostBuffer()
            self._arriving.append((list(sums), buffer, buffer.copy([torch.stack(list(sums.values()))])[0]))
        self._open.clear()

    def look_at(self, key: str, tensor: Tensor) -> None:
        """Compute a fingerprint that ``look`` has left for later, from a copy on the host."""
        if (replica := self._later.pop(key, None)) is not None:
            self._prints[replica] = of_bytes(tensor, self._share)

    def summary(self) -> bytes:
        """For each position where this process holds shards: hashes of the position, of the tensors' names, of their values."""
        for replicas, buffer, numbers in self._arriving:
            buffer.wait()
            self._prints |= {
                replica: number % 2**64 for replica, number in zip(replicas, numbers.tolist(), strict=True)
            }
        self._arriving.clear()
        positions: dict[int, list[tuple[int, int]]] = {}
        for (position, name), value in sorted(self._prints.items()):
            positions.setdefault(position, []).append((name, value))
        rows = [
            (position, *(_hash(column) for column in zip(*found, strict=True))) for position, found in positions.items()
        ]
        return np.array(rows, dtype=np.uint64).tobytes()

    def packed(self) -> bytes:
        """All fingerprints as bytes, after ``summary``: position, name and value of each."""
        rows = [(*replica, value) for replica, value in sorted(self._prints.items())]
        return np.array(rows, dtype=np.uint64).tobytes()

    def difference(self, summaries: Summaries, packed: Sequence[bytes], keys: Iterable[str] = ()) -> str | None:
        """A text that names the first tensor whose replicas differ, and the ranks; None if all are equal.

        Args:
            summaries: of all processes.
            packed: result of ``packed`` on each of ``summaries.unlike``.
            keys: keys of all processes; this one may have only some of them.
        """
        held: dict[_ReplicaId, dict[int, list[int]]] = {}  # the speakers with each value
        for speaker, fingerprints_ in zip(summaries.unlike, packed, strict=True):
            for position, name, value in np.frombuffer(fingerprints_, dtype=np.uint64).reshape(-1, 3).tolist():
                held.setdefault((position, name), {}).setdefault(value, []).append(speaker)
        split: dict[int, list[list[int]]] = {}
        for (position, name), kinds in held.items():
            if len(kinds) > 1 and name not in split:
                owners = ({r for s in speakers for r in summaries.alike(s, position)} for speakers in kinds.values())
                split[name] = [sorted(ranks) for ranks in owners]
        if not split:
            return None
        names = self._names | {of_name(key): key for key in keys}
        order = list(names)
        first = min(split, key=order.index)
        most, *others = sorted(split[first], key=lambda owners: (-len(owners), owners))
        stray = ", ".join(map(str, sorted(rank for owners in others for rank in owners)))
        more = f" (and {counted(len(split) - 1, 'tensor')} more)" if len(split) > 1 else ""
        return f"{names[first]} differs between processes, rank {stray} from rank {most[0]}{more}"


class Summaries:
    """What all processes have said of their replicas.

    Args:
        everyones: result of ``Replicas.summary`` on each process.

    Attributes:
        unlike: one process of each kind, in positions where there are several kinds: their values differ, or they hold other
            tensors, such as stages do, some of which may be the same.
    """

    def __init__(self, everyones: Sequence[bytes]) -> None:
        said: dict[bytes, list[int]] = {}
        for rank, summary in enumerate(everyones):
            said.setdefault(summary, []).append(rank)
        self._kinds: dict[int, dict[tuple[int, int], list[int]]] = {}  # in a position, the ranks with these hashes
        for summary, ranks in said.items():
            for position, *hashes in np.frombuffer(summary, dtype=np.uint64).reshape(-1, 3).tolist():
                self._kinds.setdefault(position, {}).setdefault((hashes[0], hashes[1]), []).extend(ranks)
        several = [kinds for kinds in self._kinds.values() if len(kinds) > 1]
        self.unlike: Sequence[int] = sorted({min(ranks) for kinds in several for ranks in kinds.values()})

    def alike(self, rank: int, position: int) -> Sequence[int]:
        """The processes that hold the same tensors in a position as this rank, with the same values."""
        return next(ranks for ranks in self._kinds[position].values() if rank in ranks)


def _position(tensor: Tensor, coordinates: tuple[int, ...]) -> str:
    """The mesh and the coordinates that say which shard of a tensor it is: the same for all replicas of the shard."""
    if not coordinates:
        return ""
    array = cast(DTensor, tensor)
    replicated = [placement.is_replicate() for placement in array.placements]
    return f"{coordinates} of {tuple(array.device_mesh.shape)}, replicated {replicated}"


def _hash(numbers: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(numbers, dtype=np.uint64).tobytes())


def share_of(name: str) -> int:
    """The ``share``, 0 to 3, that a save of this name hashes; equal on all processes, different for other names."""
    return of_name(name) % SHARES


# FrozenPrints: fingerprints of the parameters that a checkpoint leaves out, the same for every layout over processes.


_MODULUS = 2**40
"""Sums below it can be added over 2**23 processes in 64 bits."""

_Chunks = dict[str, dict[Offsets, Tensor]]


class FrozenPrints:
    """Computes fingerprints, and again only after something has written to a tensor; one object for a model."""

    def __init__(self) -> None:
        self._written: list[tuple[object, ...]] = []
        self._prints: dict[str, str] | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return a dtype and a hash of dtype, shape and bits for each tensor on any process, by name; a collective.

        Each process adds up what it holds, and the sums are added over the processes. A tensor of a class with a layout of its
        own, as quantised ones are, has none.

        Args:
            tensors: this process's, whole or sharded; a shard may be on several processes, if every shard is on as many.
        """
        known = {
            name: tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, FlatShard) or is_ordinary(tensor) or is_cut_by_rule(tensor)
        }
        chunks = {name: held_chunks(name, tensor) for name, tensor in known.items()}
        written: list[tuple[object, ...]] = [
            (name, offsets, chunk.data_ptr(), 0 if chunk.is_inference() else version_of(chunk))
            for name, held in chunks.items()
            for offsets, chunk in held.items()
        ]
        has_changed = self._prints is None or written != self._written
        if any(gather_differing(has_changed)):
            self._prints, self._written = _prints(known, chunks), written
        assert self._prints is not None
        return self._prints


def _prints(tensors: Mapping[str, Tensor], chunks: _Chunks) -> dict[str, str]:
    own = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in sorted(tensors.items())
    ]
    every = {name: (dtype, shape) for everyones in gather_differing(own) for name, dtype, shape in everyones}
    # The device is explicit, because the user may have set another default device.
    counts = torch.tensor([sum(c.numel() for c in chunks.get(name, {}).values()) for name in every], device="cpu")
    both = torch.stack([_sums(every, chunks), counts.long()])
    if not is_alone():
        all_reduce(both, group=side_group())
    found: dict[str, str] = {}
    for (name, (dtype, shape)), total, count in zip(every.items(), *both.tolist(), strict=True):
        replicas = count / max(1, math.prod(shape))  # of each shard
        if replicas >= 1 and not total % replicas:
            number = (total // int(replicas) + of_name(f"{dtype} {shape}")) % _MODULUS
            found[name] = f"{dtype} {number:010x}"
    return found


def _sums(names: Mapping[str, tuple[str, list[int]]], chunks: _Chunks) -> Tensor:
    """What this process holds of each tensor, added up; int64 on the CPU, with one copy from each device."""
    sums = torch.zeros(len(names), dtype=torch.int64, device="cpu")
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for number, name in enumerate(names):
        for offsets, chunk in chunks.get(name, {}).items():
            numbers, found = by_device.setdefault(chunk.device, ([], []))
            numbers.append(number)
            found.append(of_chunk(chunk, offsets))
    for numbers, found in by_device.values():
        sums.index_add_(0, torch.tensor(numbers, device="cpu"), torch.stack(found).cpu())
    return sums.remainder(_MODULUS)
