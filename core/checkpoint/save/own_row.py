"""The row of a process in the tensor of plain values that differ by process, see ``rows``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import CheckpointError
from .. import directory
from ..layouts import MeshLayout
from ..names_in_files import name_in_file
from ..rows import DTYPE, KEY, as_row, room
from ..saved_tensor import LaidOutTensor
from .planning import PlannedChunk

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
