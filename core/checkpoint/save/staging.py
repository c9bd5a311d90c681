"""What one save leaves for the next: the plan which process writes what, and memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from ...host_memory import HostBuffer
from .tensor_entries import TensorEntries


@dataclass(frozen=True)
class WritePlan:
    """The plan which process writes what; valid as long as the layouts of all processes' tensors do not change."""

    mark: str | None = None
    """Identifier from rank 0: processes with the same one have made the plan together."""
    made_for: tuple[int, int, dict[str, Any]] | None = None
    """The rank, the world size, and the layout of each tensor of this process."""
    items: Sequence[WriteItem] = ()
    """The chunks that this process writes."""
    index: TensorEntries = field(default_factory=TensorEntries)
    """The index of what all processes write; on rank 0."""


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
