"""Topology: the shard of the data and of the model that a process has. Seeding, sampling and averaging ask it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from ..errors import StrategyError
from ..rehearsing import rehearsing
from . import collectives as dist

_MOST_SHOWN = 16  # in a message


@dataclass(frozen=True)
class DataShard:
    """The shard of every global batch that a process trains on, and the process group that trains on all shards.

    Attributes:
        index, count: number of this shard, and number of shards.
        group: one process for each shard, in their order, with the same shard of the model as this process.
            Gradients and losses are averaged over it. It must carry CPU tensors too. None: all processes, or, with a
            ``count`` of 1, this process alone.

    Raises:
        StrategyError: the group does not fit index and count.
    """

    index: int = field(default_factory=dist.get_rank)
    count: int = field(default_factory=dist.get_world_size)
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise StrategyError(f"Topology.data.index: {self.index} is not allowed with {self.count} shards")
        if self.count == 1:
            return
        if self.group is None and self.count == dist.get_world_size():
            if self.index != dist.get_rank():
                raise StrategyError(
                    f"Topology.data.index: {self.index} is not allowed on rank {dist.get_rank()}, without a group the shards are "
                    "those of the ranks in their order"
                )
            return
        if self.group is None:
            raise StrategyError(
                f"Topology.data.group: missing, {self.count} of the {dist.get_world_size()} processes train on other shards of "
                "the data than this one"
            )
        found = (dist.rank_in(self.group), dist.get_world_size(self.group))
        if found != (self.index, self.count):
            raise StrategyError(
                f"Topology.data.group: this process is number {found[0]} of {found[1]} there, and has shard {self.index} of "
                f"{self.count} of the data"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        if self.count == 1:
            return (dist.get_rank(),)
        if self.group is None:
            return tuple(range(self.count))
        return tuple(torch_dist.get_process_group_ranks(self.group))

    def mean(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` in place by its mean over the shards of the data, and return it."""
        return tensor if self.count == 1 else dist.all_reduce(tensor, "mean", self.group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` in place by its sum over the shards of the data, and return it."""
        return tensor if self.count == 1 else dist.all_reduce(tensor, "sum", self.group)

    def average(self, tensors: list[Tensor]) -> None:
        """Replace the tensors in place by their means over the shards of the data."""
        if self.count > 1:
            dist.average_tensors(tensors, group=self.group)

    def share(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors in place with those of the process that has the first shard of the data."""
        if self.count > 1:
            dist.broadcast_tensors(tensors, group=self.group)


@dataclass(frozen=True)
class Topology:
    """The role of this process in data and model parallelism; without arguments: data parallelism only.

    Attributes:
        data: its shard of every global batch. Processes with the same shard read the same samples with
            the same augmentation and the same dropout masks.
        reports: whether metrics count the predictions of this process; one process for each shard of the data reports.
        model: process group of those that hold different parameters of one replica of the model (pipeline stages).
            Gradient norms are combined over it. None: every process holds a shard of every parameter.
        axes: (index, size) of this process on every named axis of a mesh, such as "dp_shard" or "tp".
        rank, world_size: the global ones, for files and messages.
    """

    data: DataShard = field(default_factory=DataShard)
    reports: bool = True
    model: Any = None
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rank: int = field(default_factory=dist.get_rank)
    world_size: int = field(default_factory=dist.get_world_size)

    @property
    def shard(self) -> tuple[int, int]:
        """(index, count) of this process's shard of the data."""
        return self.data.index, self.data.count

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self.world_size == 1

    @property
    def shares_data(self) -> bool:
        """Whether several processes have the same shard of the data."""
        return self.data.count < self.world_size

    @property
    def index_in_model(self) -> int:
        """Rank of this process in the ``model`` group; 0 if every process has all parameters."""
        return 0 if self.model is None else dist.rank_in(self.model)

    def check(self) -> None:
        """Check that every shard of the data has exactly one process that reports; every process must call it.

        Raises:
            StrategyError: on every process, if a shard has none or several.
        """
        if rehearsing():  # the others are not here
            return
        own = (self.shard, self.reports)
        everyone = dist.gather_object(own, dist.side_group())
        if problem := dist.broadcast_object(
            None if everyone is None else self._problem(everyone), group=dist.side_group()
        ):
            raise StrategyError(f"Topology: {problem}")

    def _problem(self, everyone: Sequence[tuple[tuple[int, int], bool]]) -> str | None:
        counts = {count for (_, count), _ in everyone}
        reporting = sorted(index for (index, _), reports in everyone if reports)
        if len(counts) == 1 and reporting == list(range(self.data.count)):
            return None
        shown = (
            str(list(everyone)) if len(everyone) <= _MOST_SHOWN else f"{str(list(everyone[:_MOST_SHOWN]))[:-1]}, ...]"
        )
        return (
            f"(index, count) of the data and reports are {shown} over the processes; all need the same count, and each shard one "
            "process that reports"
        )
