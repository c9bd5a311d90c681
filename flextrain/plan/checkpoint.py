"""What a checkpoint costs: its files, the bytes that each process writes, and how long that takes.

The plan of a save is made by the code of a real one, from what one process of each kind has to save.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.base.errors import CheckpointError
from ..core.base.tensors import DTYPES
from ..core.checkpoint import directory
from ..core.checkpoint.folders import file_of
from ..core.checkpoint.manifest import MANIFEST, VALUES, FileEntry, manifest_of
from ..core.checkpoint.safetensors_file import header_of
from ..core.checkpoint.save import described
from ..core.checkpoint.save_plan import Kind, Mesh, Offer, Offered, SharedPlan, offer_of, plan_save
from ..core.checkpoint.untrusted import MAX_JSON_BYTES
from ..core.comm.topology import Topology
from ..core.random.generators import rng_state
from ..core.torch_compat.torch_private import with_values
from ..core.version import __version__
from ..strategies.base import Strategy
from ..strategies.parts import left_out
from .plan import CheckpointPlan, RankPlan, StrategyPlan

_NO_SUM = "0" * 16
_MARK = len('"xxh3":"",') + len(_NO_SUM)
"""What the index has at its beginning when it is written: the checksum of the rest."""
_LENGTH = 8
"""Bytes of a file before its header, with the header's length."""
_EXACT = 200_000
"""Up to so many tensors times ranks, the header of every file is made; beyond, those of a few."""


@dataclass(frozen=True)
class Share:
    """What one planned rank has to save; can be pickled.

    Attributes:
        rank: the planned rank, the first one of its stage.
        ranks: all ranks of its stage, which have the same to save.
        offer: its tensors.
        alone: keys of the tensors that only the first rank of all that have them saves, such as running statistics.
        values: bytes of settings and other plain values of the strategy.
        values_of_each: bytes of the plain values of every data shard.
        strategy: name of its class.
        data_shards: their number.
    """

    rank: int
    ranks: Sequence[int]
    offer: Offer
    alone: frozenset[str]
    values: int
    values_of_each: int
    strategy: str
    data_shards: int


def share_of(strategy: Strategy, topology: Topology) -> Share:
    """What this rank has to save after an update."""
    state = strategy.state()
    # In a rehearsal all ranks are taken to have what this one has, and so rank 0 would save the buffers of each stage.
    names, buffers = left_out(strategy), dict(strategy.module.named_buffers())
    model = {f"model.{name}": tensor for name, tensor in strategy.model_state().items() if name not in names}
    tensors = model | {key: value for key, value in state.items() if isinstance(value, Tensor) and key not in model}
    with with_values(), torch.no_grad():
        offer = offer_of(tensors, topology.rank, topology.world_size)
        random = rng_state(strategy.device)
    values = {key: value for key, value in state.items() if key not in tensors}
    return Share(
        topology.rank,
        ranks_of_stage(topology),
        offer,
        frozenset(f"model.{name}" for name, buffer in buffers.items() if not isinstance(buffer, DTensor)),
        len(directory.to_json(values, "checkpoint")),
        len(directory.to_json({"rng": random}, "rng")),
        type(strategy).__name__,
        topology.data.count,
    )


def ranks_of_stage(topology: Topology) -> Sequence[int]:
    """The ranks that hold shards of the same parameters as this one; those of other pipeline stages do not."""
    if topology.model is None:
        return range(topology.world_size)
    stages = len(torch.distributed.get_process_group_ranks(topology.model))
    size = topology.world_size // stages  # stages are the outermost axis
    first = topology.rank - topology.rank % size
    return range(first, first + size)


def plan_checkpoint(shares: Sequence[Share], stages: int, world_size: int) -> tuple[CheckpointPlan, dict[int, int]]:
    """Plan a save.

    Args:
        shares: of one rank of each stage; of more than four, those of the first, the second and the last.
        stages: number of pipeline stages; 1 without.
        world_size: number of processes.

    Returns:
        The plan, and the bytes that each planned rank writes.

    Raises:
        CheckpointError: what the processes would save does not fit together, or the index would be too long.
    """
    every_stage = [*_of_all_stages(shares, stages, world_size)]
    kinds = [*_kinds(every_stage)]
    plan = plan_save(sorted(kinds, key=lambda kind: kind.ranks[0]), world_size)
    loads, writes = _loads(plan, world_size)
    writers = np.flatnonzero(writes).tolist()
    busiest = int(loads.argmax())
    planned = [share.rank for share in shares]
    every = len(plan.tensors) * len(writers) <= _EXACT
    heads = {rank: _header(plan, rank) for rank in ({*writers} if every else {*planned, busiest, writers[-1]})}
    usual = round(sum(heads.values()) / len(heads)) if heads else 0
    sizes = {rank: int(loads[rank]) + heads.get(rank, usual) if writes[rank] else 0 for rank in range(world_size)}
    first = shares[0]
    values = sum(share.values for share in every_stage) + first.data_shards * first.values_of_each
    if values > MAX_JSON_BYTES:
        raise CheckpointError(f"{VALUES}: would have {values} bytes, more than {MAX_JSON_BYTES} are not read")
    files = {VALUES: FileEntry(size=values, xxh3=_NO_SUM)}
    files |= {file_of(rank): FileEntry(size=sizes[rank], xxh3=_NO_SUM) for rank in writers}
    written_by: dict[str, str | int] = {"torch": torch.__version__, "world_size": world_size}
    written_by |= {"flextrain": __version__, "strategy": first.strategy}
    text = manifest_of(plan.tensors, files, written_by)
    directory.check_length(Path(MANIFEST), text)
    index = len(text) + _MARK
    largest = max(sizes, key=lambda rank: sizes[rank])
    found = CheckpointPlan(
        files=len(files) + 1,
        whole=sum(sizes.values()) + values + index,
        largest=sizes[largest],
        largest_rank=largest,
        index=index,
        values=values,
    )
    return found, {rank: sizes[rank] for rank in planned}


