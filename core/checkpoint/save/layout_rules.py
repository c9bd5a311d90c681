"""The layout of a tensor in a checkpoint, and who may write it, from what every kind of process holds of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...shard_spans import Cut, share
from ..flat_ranges import chunks_of_range
from ..layouts import WHOLE, Box, FlatLayout, Layout, MeshLayout, check_boxes, even_flat
from ..participants import ranks_text
from .offer import Boxes, EvenRange, Mesh, Offer, Offered, OnMesh, Range, Whole

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Kind:
    """Processes that have the same to save.

    Attributes:
        ranks: theirs, in order.
        offer: of one of them.
        firsts: for each mesh of the offer, the first ranks of the meshes of all these processes.
    """

    ranks: Sequence[int]
    offer: Offer
    firsts: Sequence[Sequence[int]]


Claim = tuple[Kind, Offered]
"""Processes, and a tensor that they hold."""


class Candidates(NamedTuple):
    """A layout, and the ranks from which it may count: several, if there are replicas."""

    layout: Layout
    firsts: Ranks


class Listed(NamedTuple):
    """Chunks that follow no rule, each with the ranks that hold it."""

    holders: Mapping[Box, Sequence[int]]


class Rules:
    """Finds the layouts of tensors; what many tensors share is computed once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._everyone: Ranks = np.arange(world_size, dtype=np.int64)
        self._holders: dict[tuple[int, ...], Ranks] = {}
        self._on_mesh: dict[tuple[tuple[int, OnMesh], ...], Candidates | None] = {}

    def choice(self, claims: Sequence[Claim]) -> Candidates | Listed:
        """The layout in which a tensor can be written.

        Args:
            claims: all processes that hold something of it.

        Raises:
            CheckpointError: they do not hold the same tensor, or not all of it.
        """
        _check_alike(claims)
        return self._by_rule(claims) or self._listed(claims)

    def _by_rule(self, claims: Sequence[Claim]) -> Candidates | None:
        numel = math.prod(claims[0][1].shape)
        held = {type(offered.held) for _, offered in claims}
        if held == {Whole}:
            return Candidates(WHOLE, self._holders_of(claims))
        if held == {OnMesh}:
            key = tuple((id(kind), offered.held) for kind, offered in claims if isinstance(offered.held, OnMesh))
            if key not in self._on_mesh:
                self._on_mesh[key] = self._find_on_mesh(claims)
            return self._on_mesh[key]
        if held == {EvenRange} and len(self._holders_of(claims)) == self._world_size:
            return Candidates(even_flat(numel, self._world_size), self._everyone[:1])
        return self._consecutive(claims, numel) if held <= {EvenRange, Range} else None

    def _holders_of(self, claims: Sequence[Claim]) -> Ranks:
        """The ranks that hold something of a tensor, in order."""
        if len(claims) == 1 and len(claims[0][0].ranks) == self._world_size:
            return self._everyone
        key = tuple(id(kind) for kind, _ in claims)
        if key not in self._holders:
            ranks = [np.array(kind.ranks, dtype=np.int64) for kind, _ in claims]
            self._holders[key] = np.sort(np.concatenate(ranks))
        return self._holders[key]

    def _find_on_mesh(self, claims: Sequence[Claim]) -> Candidates | None:
        """The layout of the axes that cut. It may count from any replica of which all processes are there."""
        layouts, firsts = set(), []
        for kind, offered in claims:
            assert isinstance(offered.held, OnMesh)
            cut = _without_replicas(kind.offer.meshes[offered.held.mesh], offered.held.cuts)
            if cut is None:
                return None
            layout, replicas = cut
            layouts.add(layout)
            begins = np.array(kind.firsts[offered.held.mesh], dtype=np.int64)
            firsts.append((begins[:, None] + replicas).reshape(-1))
        if len(layouts) > 1:
            return None
        layout = layouts.pop()
        begins = np.unique(np.concatenate(firsts))
        present: NDArray[np.bool_] = np.zeros(self._world_size, dtype=bool)
        present[self._holders_of(claims)] = True
        complete = begins[present[begins[:, None] + layout.every_rank()].all(1)]
        return Candidates(layout, complete) if len(complete) else None

    def _consecutive(self, claims: Sequence[Claim], numel: int) -> Candidates | None:
        """The layout of ranges of which each begins where the last one ends."""
        ranges = {
            (*_range_of(offered, rank, self._world_size), rank) for kind, offered in claims for rank in kind.ranks
        }
        runs: list[tuple[int, int, int]] = []
        at = 0
        for start, length, rank in sorted(found for found in ranges if found[1]):
            if start != at:
                return None
            if runs and runs[-1][2] == length and sum(runs[-1][:2]) == rank:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
            else:
                runs.append((rank, 1, length))
            at += length
        if at != numel:
            return None
        first = runs[0][0]
        layout = FlatLayout(runs=tuple((rank - first, count, length) for rank, count, length in runs))
        return Candidates(layout, np.array([first], dtype=np.int64))

    def _listed(self, claims: Sequence[Claim]) -> Listed:
        """All different chunks."""
        holders: dict[Box, list[int]] = {}
        for kind, offered in claims:
            for rank, box in _all_boxes(kind, offered, self._world_size):
                holders.setdefault(box, []).append(rank)
        try:
            check_boxes(list(holders), claims[0][1].shape)
        except ValueError as error:
            held = ", ".join(f"rank {ranks_text(kind.ranks)} has {_text(kind, one)}" for kind, one in claims[:4])
            raise CheckpointError(f"{claims[0][1].key}: {error}; {held}") from None
        return Listed(holders)


