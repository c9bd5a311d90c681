"""Topology: the shard of the data and of the model that a process has. Seeding, sampling and averaging ask it."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import get_worker_info

from ..base.errors import ConfigError, StrategyError
from ..torch_compat.torch_private import with_values
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


# gather_with_gradient: the rows of all shards of a global batch, for losses in which samples meet each other.


@dataclass
class _Here:
    """What a process is to the others: its shard of the data, whether its rows count, and why it must not gather."""

    data: DataShard
    counts: bool = True
    why_not: str = ""

    def __post_init__(self) -> None:
        if self.data.group is torch_dist.group.WORLD:
            # The key below: a value that held it would keep the group, with its threads and connections, for ever.
            self.data = replace(self.data, group=None)


_here: weakref.WeakKeyDictionary[Any, _Here] = weakref.WeakKeyDictionary()  # by the default process group


def use_shard(data: DataShard) -> None:
    """Let this process gather from those with the other shards of the data; called by its strategy."""
    if dist.is_initialized():
        _here[torch_dist.group.WORLD] = _Here(data)


_told: tuple[int, int] | None = None  # in the worker of a loader
_is_divided = ContextVar("is_divided", default=False)


@contextmanager
def divided_by_its_reader() -> Iterator[None]:
    """Context in which a stream is read of whose samples the reader keeps a part: in it ``data_shard`` divides over workers only."""
    token = _is_divided.set(True)
    try:
        yield
    finally:
        _is_divided.reset(token)


def tell_worker(shard: tuple[int, int]) -> None:
    """Tell this worker of a data loader the (index, count) of its process's shard of the data."""
    global _told
    _told = shard


def data_shard() -> tuple[int, int]:
    """Return (index, count) of the samples that a stream which divides itself has to give here: one of ``count``.

    Processes that hold one model together, as the stages of a pipeline, have to train on the same samples and get the same
    numbers. Workers of a data loader share those of their process. With ``shard=True`` flextrain divides over the processes, and
    this over the workers only. Outside of a run of several processes: (0, 1), or the worker's.

    Example:
        def __iter__(self):
            index, count = data_shard()
            yield from itertools.islice(self.samples(), index, None, count)

    Raises:
        ConfigError: of several processes, nothing says yet what each trains on.
    """
    index, count = process_shard()
    worker = get_worker_info()
    return (index, count) if worker is None else (index * worker.num_workers + worker.id, count * worker.num_workers)


def process_shard() -> tuple[int, int]:
    """``data_shard`` of the process, whichever worker of it asks."""
    if _is_divided.get():
        return 0, 1
    if _told is not None:
        return _told
    here = _here.get(torch_dist.group.WORLD) if dist.is_initialized() else None
    if here is not None:
        return here.data.index, here.data.count
    if dist.get_world_size() > 1 or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            "data_shard: a run has not said yet what this process trains on; call it in the dataset's __iter__, which the run calls"
        )
    return 0, 1