def with_checkpoint(
    ranks: Sequence[RankPlan], shares: Sequence[Share], stages: int, world_size: int
) -> tuple[CheckpointPlan | None, list[RankPlan], list[str]]:
    """The plan of a save, the ranks with the bytes that they write, and notes."""
    try:
        found, sizes = plan_checkpoint(shares, stages, world_size)
    except CheckpointError as error:
        return None, list(ranks), [f"a checkpoint cannot be written: {' '.join(str(error).split())}"]
    notes = []
    if len(shares) < stages:
        notes.append(f"checkpoint: stages 2 to {stages - 2} are taken to write what stage 1 does")
    return found, [dataclasses.replace(rank, checkpoint=sizes[rank.rank]) for rank in ranks], notes


def with_seconds(plan: StrategyPlan, each: float | None, together: float | None) -> StrategyPlan:
    """The plan with the seconds until the last process has written its file of a checkpoint.

    Args:
        each: bytes that one process writes per second; None: not known.
        together: bytes that all processes together write per second; None: not known.
    """
    if plan.checkpoint is None or each is together is None:
        return plan
    bounds = [plan.checkpoint.largest / each] if each else []
    bounds += [plan.checkpoint.whole / together] if together else []
    return dataclasses.replace(plan, checkpoint=dataclasses.replace(plan.checkpoint, seconds=max(bounds)))


def _of_all_stages(shares: Sequence[Share], stages: int, world_size: int) -> Iterator[Share]:
    """The shares of all stages, those that were not planned with the tensors of the second one under other keys."""
    yield from shares
    size = world_size // stages
    known = {share.rank // size for share in shares}
    everywhere = {offered.key for offered in shares[0].offer.tensors}
    for stage in range(stages):
        if stage not in known:
            middle = shares[1]
            move = (stage - 1) * size
            renamed = {
                offered.key: offered.key if offered.key in everywhere else _renamed(offered.key, stage)
                for offered in middle.offer.tensors
            }
            offer = Offer(
                tuple(offered._replace(key=renamed[offered.key]) for offered in middle.offer.tensors),
                middle.offer.meshes,
                tuple(first + move for first in middle.offer.firsts),
            )
            yield dataclasses.replace(
                middle,
                rank=middle.rank + move,
                ranks=range(middle.ranks[0] + move, middle.ranks[-1] + 1 + move),
                offer=offer,
                alone=frozenset(renamed.get(key, key) for key in middle.alone),
            )


def _renamed(key: str, stage: int) -> str:
    """Another key of the same length, as long as the index of a checkpoint depends on it."""
    mark = f"{stage}:"
    return mark + key[len(mark) :]


def _kinds(shares: Iterable[Share]) -> Iterator[Kind]:
    """The kinds of processes, as those of a real save differ: the first rank of a stage has what it alone saves."""
    taken: set[str] = set()
    for share in sorted(shares, key=lambda share: share.ranks[0]):
        alone = {offered.key for offered in share.offer.tensors if offered.key in share.alone}
        own = [one for one in share.offer.tensors if one.key not in alone or one.key not in taken]
        rest = [one for one in share.offer.tensors if one.key not in alone]
        firsts = [_firsts(mesh, share.ranks) for mesh in share.offer.meshes]
        if len(own) == len(rest):
            yield Kind(share.ranks, _with(share.offer, own), firsts)
        else:
            yield Kind(share.ranks[:1], _with(share.offer, own), firsts)
            if len(share.ranks) > 1:
                yield Kind(share.ranks[1:], _with(share.offer, rest), firsts)
        taken |= alone


def _with(offer: Offer, tensors: Sequence[Offered]) -> Offer:
    return Offer(tuple(tensors), offer.meshes, offer.firsts)


def _firsts(mesh: Mesh, ranks: Sequence[int]) -> list[int]:
    """The first ranks of equal meshes that these ranks consist of."""
    offsets: NDArray[np.int64] = np.zeros((), dtype=np.int64)
    if mesh.ranks is not None:
        offsets = np.array(mesh.ranks, dtype=np.int64)
    else:
        for size, stride in zip(mesh.shape, mesh.strides, strict=True):
            offsets = offsets[..., None] + np.arange(size, dtype=np.int64) * stride
    steps = offsets.reshape(-1).tolist()
    left, found = dict.fromkeys(ranks), []
    while left:
        first = next(iter(left))  # they are in order
        found.append(first)
        for step in steps:
            left.pop(first + step, None)
        left.pop(first, None)
    return found


def _loads(plan: SharedPlan, world_size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The bytes of tensors that each rank writes, and whether it writes any tensor."""
    loads: NDArray[np.int64] = np.zeros(world_size, dtype=np.int64)
    writes: NDArray[np.bool_] = np.zeros(world_size, dtype=bool)
    for tensor in plan.tensors.values():
        ranks, numel = tensor.layout.sizes(tensor.shape)
        np.add.at(loads, ranks + tensor.rank, numel * DTYPES[tensor.dtype].itemsize)
        writes[(ranks if not math.prod(tensor.shape) else ranks[numel > 0]) + tensor.rank] = True
    return loads, writes


def _header(plan: SharedPlan, rank: int) -> int:
    return _LENGTH + len(header_of(described(plan.parts_of(rank))))