def _check_alike(claims: Sequence[Claim]) -> None:
    kind, one = claims[0]
    for other_kind, other in claims[1:]:
        if (other.dtype, other.shape) != (one.dtype, one.shape):
            raise CheckpointError(
                f"{one.key}: is {other.dtype} {other.shape} on rank {ranks_text(other_kind.ranks)}, and {one.dtype} "
                f"{one.shape} on rank {ranks_text(kind.ranks)}; all processes have to save the same tensor"
            )


def _without_replicas(mesh: Mesh, cuts: Sequence[Cut | None]) -> tuple[MeshLayout, Ranks] | None:
    """The axes of a mesh that cut, and the ranks of the replicas, from the first; None: the ranks follow no rule."""
    cutting = [axis for axis, cut in enumerate(cuts) if cut is not None]
    shape, texts = tuple(mesh.shape[axis] for axis in cutting), tuple(_cut_text(cut) for cut in cuts if cut is not None)
    replicas: Ranks = np.zeros(1, dtype=np.int64)
    if mesh.ranks is not None:
        replicated = len(cutting) < len(cuts)
        return None if replicated else (MeshLayout(mesh=shape, ranks=mesh.ranks, cuts=texts), replicas)
    for axis, cut in enumerate(cuts):
        if cut is None:
            steps = np.arange(mesh.shape[axis], dtype=np.int64) * mesh.strides[axis]
            replicas = (replicas[:, None] + steps).reshape(-1)
    return MeshLayout(mesh=shape, strides=tuple(mesh.strides[axis] for axis in cutting), cuts=texts), replicas


def _cut_text(cut: Cut) -> str:
    return f"S{cut.dim}" if cut.split_factor == 1 else f"S{cut.dim}/{cut.split_factor}"


def _range_of(offered: Offered, rank: int, world_size: int) -> tuple[int, int]:
    """Start and length of the range of the flattened tensor that a process has."""
    if isinstance(offered.held, Range):
        return offered.held
    begin, end = share(math.prod(offered.shape), world_size, rank)
    return begin, end - begin


def _all_boxes(kind: Kind, offered: Offered, world_size: int) -> Iterator[tuple[int, Box]]:
    """Yield every chunk that the processes of a kind hold of a tensor, with its rank."""
    held = offered.held
    if isinstance(held, OnMesh):
        present = set(kind.ranks)
        for rank, box in _boxes_on_mesh(kind, held, offered.shape):
            if rank in present:
                yield rank, box
        return
    for rank in kind.ranks:
        if isinstance(held, Whole):
            yield rank, ((0,) * len(offered.shape), offered.shape)
        elif isinstance(held, Boxes):
            yield from ((rank, box) for box in held.boxes)
        else:
            start, length = _range_of(offered, rank, world_size)
            yield from ((rank, box) for box in chunks_of_range(offered.shape, start, start + length))


def _boxes_on_mesh(kind: Kind, held: OnMesh, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    mesh = kind.offer.meshes[held.mesh]
    cutting = [axis for axis, cut in enumerate(held.cuts) if cut is not None]
    sizes = tuple(mesh.shape[axis] for axis in cutting)
    # The cutting axes alone, with the position among them as the rank.
    steps = tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))
    layout = MeshLayout(mesh=sizes, strides=steps, cuts=tuple(_cut_text(cut) for cut in held.cuts if cut is not None))
    for number, coordinates in enumerate(itertools.product(*map(range, mesh.shape))):
        rank = mesh.ranks[number] if mesh.ranks is not None else _dot(coordinates, mesh.strides)
        boxes = list(layout.chunks_of(shape, _dot([coordinates[axis] for axis in cutting], steps)))
        for first in kind.firsts[held.mesh]:
            yield from ((first + rank, box) for box in boxes)


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _text(kind: Kind, offered: Offered) -> str:
    """What processes hold of a tensor, for a message."""
    held = offered.held
    if isinstance(held, Whole):
        return "the whole tensor"
    if isinstance(held, OnMesh):
        cuts = ", ".join("R" if cut is None else _cut_text(cut) for cut in held.cuts)
        return f"({cuts}) over a mesh of {kind.offer.meshes[held.mesh].shape}"
    if isinstance(held, Range):
        return f"elements {held.start} to {held.start + held.length}"
    return "an even share of the elements" if isinstance(held, EvenRange) else f"chunks at {[o for o, _ in held.boxes]}"
