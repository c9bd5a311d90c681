"""What a process has to save: its tensors with their layouts, told so that alike processes say the same."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...dtensor_chunks import cuts_of
from ...shard_spans import Cut, share
from ...stored_dtypes import DTYPE_NAMES
from ..flat_shard import FlatShard
from ..held_chunks import held_chunks, is_cut_by_rule, is_ordinary
from ..layouts import Box


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
    return create_default_local_save_plan({key: tensor}, False).items  # only its class knows the layout
