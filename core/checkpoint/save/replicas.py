"""Check that replicas of a tensor are equal on all processes, before one of them writes it for all.

Otherwise a checkpoint would mix replicas that have diverged, because every process writes a share of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import counted
from ..safetensors_file import as_stored

_ReplicaId = tuple[int, int]  # hashes of the tensor's name and of the shard's coordinates
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1024
_BLOCK, _SHARES = 64 * 2**10, 4
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64)  # as int64; odd, so multiples repeat only after 2**64


class Replicas:
    """Fingerprints of this process's replicas: ordinary tensors, and DTensors that an axis of their mesh replicates.

    Args:
        tensors: key to tensor, for all tensors of this process.
        share: hash only every fourth block of large tensors on the CPU, beginning with this block, 0 to 3; None: hash
            all blocks. Tensors on other devices are hashed completely, because that costs little.
    """

    def __init__(self, tensors: Mapping[str, Tensor], share: int | None = None) -> None:
        self._share = share
        self._open = {key: shard for key, tensor in tensors.items() if (shard := _replica(tensor)) is not None}
        self._prints: dict[_ReplicaId, int] = {}
        self._names = {_number(key): key for key in tensors}
        self._later: dict[str, _ReplicaId] = {}

    def look(self, later: Iterable[str] = ()) -> None:
        """Compute the missing fingerprints, except those of ``later``, whose copies ``look_at`` will get."""
        # Only those on the CPU: a device hashes faster than it copies, and compared hashes need the same arithmetic.
        waiting = {key for key in later if key in self._open and self._open[key][0].device.type == "cpu"}
        replicas = {key: (_number(key), _number(str(shard))) for key, (_, shard) in self._open.items()}
        self._later = {key: replicas[key] for key in waiting}
        now = {key: tensor for key, (tensor, _) in self._open.items() if key not in waiting}
        self._prints |= {replicas[key]: value for key, value in fingerprints(now, self._share).items()}
        self._open.clear()

    def look_at(self, key: str, tensor: Tensor) -> None:
        """Compute a fingerprint that ``look`` has left for later, from a copy on the host."""
        if (replica := self._later.pop(key, None)) is not None:
            self._prints[replica] = _of_bytes(tensor, self._share)

    def packed(self) -> bytes:
        """The fingerprints as bytes; equal on processes with equal replicas."""
        rows = [(*replica, value) for replica, value in sorted(self._prints.items())]
        return np.array(rows, dtype=np.uint64).tobytes()

    def difference(self, everyones: Sequence[bytes], keys: Iterable[str] = ()) -> str | None:
        """A text that names the first tensor whose replicas differ, and the ranks; None if all are equal.

        Args:
            everyones: result of ``packed`` on each process.
            keys: keys of all processes; this one may have only some of them.
        """
        ranks: dict[bytes, list[int]] = {}
        for rank, packed in enumerate(everyones):
            ranks.setdefault(packed, []).append(rank)
        held: dict[_ReplicaId, dict[int, list[int]]] = {}
        for packed, owners in ranks.items():
            for key, shard, value in np.frombuffer(packed, dtype=np.uint64).reshape(-1, 3).tolist():
                held.setdefault((key, shard), {}).setdefault(value, []).extend(owners)
        split: dict[int, list[list[int]]] = {}
        for (key, _), kinds in held.items():
            if len(kinds) > 1:
                split.setdefault(key, list(kinds.values()))
        if not split:
            return None
        names = self._names | {_number(key): key for key in keys}
        order = list(names)
        first = min(split, key=order.index)
        most, *others = sorted(split[first], key=lambda owners: (-len(owners), owners))
        stray = ", ".join(map(str, sorted(rank for owners in others for rank in owners)))
        more = f" (and {counted(len(split) - 1, 'tensor')} more)" if len(split) > 1 else ""
        return f"{names[first]} differs between processes, rank {stray} from rank {most[0]}{more}"


def _number(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _replica(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This process's shard of a replicated tensor, and its coordinates on the other axes; None if it is no replica."""
    if isinstance(tensor, DTensor):
        if not any(placement.is_replicate() for placement in tensor.placements):
            return None
        coordinates = tensor.device_mesh.get_coordinate()
        placements = zip(coordinates or (), tensor.placements, strict=True) if coordinates else ()
        return cast(DTensor, tensor.detach()).to_local(), tuple(
            c for c, placement in placements if not placement.is_replicate()
        )
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor.detach(), ()
    return None


def fingerprints(tensors: Mapping[str, Tensor], share: int | None = None) -> dict[str, int]:
    """A hash of the bits of each tensor, by key; one small copy brings those of a device to the host."""
    found = {key: _of_bytes(tensor, share) for key, tensor in tensors.items() if tensor.device.type == "cpu"}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key not in found:
            by_device.setdefault(tensor.device, {})[key] = of_bits(tensor)
    for sums in by_device.values():
        numbers = torch.stack(list(sums.values())).cpu().tolist()
        found |= {key: number % 2**64 for key, number in zip(sums, numbers, strict=True)}
    return found


def _of_bytes(tensor: Tensor, share: int | None) -> int:
    flat = as_stored(tensor.detach()).contiguous().reshape(-1)
    if not flat.numel():
        return 0
    data = flat.view(torch.uint8).numpy().data
    if share is None or len(data) <= _SHARES * _BLOCK:
        return xxhash.xxh3_64_intdigest(data)
    digest = xxhash.xxh3_64()
    for begin in range(share * _BLOCK, len(data), _SHARES * _BLOCK):
        digest.update(data[begin : begin + _BLOCK])
    return digest.intdigest()


def share_of(name: str) -> int:
    """The ``share``, 0 to 3, that a save of this name hashes; equal on all processes, different for other names."""
    return _number(name) % _SHARES


def of_bits(tensor: Tensor) -> Tensor:
    """A hash of the bits of a tensor and their positions, 0-dim int64 on its device; it takes two passes.

    It is a weighted sum of the sums of the rows and columns of the bits as integers, each with its own weight.
    """
    flat = as_stored(tensor.detach()).contiguous().reshape(-1)
    bits = flat.view(_BITS[min(tensor.itemsize, 8)])  # a complex128 has twice the bits of the largest integer
    whole = bits.numel() // _ROW * _ROW
    table, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    columns[: rest.numel()] += rest.long() * _ODD[1]
    return (rows * _weights(rows, _ODD[0])).sum() + (columns * _weights(columns, _ODD[1])).sum()


def _weights(like: Tensor, step: int) -> Tensor:
    """Weights that are all different, one for each element of ``like``."""
    return torch.arange(1, like.numel() + 1, dtype=torch.int64, device=like.device) * step
