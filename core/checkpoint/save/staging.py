"""What one save leaves for the next: the plan which process writes what, and memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...host_memory import HostBuffer
from ..saved_tensor import LaidOutTensor
from .own_row import RowsPlan
from .planning import PlannedChunk


@dataclass(frozen=True)
class WritePlan:
    """The plan which process writes what; valid as long as the layouts of all processes' tensors do not change."""

    mark: str | None = None
    """Hash of the plan of all processes."""
    made_for: tuple[int, int, tuple[int, bool], dict[str, Any]] | None = None
    """The rank, the world size, ``OwnRow.position``, and the layout of each tensor of this process."""
    parts: Sequence[PlannedChunk] = ()
    """The chunks that this process writes."""
    tensors: Mapping[str, LaidOutTensor] = field(default_factory=dict)
    """What all processes write."""
    rows: RowsPlan | None = None
    """Which process has which of the plain values that differ by process; None: they are in one file."""


class Staging:
    """Plan and buffers reused between saves; new memory would be slow, because the system clears it page by page."""

    def __init__(self) -> None:
        self.plan = WritePlan()
        self.nonfinite: tuple[str, ...] = ()
        """Keys of the tensors for which the last complete save was marked."""
        self.compared: Collection[str] = ()
        """Keys whose replicas the caller has just compared, and the save need not."""
        self.shared: set[Path] = set()
        """Folders in which all processes have seen each other's files."""
        self.memory = HostBuffer()
