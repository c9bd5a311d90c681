"""Check that replicas of a tensor are equal on all processes, before one of them writes it for all.

Otherwise a checkpoint would mix replicas that have diverged, because every process writes a share of the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from ...errors import counted
from ...fingerprints import SHARES, fingerprints, of_bytes, of_name, replica_of

_ReplicaId = tuple[int, int]  # hashes of the tensor's name and of the shard's coordinates


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
        self._open = {key: shard for key, tensor in left.items() if (shard := replica_of(tensor)) is not None}
        self._prints: dict[_ReplicaId, int] = {}
        self._names = {of_name(key): key for key in tensors}
        self._later: dict[str, _ReplicaId] = {}

    def look(self, later: Iterable[str] = ()) -> None:
        """Compute the missing fingerprints, except those of ``later``, whose copies ``look_at`` will get."""
        # Only those on the CPU: a device hashes faster than it copies, and compared hashes need the same arithmetic.
        waiting = {key for key in later if key in self._open and self._open[key][0].device.type == "cpu"}
        replicas = {key: (of_name(key), of_name(str(shard))) for key, (_, shard) in self._open.items()}
        self._later = {key: replicas[key] for key in waiting}
        now = {key: tensor for key, (tensor, _) in self._open.items() if key not in waiting}
        self._prints |= {replicas[key]: value for key, value in fingerprints(now, self._share).items()}
        self._open.clear()

    def look_at(self, key: str, tensor: Tensor) -> None:
        """Compute a fingerprint that ``look`` has left for later, from a copy on the host."""
        if (replica := self._later.pop(key, None)) is not None:
            self._prints[replica] = of_bytes(tensor, self._share)

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
        names = self._names | {of_name(key): key for key in keys}
        order = list(names)
        first = min(split, key=order.index)
        most, *others = sorted(split[first], key=lambda owners: (-len(owners), owners))
        stray = ", ".join(map(str, sorted(rank for owners in others for rank in owners)))
        more = f" (and {counted(len(split) - 1, 'tensor')} more)" if len(split) > 1 else ""
        return f"{names[first]} differs between processes, rank {stray} from rank {most[0]}{more}"


def share_of(name: str) -> int:
    """The ``share``, 0 to 3, that a save of this name hashes; equal on all processes, different for other names."""
    return of_name(name) % SHARES
