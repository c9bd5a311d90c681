"""Plain values of a checkpoint: those of rank 0, and those that differ by process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from torch import Tensor

from ..base.errors import CheckpointError
from . import directory
from . import load as rows
from .folders import name_in_file
from .load import DTYPE, KEY, as_row, room
from .manifest import LaidOutTensor, MeshLayout
from .save_plan import PlannedChunk

FROM = 64
"""From this number of processes on, each has its values in its own file; fewer have them in values.json."""
_STEP = 1024  # bytes: the texts of two saves differ by some digits, and a plan is valid as long as they fit


class RowFacts(NamedTuple):
    """What rank 0 has to know of a row."""

    number: int
    """Its position among the rows."""
    length: int
    """Of its text; 0: the process has none."""
    keys: tuple[str, ...]


class RowsPlan(NamedTuple):
    """Which process has which row."""

    length: int
    """Of every row, in bytes."""
    ranks: Sequence[int]
    """The process of each row."""

    def tensor(self) -> LaidOutTensor:
        """The tensor of all rows."""
        first, count = self.ranks[0], len(self.ranks)
        step = self.ranks[1] - first if count > 1 else 1
        if step and list(self.ranks) == list(range(first, first + count * step, step)):
            layout = MeshLayout(mesh=(count,), strides=(step,), cuts=("S0",))
        else:
            layout = MeshLayout(mesh=(count,), ranks=tuple(rank - first for rank in self.ranks), cuts=("S0",))
        return LaidOutTensor(KEY, DTYPE, (count, self.length), layout, first)

    def part_of(self, rank: int) -> tuple[PlannedChunk, ...]:
        """The row that a process writes, if it has one."""
        found = self.tensor()
        return tuple(PlannedChunk(KEY, box, DTYPE, name_in_file(KEY, box, found.shape)) for box in found.of_rank(rank))


class OwnRow:
    """The values of one process that it keeps in its own file.

    Args:
        number: position of this process among the rows.
        values: plain values; of all processes that have some, the keys are the same.
    """

    def __init__(self, number: int, values: Mapping[str, Any]) -> None:
        self._number, self._values = number, dict(values)
        self._text = b""

    @property
    def position(self) -> tuple[int, bool]:
        """What a plan depends on: the number, and whether there are values."""
        return self._number, bool(self._values)

    def facts(self) -> RowFacts:
        """What rank 0 has to know of this row.

        Raises:
            CheckpointError: JSON cannot hold a value.
        """
        self._text = directory.to_json(self._values, "per_rank") if self._values else b""
        return RowFacts(self._number, len(self._text), tuple(self._values))

    def fits(self, plan: RowsPlan | None) -> bool:
        """Whether this row fits in the rows of an earlier save, after ``facts``."""
        return len(self._text) <= (room(plan.length) if plan is not None else 0)

    def tensor(self, plan: RowsPlan) -> Tensor:
        """The row as a tensor, after ``facts``."""
        return as_row(self._text, plan.length)


def plan_rows(everyones: Sequence[RowFacts]) -> tuple[RowsPlan | None, list[str]]:
    """Which process has which row, and the keys of their values; None and no keys: there are no rows.

    Raises:
        CheckpointError: the keys of processes differ, or two have the same number.
    """
    given = sorted((facts.number, rank) for rank, facts in enumerate(everyones) if facts.length)
    if not given:
        return None, []
    first = everyones[given[0][1]]
    for (number, rank), (before, _) in zip(given[1:], given, strict=False):
        if everyones[rank].keys != first.keys:
            raise CheckpointError(
                f"rank {rank} has {', '.join(everyones[rank].keys)} of its own, and rank {given[0][1]} has {', '.join(first.keys)}"
            )
        if number == before:
            raise CheckpointError(f"rank {rank} and another one have values number {number}")
    longest = max(facts.length for facts in everyones)
    length = -(-(longest + _STEP // 2) // _STEP) * _STEP + _STEP
    return RowsPlan(length, [rank for _, rank in given]), list(first.keys)


# Plain values of a checkpoint: those of rank 0, those that only other processes have, and values per rank.


Own = tuple[int, dict[str, Any]]
"""The number of a process, and its values that differ by process."""


class PlainValues:
    """The plain values of one process, to be sent to rank 0. If all have the same keys, only ``per_rank`` is sent.

    Args:
        values: rank 0's are saved; for a key that rank 0 lacks, the value of the first process that has it.
        number: position of this process's ``per_rank`` in the lists of the checkpoint.
        per_rank: values that differ by process; read back as lists of those that are not empty.
        joined: lists of names, or mappings to such lists; the checkpoint gets the union over all processes.
    """

    def __init__(
        self, values: Mapping[str, Any], number: int, per_rank: Mapping[str, Any], joined: Mapping[str, Any]
    ) -> None:
        self.own: Own = (number, dict(per_rank))
        self._values, self._joined = {**values, **joined}, dict(joined)

    def fingerprint(self) -> int:
        """A hash that is equal on processes with the same keys and the same names in ``joined``.

        Raises:
            CheckpointError: JSON cannot hold a value of ``per_rank``; it must not be sent then.
        """
        directory.to_json(self.own[1], "per_rank")
        names = [*self._values, str(self._joined)]
        return xxhash.xxh3_64_intdigest("\0".join(names).encode())

    def beyond(self, known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values of this process whose keys are not in ``known``, and its ``joined``.

        Raises:
            CheckpointError: JSON cannot hold them.
        """
        extra = {key: value for key, value in self._values.items() if key not in known}
        directory.to_json(extra, "checkpoint")
        directory.to_json(self._joined, "checkpoint")
        return extra, self._joined

    def keys(self) -> list[str]:
        """Keys of this process's values."""
        return list(self._values)

    def text(
        self,
        own: Sequence[Own],
        others: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = (),
        row_keys: Sequence[str] = (),
    ) -> bytes:
        """All values as JSON; for rank 0.

        Args:
            own: number and ``per_rank`` of each process.
            others: result of ``beyond`` on each process, if their fingerprints differ.
            row_keys: keys of the values that processes have in their own files.

        Raises:
            CheckpointError: JSON cannot hold them.
        """
        values = dict(self._values)
        for extra, joined in others:
            values = {**extra, **values}
            values |= {key: _union(values.get(key), names) for key, names in joined.items()}
        given = [per_rank for _, per_rank in sorted(own, key=lambda one: one[0]) if per_rank]
        lists = {key: [per_rank[key] for per_rank in given] for key in (given[0] if given else ())}
        if row_keys:
            lists[rows.KEY] = list(row_keys)
        return directory.to_json(values | lists, "checkpoint")


def _union(one: Any, other: Any) -> Any:
    """The names of both without duplicates, in order."""
    if one is None:
        return other
    if isinstance(one, Mapping):
        return {key: _union(one.get(key), other.get(key, one.get(key))) for key in {**one, **other}}
    return list(dict.fromkeys([*one, *other]))