def gather_with_gradient(tensor: Tensor) -> Tensor:
    """Return the rows of all processes that train on different data, in the order of their shards.

    For losses of which a sample is not alone part: in-batch negatives (CLIP, SimCLR). Let ``forward`` compute the loss of all
    rows, on every process. The gradients of the rows are added over the processes on their way back, and strategies average those
    of parameters, so that an update is that of one device with the whole batch. Micro-batches of a window do not meet.

    A collective: every process calls it equally often. Of one process, the tensor itself. Without gradients, as in evaluation,
    the same rows; the repeated batch of a process that has none left is not among those of the others.

    Example:
        images, texts = gather_with_gradient(image_rows), gather_with_gradient(text_rows)
        loss = F.cross_entropy(images @ texts.T / 0.07, torch.arange(len(images)))

    Args:
        tensor: one row for each sample. Processes may have different numbers of rows.

    Raises:
        ConfigError: on every process, if rows differ in shape or dtype, or if processes do not run forward together.
    """
    rows_of: Any = tensor  # a user may give anything
    if not isinstance(rows_of, Tensor) or rows_of.dim() == 0:
        given = "a 0-dim tensor" if isinstance(rows_of, Tensor) else type(rows_of).__name__
        raise ConfigError(f"gather_with_gradient: {given} is not allowed, give a tensor with a row for each sample")
    if not dist.is_initialized():
        return tensor
    here = _here.get(torch_dist.group.WORLD) or _Here(DataShard())
    if here.data.count == 1:
        return tensor
    if here.why_not:
        raise ConfigError(f"gather_with_gradient: {here.why_not}")
    if isinstance(tensor, DTensor):  # as under tensor parallelism
        mesh = tensor.device_mesh
        if len({*mesh.mesh.flatten().tolist()} & {*here.data.ranks}) > 1:
            raise ConfigError("gather_with_gradient: the tensor is spread over processes that train on different data")
        gathered = gather_with_gradient(tensor.full_tensor())
        return DTensor.from_local(gathered, mesh, [Replicate()] * mesh.ndim, run_check=False)
    rows, counts = _rows_of_all(tensor, here)
    return _Gathered.apply(tensor, rows, counts, here.data)  # type: ignore[no-any-return]


@contextmanager
def gathering(counts: bool) -> Iterator[None]:
    """Context of a forward that all processes run; the others get none of this one's rows unless these count."""
    yield from _with(counts=counts, why_not="")


@contextmanager
def gathering_refused(why: str) -> Iterator[None]:
    """Context of a forward that other processes do not run with this one; ``why`` is for the message."""
    yield from _with(why_not=why)


def _with(**change: Any) -> Iterator[None]:
    here = _here.get(torch_dist.group.WORLD) if dist.is_initialized() else None
    if here is None:
        yield
        return
    before = dict(vars(here))
    vars(here).update(change)
    try:
        yield
    finally:
        vars(here).update(before)


def _rows_of_all(tensor: Tensor, here: _Here) -> tuple[list[int], list[bool]]:
    """Return how many rows each process has, and whether they count; a message between hosts, no device waits."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())
    with with_values():
        own = torch.tensor([len(tensor), here.counts, kind], dtype=torch.int64, device="cpu")
        found = [each.tolist() for each in dist.all_gather(own, here.data.group)]
    for index, (_, _, other) in enumerate(found):
        if other != found[0][2]:
            raise ConfigError(
                f"gather_with_gradient: the rows of shard {index} of the data have another shape or dtype than those of shard 0; "
                f"here they are {tensor.dtype} {list(tensor.shape[1:])}"
            )
    return [rows for rows, _, _ in found], [bool(counts) for _, counts, _ in found]


class _Gathered(torch.autograd.Function):
    """The rows of all; backward adds the gradients that all processes have of them, and keeps those of the own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], counts: list[bool], data: DataShard) -> Tensor:
        seen = [count if counts[i] or i == data.index else 0 for i, count in enumerate(rows)]
        ctx.seen, ctx.own_counts, ctx.data = seen, counts[data.index], data
        missing = max(rows) - len(tensor)
        padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor.contiguous()
        parts = dist.all_gather(padded, data.group)
        return torch.cat([part[:count] for part, count in zip(parts, seen, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, parts = ctx.data.index, list(torch.split(grad, ctx.seen))
        own = parts[index]
        if not ctx.own_counts:  # the others do not have these rows, and nothing may come of them
            parts[index] = own[:0]
        # A sum of many processes in half precision would lose what each of them adds.
        total = torch.cat(parts).to(torch.promote_types(grad.dtype, torch.float32))
        dist.all_reduce(total, "sum", ctx.data.group)
        if not ctx.own_counts:
            return torch.zeros_like(own), None, None, None
        first = sum(ctx.seen[:index])
        return total[first : first + len(own)].to(grad.dtype), None, None, None
