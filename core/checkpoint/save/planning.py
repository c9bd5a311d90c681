"""Plan who writes what, from the layouts alone: every process computes the same plan by itself.

What several processes hold is written by one of them. The largest tensors are dealt out first, each to the processes
that have least to write so far.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...stored_dtypes import DTYPES
from ..layouts import Box, BoxLayout, Layout
from ..names_in_files import name_in_file
from ..saved_tensor import LaidOutTensor
from .layout_rules import Candidates, Claim, Kind, Listed, Rules


class PlannedChunk(NamedTuple):
    """A chunk that a process writes."""

    key: str
    box: Box
    dtype: str
    """A name in DTYPES."""
    name: str
    """In the file."""


@dataclass(frozen=True)
class SharedPlan:
    """The layouts in which all processes together write all tensors."""

    tensors: Mapping[str, LaidOutTensor]

    @functools.cached_property
    def mark(self) -> str:
        """A hash that is the same on processes with the same plan."""
        text = repr([(t.key, t.dtype, t.shape, t.layout, t.rank) for t in self.tensors.values()])
        return xxhash.xxh3_128_hexdigest(text.encode())

    def parts_of(self, rank: int) -> tuple[PlannedChunk, ...]:
        """The chunks that a process writes."""
        return tuple(
            PlannedChunk(key, box, tensor.dtype, name_in_file(key, box, tensor.shape))
            for key, tensor in self.tensors.items()
            for box in tensor.of_rank(rank)
        )


def plan_save(kinds: Sequence[Kind], world_size: int) -> SharedPlan:
    """Plan a save.

    Args:
        kinds: all processes, in order of the first rank of each kind.
        world_size: number of processes.

    Raises:
        CheckpointError: processes hold a tensor of different shapes, dtypes or layouts that do not fit together, or
            nobody saves some of its elements; it names the tensor and the ranks.
    """
    claims: dict[str, list[Claim]] = {}
    for kind in kinds:
        for offered in kind.offer.tensors:
            claims.setdefault(offered.key, []).append((kind, offered))
    rules = Rules(world_size)
    dealer = _Dealer(world_size)
    found = {key: rules.choice(claimed) for key, claimed in claims.items()}
    for key, choice in found.items():
        if isinstance(choice, Candidates) and len(choice.firsts) == 1:
            dealer.take(claims[key][0], choice.layout, int(choice.firsts[0]))
    for key, choice in found.items():
        if isinstance(choice, Listed):
            dealer.deal_boxes(claims[key][0], choice)
    several = [
        (key, choice) for key, choice in found.items() if isinstance(choice, Candidates) and len(choice.firsts) > 1
    ]
    for key, choice in sorted(several, key=lambda one: -_nbytes(claims[one[0]][0])):
        dealer.deal(claims[key][0], choice)
    return SharedPlan({key: dealer.tensors[key] for key in claims})


class _Dealer:
    """Gives every tensor to processes that write it, and counts the bytes that each of them writes."""

    def __init__(self, world_size: int) -> None:
        self.tensors: dict[str, LaidOutTensor] = {}
        self._loads: NDArray[np.int64] = np.zeros(world_size, dtype=np.int64)

    def take(self, claim: Claim, layout: Layout, first: int) -> None:
        """Let the processes of a layout, counted from rank ``first``, write a tensor."""
        _, offered = claim
        self.tensors[offered.key] = LaidOutTensor(offered.key, offered.dtype, offered.shape, layout, first)
        ranks, numel = layout.sizes(offered.shape)
        np.add.at(self._loads, ranks + first, numel * DTYPES[offered.dtype].itemsize)

    def deal(self, claim: Claim, choice: Candidates) -> None:
        """Let those processes write a tensor of which the busiest one has least to write."""
        ranks, _ = choice.layout.sizes(claim[1].shape)
        busiest = self._loads[choice.firsts[:, None] + ranks].max(1)
        self.take(claim, choice.layout, int(choice.firsts[busiest.argmin()]))

    def deal_boxes(self, claim: Claim, choice: Listed) -> None:
        """Let one of its holders write each chunk."""
        boxes = []
        for (offsets, sizes), holders in choice.holders.items():
            rank = min(holders, key=lambda holder: (self._loads[holder], holder))
            boxes.append((rank, offsets, sizes))
            self._loads[rank] += int(np.prod(sizes)) * DTYPES[claim[1].dtype].itemsize
        first = min((rank for rank, _, _ in boxes), default=0)
        layout = BoxLayout(boxes=tuple((rank - first, offsets, sizes) for rank, offsets, sizes in boxes))
        _, offered = claim
        self.tensors[offered.key] = LaidOutTensor(offered.key, offered.dtype, offered.shape, layout, first)


def _nbytes(claim: Claim) -> int:
    return int(np.prod(claim[1].shape, dtype=object)) * DTYPES[claim[1].dtype].itemsize
