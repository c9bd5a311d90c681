"""Topology: what a process is to the others. Whoever seeds, deals out data, averages or counts asks it, and not the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from ..errors import StrategyError
from . import collectives as dist


@dataclass(frozen=True)
class DataShard:
    """Which part of every global batch a process trains on, and who trains on the others.

    Attributes:
        index, count: this part, of how many.
        group: one process for each part, in the order of the parts, that hold what this one holds: over them gradients and
            losses are averaged. It has to carry tensors on the CPU too. None: all processes, or, with a ``count`` of 1,
            this one alone.

    Raises:
        StrategyError: the group does not fit index and count.
    """

    index: int = field(default_factory=dist.get_rank)
    count: int = field(default_factory=dist.get_world_size)
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise StrategyError(f"Topology.data.index: {self.index} is not allowed with {self.count} parts")
        if self.count == 1 or (self.group is None and self.count == dist.get_world_size()):
            return
        if self.group is None:
            raise StrategyError(
                f"Topology.data.group: missing, {self.count} of the {dist.get_world_size()} processes train on other parts of "
                "the data than this one"
            )
        place = (dist.rank_in(self.group), dist.get_world_size(self.group))
        if place != (self.index, self.count):
            raise StrategyError(
                f"Topology.data.group: this process is number {place[0]} of {place[1]} there, and has part {self.index} of "
                f"{self.count} of the data"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes of the group, by their numbers among all."""
        if self.count == 1:
            return (dist.get_rank(),)
        if self.group is None:
            return tuple(range(self.count))
        return tuple(torch_dist.get_process_group_ranks(self.group))

    def mean(self, tensor: Tensor) -> Tensor:
        """``tensor`` replaced, in place, by its mean over the parts of the data; returned for convenience."""
        return tensor if self.count == 1 else dist.all_reduce(tensor, "mean", self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` replaced, in place, by its sum over the parts of the data; returned for convenience."""
        return tensor if self.count == 1 else dist.all_reduce(tensor, "sum", self.group)

    def average(self, tensors: list[Tensor]) -> None:
        """Replace many tensors, in place, by their means over the parts of the data."""
        if self.count > 1:
            dist.average_tensors(tensors, group=self.group)

    def share(self, tensors: list[Tensor]) -> None:
        """Replace many tensors, in place, by those of the process with the first part of the data."""
        if self.count > 1:
            dist.broadcast_tensors(tensors, group=self.group)


@dataclass(frozen=True)
class Topology:
    """What this process is to the others; without arguments: every process trains on data of its own.

    Attributes:
        data: which part of every global batch it trains on. Processes with the same part read the same samples with the
            same augmentation, and drop out the same.
        reports: whether what the model predicts here counts in metrics. One process for each part of the data does.
        model: the processes that hold different parameters of one copy of the model, as the stages of a pipeline do; over
            them norms of gradients are combined. None where every process has a part in every parameter.
        axes: (index, size) of this process on every named axis of a mesh, such as "dp_shard" or "tp".
        rank, world_size: number of this process and of all, for files and messages.
    """

    data: DataShard = field(default_factory=DataShard)
    reports: bool = True
    model: Any = None
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rank: int = field(default_factory=dist.get_rank)
    world_size: int = field(default_factory=dist.get_world_size)

    @property
    def shard(self) -> tuple[int, int]:
        """(index, count) of this process's part of the data."""
        return self.data.index, self.data.count

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self.world_size == 1

    @property
    def shares_data(self) -> bool:
        """Whether processes have the same part of the data."""
        return self.data.count < self.world_size

    @property
    def place_in_model(self) -> int:
        """Number of this process among those that hold one copy of the model together; 0 where each has all names."""
        return 0 if self.model is None else dist.rank_in(self.model)

    def check(self) -> None:
        """See that every part of the data has one process that reports; every process must call it.

        Raises:
            StrategyError: on every process, if one has not.
        """
        everyone: Sequence[tuple[tuple[int, int], bool]] = dist.all_gather_object((self.shard, self.reports))
        counts = {count for (_, count), _ in everyone}
        reporting = sorted(index for (index, _), reports in everyone if reports)
        if len(counts) > 1 or reporting != list(range(self.data.count)):
            raise StrategyError(
                f"Topology: (index, count) of the data and reports are {everyone} over the processes; all need the same count, "
                "and each part one process that reports"
            )
