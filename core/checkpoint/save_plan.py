"""Plan who writes what, from the layouts alone: every process computes the same plan by itself.

What several processes hold is written by one of them. The largest tensors are dealt out first, each to the processes
that have least to write so far.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..base.errors import CheckpointError
from ..base.tensors import DTYPE_NAMES, DTYPES
from .chunks import Cut, FlatShard, chunks_of_range, cuts_of, held_chunks, is_cut_by_rule, is_ordinary, share
from .folders import name_in_file
from .manifest import WHOLE, Box, BoxLayout, FlatLayout, LaidOutTensor, Layout, MeshLayout, check_boxes, even_flat
from .participants import ranks_text

# What a process has to save: its tensors with their layouts, told so that alike processes say the same.


class Mesh(NamedTuple):
    """A mesh of processes, whose ranks count from its first one."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    """All ranks, the last axis first; None: they are evenly spaced."""
    strides: tuple[int, ...]
    """How much the rank grows along each axis; only if ``ranks`` is None."""


class Whole(NamedTuple):
    """The process has the whole tensor."""


class OnMesh(NamedTuple):
    """The tensor is cut over a mesh."""

    mesh: int
    """Number of the mesh in the offer."""
    cuts: tuple[Cut | None, ...]
    """The cut of each axis; None: it replicates."""


class EvenRange(NamedTuple):
    """The process has its share of the flattened tensor, which all processes share evenly in the order of ranks."""


class Range(NamedTuple):
    """The process has a range of the flattened tensor."""

    start: int
    length: int


class Boxes(NamedTuple):
    """The process has some chunks of the tensor, by no rule."""

    boxes: tuple[Box, ...]


class Offered(NamedTuple):
    """A tensor, and what the process holds of it."""

    key: str
    dtype: str
    """A name in DTYPES."""
    shape: tuple[int, ...]
    held: Whole | OnMesh | EvenRange | Range | Boxes


@dataclass(frozen=True)
class Offer:
    """The tensors of a process; processes of one kind differ only in ``firsts``.

    Attributes:
        tensors: all its tensors.
        meshes: the meshes of those that are cut over one.
        firsts: the first rank of each mesh.
    """

    tensors: tuple[Offered, ...]
    meshes: tuple[Mesh, ...]
    firsts: tuple[int, ...]

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash that is equal for processes of one kind."""
        return xxhash.xxh3_128_digest(repr((self.tensors, self.meshes)).encode())

    def packed(self) -> bytes:
        """What processes of one kind have in common, as bytes for ``unpacked``."""
        return pickle.dumps((self.tensors, self.meshes))


def unpacked(data: bytes) -> Offer:
    """The offer whose ``packed`` another process of this job has sent; without its first ranks."""
    tensors, meshes = pickle.loads(data)
    return Offer(tensors, meshes, ())


def offer_of(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> Offer:
    """The offer of this process.

    Raises:
        CheckpointError: a DTensor has a pending sum, or its local tensor does not fit its placements.
    """
    meshes = _Meshes()
    found = []
    for key, tensor in tensors.items():
        held = _held(key, tensor, meshes, rank, world_size)
        if held is not None:
            found.append(Offered(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), held))
    return Offer(tuple(found), tuple(mesh for mesh, _ in meshes.found), tuple(first for _, first in meshes.found))


def _held(
    key: str, tensor: Tensor, meshes: _Meshes, rank: int, world_size: int
) -> Whole | OnMesh | EvenRange | Range | Boxes | None:
    if isinstance(tensor, FlatShard):
        begin, end = share(tensor.numel(), world_size, rank)
        start, length = tensor.start, tensor.to_local().numel()
        if not tensor.numel():
            return Whole()
        return EvenRange() if (begin, end) == (start, start + length) else Range(start, length)
    if is_ordinary(tensor):
        return Whole()
    if is_cut_by_rule(tensor):
        held_chunks(key, tensor)  # raises if the local tensor is not what the placements say
        array = cast(DTensor, tensor)
        number = meshes.number_of(array.device_mesh)
        if number is None:  # this process is not in the mesh
            return None
        return OnMesh(number, cuts_of(array.placements)) if tensor.numel() else Whole()
    return Boxes(tuple((offsets, tuple(chunk.shape)) for offsets, chunk in held_chunks(key, tensor).items()))


class _Meshes:
    """The different meshes of this process's tensors, numbered, each with its first rank."""

    def __init__(self) -> None:
        self.found: dict[tuple[Mesh, int], int] = {}
        self._known: dict[int, int | None] = {}

    def number_of(self, mesh: DeviceMesh) -> int | None:
        """Number of a mesh; None if this process is not in it."""
        if id(mesh) not in self._known:
            inside = mesh.get_coordinate() is not None
            self._known[id(mesh)] = self.found.setdefault(_described(mesh), len(self.found)) if inside else None
        return self._known[id(mesh)]


def _described(mesh: DeviceMesh) -> tuple[Mesh, int]:
    """A mesh and its first rank."""
    ranks: NDArray[Any] = np.array(mesh.mesh.tolist(), dtype=np.int64)
    first = int(ranks.flat[0])
    ranks = ranks - first
    strides = tuple(int(ranks.take(1, axis).flat[0]) if size > 1 else 0 for axis, size in enumerate(ranks.shape))
    even: NDArray[Any] = np.zeros((), dtype=np.int64)
    for size, stride in zip(ranks.shape, strides, strict=True):
        even = even[..., None] + np.arange(size) * stride
    if np.array_equal(even, ranks):
        return Mesh(ranks.shape, None, strides), first
    return Mesh(ranks.shape, tuple(ranks.reshape(-1).tolist()), ()), first


def layout_of(key: str, tensor: Tensor) -> Any:
    """The layout of a tensor on this process: as long as it is equal, so is what the process offers."""
    if isinstance(tensor, FlatShard):
        return tensor.dtype, tensor.shape, tensor.start, tensor.to_local().shape
    if is_cut_by_rule(tensor):
        array = cast(DTensor, tensor)
        return tensor.dtype, tensor.shape, array.device_mesh, array.placements
    if is_ordinary(tensor):
        return tensor.dtype, tensor.shape
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    return create_default_local_save_plan({key: tensor}, False).items  # only its class knows the layout


# The layout of a tensor in a checkpoint, and who may write it, from what every kind of process holds of it.


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
