"""Manifest, the index of a checkpoint: its files, and for each tensor dtype, shape and layout.

Format 1, which flextrain wrote before version 2 of the format, lists the chunks of every tensor instead; it is still read.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import pydantic
from numpy.typing import NDArray

from ..base.errors import CheckpointError
from ..base.tensors import DTYPES
from .chunks import Cut, Span, chunks_of_range, own_spans
from .folders import SHARD, file_of, name_in_file
from .untrusted import check_disjoint, check_shape, one_line

# Layouts: which process holds which chunks of a tensor, as rules whose length does not grow with the processes.
#
# Ranks in a layout count from the first process that the tensor is on, so that many tensors share a layout.


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""
MAX_RANKS = 100_000
_MAX_SPANS = 2**22
_CUT = re.compile(r"S(\d{1,3})(?:/(\d{1,9}))?")


class Strict(pydantic.BaseModel):
    """Part of an index: fields that it does not know are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class MeshLayout(Strict):
    """A mesh of processes, each of whose axes cuts a dimension, as a DTensor does; without axes, one process has all."""

    mesh: tuple[int, ...]
    """Sizes of the axes."""
    strides: tuple[int, ...] | None = None
    """How much the rank grows along each axis."""
    ranks: tuple[int, ...] | None = None
    """The ranks, the last axis first, if they are not evenly spaced."""
    cuts: tuple[str, ...]
    """What each axis cuts: ``S0`` is dimension 0, ``S0/3`` dimension 0 of three tensors that are joined along it."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> MeshLayout:
        count = math.prod(self.mesh)
        if len(self.cuts) != len(self.mesh) or any(size < 1 for size in self.mesh) or count > MAX_RANKS:
            raise ValueError("its mesh is not valid")
        if (self.strides is None) == (self.ranks is None) or len(self.strides or self.mesh) != len(self.mesh):
            raise ValueError("its mesh needs either strides or ranks")
        largest = MAX_RANKS if self.strides is None else max((abs(s) for s in self.strides), default=0)
        if largest > MAX_RANKS or (self.ranks is not None and len(self.ranks) != count):
            raise ValueError("its ranks do not fill the mesh")
        if any(_CUT.fullmatch(cut) is None for cut in self.cuts):
            raise ValueError("it has a cut that no axis makes")
        if count * math.prod(cut.split_factor for cut in self.as_cuts()) > _MAX_SPANS:
            raise ValueError("it cuts into more pieces than any tensor")
        if self.ranks is not None and any(abs(rank) > MAX_RANKS for rank in self.ranks):
            raise ValueError("its mesh has a rank that cannot be")
        if len(set(_ranks(self).tolist())) != count:
            raise ValueError("its mesh has a rank twice")
        return self

    def as_cuts(self) -> tuple[Cut, ...]:
        """The cuts of the axes."""
        found = [_CUT.fullmatch(cut) for cut in self.cuts]
        return tuple(Cut(int(match[1]), int(match[2] or 1)) for match in found if match is not None)

    def every_rank(self) -> NDArray[np.int64]:
        """The ranks of all processes, the last axis first."""
        return _ranks(self)

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if no tensor of this shape can have the layout."""
        if any(cut.dim >= len(shape) or cut.split_factor < 1 for cut in self.as_cuts()):
            raise ValueError("its layout cuts a dimension that it does not have")

    def sizes(self, shape: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ranks of all processes, and how many elements each of them holds."""
        return _ranks(self), _numel(self, tuple(shape))

    def chunks_of(self, shape: Sequence[int], rank: int) -> Iterator[Box]:
        """Yield the chunks that a process holds; none if it is not in the mesh."""
        position = _positions(self).get(rank)
        if position is None:
            return
        if not self.mesh:  # also a tensor without elements is a chunk
            yield (0,) * len(shape), tuple(shape)
            return
        coordinates = [int(coordinate) for coordinate in np.unravel_index(position, self.mesh)]
        spans = [_dimension(self, dim, size).at(coordinates) for dim, size in enumerate(shape)]
        for chunk in itertools.product(*spans):
            yield tuple(begin for begin, _ in chunk), tuple(end - begin for begin, end in chunk)

    def chunks(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """Yield all chunks, each with its rank."""
        return ((rank, box) for rank in _ranks(self).tolist() for box in self.chunks_of(shape, rank))

    def count(self, shape: Sequence[int]) -> int:
        """The number of all chunks."""
        # Each axis cuts one dimension, so that every span of one meets every span of the others in one process.
        return math.prod(len(_dimension(self, dim, size).begins) for dim, size in enumerate(shape)) if self.mesh else 1

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the rank and the box of every chunk that shares elements with ``box``; others are not looked at."""
        dimensions = [_dimension(self, dim, size) for dim, size in enumerate(shape)]
        wanted = zip(dimensions, *box, strict=True)
        for chunk in itertools.product(*(dimension.within(offset, size) for dimension, offset, size in wanted)):
            coordinates = [0] * len(self.mesh)
            for dimension, (_, at) in zip(dimensions, chunk, strict=True):
                for axis, coordinate in zip(dimension.axes, at, strict=True):
                    coordinates[axis] = coordinate
            position = int(np.ravel_multi_index(coordinates, self.mesh)) if self.mesh else 0
            spans = [span for span, _ in chunk]
            yield (
                int(_ranks(self)[position]),
                (tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans)),
            )


class FlatLayout(Strict):
    """Consecutive ranges of the flattened tensor, one for each process, as a FlatShard has."""

    runs: tuple[tuple[int, int, int], ...]
    """(rank, count, length): the next ``count`` ranks from this one hold ``length`` elements each."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> FlatLayout:
        if any(count < 1 or length < 1 or abs(rank) > MAX_RANKS for rank, count, length in self.runs):
            raise ValueError("it has a range without elements")
        if sum(count for _, count, _ in self.runs) > MAX_RANKS:
            raise ValueError("it has more ranges than processes")
        return self

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the ranges are not all there."""
        if sum(count * length for _, count, length in self.runs) != math.prod(shape):
            raise ValueError("its ranges are not all there")

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, begin, end) of every range."""
        begin = 0
        for first, count, length in self.runs:
            for rank in range(first, first + count):
                yield rank, begin, begin + length
                begin += length

    def sizes(self, shape: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See MeshLayout."""
        ranks = [np.arange(rank, rank + count, dtype=np.int64) for rank, count, _ in self.runs]
        lengths = [np.full(count, length, dtype=np.int64) for _, count, length in self.runs]
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *ranks]), np.concatenate([none, *lengths])

    def chunks_of(self, shape: Sequence[int], rank: int) -> Iterator[Box]:
        """See MeshLayout."""
        begin = 0
        for first, count, length in self.runs:
            if first <= rank < first + count:
                start = begin + (rank - first) * length
                yield from chunks_of_range(shape, start, start + length)
            begin += count * length

    def chunks(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        return ((rank, box) for rank, begin, end in self._ranges() for box in chunks_of_range(shape, begin, end))

    def count(self, shape: Sequence[int]) -> int:
        """See MeshLayout."""
        return sum(1 for _ in self.chunks(shape))

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        if 0 in box[1]:
            return
        steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        low = sum(offset * step for offset, step in zip(box[0], steps, strict=True))
        high = sum((offset + size - 1) * step for offset, size, step in zip(*box, steps, strict=True)) + 1
        begin = 0
        for first, count, length in self.runs:
            for number in range(max(0, (low - begin) // length), min(count, -(-(high - begin) // length))):
                start = begin + number * length
                for chunk in chunks_of_range(shape, start, start + length):
                    if overlap(chunk, box) is not None:
                        yield first + number, chunk
            begin += count * length


class BoxLayout(Strict):
    """A list of chunks, for what follows from no rule; it grows with the processes."""

    boxes: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """(rank, offsets, sizes) of each chunk."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> BoxLayout:
        if any(abs(rank) > MAX_RANKS for rank, _, _ in self.boxes):
            raise ValueError("it has a chunk on a process that cannot be")
        return self

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the chunks do not make up the tensor."""
        check_boxes([(offsets, sizes) for _, offsets, sizes in self.boxes], shape)

    def sizes(self, shape: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See MeshLayout."""
        found: dict[int, int] = {}
        for rank, _, sizes in self.boxes:
            found[rank] = found.get(rank, 0) + math.prod(sizes)
        return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.int64)

    def chunks_of(self, shape: Sequence[int], rank: int) -> Iterator[Box]:
        """See MeshLayout."""
        return ((offsets, sizes) for owner, offsets, sizes in self.boxes if owner == rank)

    def chunks(self, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        return ((rank, (offsets, sizes)) for rank, offsets, sizes in self.boxes)

    def count(self, shape: Sequence[int]) -> int:
        """See MeshLayout."""
        return len(self.boxes)

    def overlapping(self, shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
        """See MeshLayout."""
        for rank, *chunk in self.boxes:
            if overlap((chunk[0], chunk[1]), box) is not None:
                yield rank, (chunk[0], chunk[1])


def _kind(layout: Any) -> str | None:
    fields = layout if isinstance(layout, dict) else vars(layout) if isinstance(layout, Strict) else ()
    return next((kind for kind in ("mesh", "runs", "boxes") if kind in fields), None)


Layout = Annotated[
    Annotated[MeshLayout, pydantic.Tag("mesh")]
    | Annotated[FlatLayout, pydantic.Tag("runs")]
    | Annotated[BoxLayout, pydantic.Tag("boxes")],
    pydantic.Discriminator(_kind),
]


def check_boxes(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """Raise ValueError if chunks do not make up a tensor of this shape, each element once."""
    for offsets, sizes in boxes:
        ends = zip(offsets, sizes, shape, strict=True)
        if any(offset < 0 or length < 0 or offset + length > size for offset, length, size in ends):
            raise ValueError("a chunk lies outside of it")
    # Elements that no chunk covers would stay uninitialised.
    if sum(math.prod(sizes) for _, sizes in boxes) < math.prod(shape):
        raise ValueError("its chunks are not all there")
    check_disjoint(boxes)


def overlap(a: Box, b: Box) -> Box | None:
    """The box of the elements that both have; None if there are none. Tensors without dimensions have one element."""
    spans = [(max(x, y), min(x + m, y + n)) for x, m, y, n in zip(*a, *b, strict=True)]
    if any(begin >= end for begin, end in spans):
        return None
    return tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans)


def even_flat(numel: int, count: int) -> FlatLayout:
    """The ranges of a flattened tensor that ``count`` processes share evenly, as ZeRO-3 does; the last ones hold less."""
    length = -(-numel // count)
    full, rest = divmod(numel, length) if length else (0, 0)
    return FlatLayout(runs=((0, full, length),) * bool(full) + ((full, 1, rest),) * bool(rest))


# What many tensors have in common is computed once


@dataclass(frozen=True)
class _Dimension:
    """One dimension of a tensor: the spans that each process holds of it."""

    axes: tuple[int, ...]
    """The axes of the mesh that cut it."""
    spans: dict[tuple[int, ...], list[Span]]
    """By the coordinates on these axes."""
    begins: list[int]
    ends: list[int]
    """Of all spans, in their order, which is that of ``owners``."""
    owners: list[tuple[int, ...]]

    def at(self, coordinates: Sequence[int]) -> list[Span]:
        """The spans of the process with these coordinates in the whole mesh."""
        return self.spans[tuple(coordinates[axis] for axis in self.axes)]

    def within(self, offset: int, size: int) -> list[tuple[Span, tuple[int, ...]]]:
        """The spans that share indices with [offset, offset + size), each with the coordinates of its processes."""
        low, high = bisect_right(self.ends, offset), bisect_left(self.begins, offset + size)
        return [((self.begins[n], self.ends[n]), self.owners[n]) for n in range(low, high)]


@functools.lru_cache(maxsize=512)
def _dimension(layout: MeshLayout, dim: int, size: int) -> _Dimension:
    cuts, mesh = layout.as_cuts(), layout.mesh
    axes = tuple(axis for axis, cut in enumerate(cuts) if cut.dim == dim)
    found: dict[tuple[int, ...], list[Span]] = {}
    for at in itertools.product(*(range(mesh[axis]) for axis in axes)):
        found[at] = own_spans(size, 0, [Cut(0, cuts[a].split_factor) for a in axes], [mesh[a] for a in axes], at)
    order = sorted((begin, end, at) for at, spans in found.items() for begin, end in spans)
    begins, ends, owners = (list(column) for column in zip(*order, strict=True)) if order else ([], [], [])
    return _Dimension(axes, found, begins, ends, owners)


@functools.lru_cache(maxsize=512)
def _numel(layout: MeshLayout, shape: tuple[int, ...]) -> NDArray[np.int64]:
    total: NDArray[Any] = np.ones(layout.mesh, dtype=np.int64)
    for dim, size in enumerate(shape):
        dimension = _dimension(layout, dim, size)
        lengths = [sum(end - begin for begin, end in spans) for spans in dimension.spans.values()]
        sizes = [n if axis in dimension.axes else 1 for axis, n in enumerate(layout.mesh)]
        total = total * np.array(lengths, dtype=np.int64).reshape(sizes)
    return total.reshape(-1)


@functools.lru_cache(maxsize=512)
def _ranks(layout: MeshLayout) -> NDArray[np.int64]:
    if layout.ranks is not None:
        return np.array(layout.ranks, dtype=np.int64)
    found: NDArray[Any] = np.zeros((), dtype=np.int64)
    for size, stride in zip(layout.mesh, layout.strides or (), strict=True):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return found.reshape(-1)


@functools.lru_cache(maxsize=512)
def _positions(layout: MeshLayout) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(_ranks(layout).tolist())}


WHOLE = MeshLayout(mesh=(), strides=(), cuts=())
"""One process has the whole tensor."""


# A tensor of a checkpoint: dtype, shape, and the chunks that files have of it, as a list or as a layout.


class StoredChunk(Strict):
    """A chunk of a tensor, with its file and its name there."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    name: str
    """Name of the chunk in the file."""

    @pydantic.field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        if not SHARD.fullmatch(file):
            raise ValueError(f'"{file}" is no name of a shard')
        return file


class SavedTensor(Protocol):
    """What loading asks a tensor of a checkpoint."""

    @property
    def dtype(self) -> str:
        """A name in DTYPES."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def chunks(self) -> Sequence[StoredChunk]:
        """All chunks; as many as there are processes, and more."""

    @property
    def chunk_count(self) -> int:
        """Number of all chunks."""

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """Yield the chunks that share elements with a box."""


class TensorEntry(Strict):
    """A tensor whose chunks are listed, as in format 1 and in foreign files."""

    dtype: str
    """A name in DTYPES."""
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @pydantic.field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        return known_dtype(dtype)

    @pydantic.model_validator(mode="after")
    def _whole(self) -> TensorEntry:
        check_shape(self.shape)
        check_boxes([(chunk.offsets, chunk.shape) for chunk in self.chunks], self.shape)
        return self

    @property
    def chunk_count(self) -> int:
        """See SavedTensor."""
        return len(self.chunks)

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """See SavedTensor."""
        return (chunk for chunk in self.chunks if overlap((chunk.offsets, chunk.shape), box) is not None)


@dataclass(frozen=True)
class LaidOutTensor:
    """A tensor whose chunks follow from a layout, and so do their files and names.

    Attributes:
        key: its key in the checkpoint that was saved, from which the names in the files are made.
        rank: of the process from which the layout counts.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    rank: int

    @property
    def chunks(self) -> tuple[StoredChunk, ...]:
        """See SavedTensor."""
        return tuple(self._stored(rank, box) for rank, box in self.layout.chunks(self.shape))

    @property
    def chunk_count(self) -> int:
        """See SavedTensor."""
        return self.layout.count(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def overlapping(self, box: Box) -> Iterator[StoredChunk]:
        """See SavedTensor."""
        return (self._stored(rank, found) for rank, found in self.layout.overlapping(self.shape, box))

    def of_rank(self, rank: int) -> Iterator[Box]:
        """Yield the chunks that a process writes."""
        return self.layout.chunks_of(self.shape, rank - self.rank)

    def _stored(self, rank: int, box: Box) -> StoredChunk:
        name, file = name_in_file(self.key, box, self.shape), file_of(rank + self.rank)
        # Not validated again, one by one: the layout is.
        return StoredChunk.model_construct(offsets=box[0], shape=box[1], file=file, name=name)


def known_dtype(dtype: str) -> str:
    """Return the name of a dtype; raise ValueError if checkpoints do not support it."""
    if dtype not in DTYPES:
        raise ValueError(f"tensors of {dtype} cannot be read")
    return dtype


FORMAT, VERSION = "flextrain-checkpoint", 2
MANIFEST, VALUES = "manifest.json", "values.json"


class UnknownFormatError(Exception):
    """A manifest is of a format that this version of flextrain does not know."""


class FileEntry(Strict):
    """Size and checksum of a file of the checkpoint."""

    size: int
    """In bytes."""
    xxh3: str
    """Checksum of the whole file: XXH3 with 64 bits, sixteen hexadecimal digits."""


class PlacedTensor(Strict):
    """Dtype, shape and layout of a tensor."""

    dtype: str
    """A name in DTYPES."""
    shape: tuple[int, ...]
    layout: int
    """Its number in the manifest's layouts."""
    rank: int
    """The process from which the layout counts."""

    @pydantic.field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        return known_dtype(dtype)


class Manifest(Strict):
    """The index of a checkpoint; a directory with it is a complete checkpoint."""

    format: str = FORMAT
    version: int = VERSION
    written_by: dict[str, str | int]
    """Versions, strategy and world size, for information only."""
    files: dict[str, FileEntry]
    nonfinite: tuple[str, ...] = ()
    """Keys of tensors that training should keep finite and that have NaN or infinity; written only if there are any."""
    layouts: tuple[Layout, ...]
    """The layouts of all tensors, each once."""
    tensors: dict[str, PlacedTensor]

    @pydantic.model_validator(mode="after")
    def _held(self) -> Manifest:
        for key, tensor in self.tensors.items():
            if abs(tensor.rank) > MAX_RANKS:
                raise ValueError(f"{key} is on processes that cannot be")
            if not 0 <= tensor.layout < len(self.layouts):
                raise ValueError(f"{key} has layout {tensor.layout}, which is not listed")
            try:
                check_shape(tensor.shape)
                self.layouts[tensor.layout].check(tensor.shape)
            except ValueError as error:
                raise ValueError(f"{key} is not valid, {error}") from None
        check_marked(self.nonfinite, self.tensors)
        check_held(self.files, self._declared())
        return self

    def _declared(self) -> dict[str, int]:
        """How many bytes of tensors each file holds."""
        total = sum(entry.size for entry in self.files.values())
        kinds = collections.Counter((t.layout, t.shape, t.dtype, t.rank) for t in self.tensors.values())
        names: dict[tuple[int, tuple[int, ...], str, int], str] = {}
        for key, t in self.tensors.items():
            names.setdefault((t.layout, t.shape, t.dtype, t.rank), key)
        declared = np.zeros(MAX_RANKS, dtype=np.int64)
        for kind, count in kinds.items():
            layout, shape, dtype, first = kind
            bytes_each = DTYPES[dtype].itemsize * count
            ranks, numel = self.layouts[layout].sizes(shape)
            ranks = ranks + first
            if ranks.size and not 0 <= ranks.min() <= ranks.max() < MAX_RANKS:
                raise ValueError(f"{names[kind]} is on processes that cannot be")
            for rank in ranks[numel > 0].tolist() if math.prod(shape) else ranks.tolist():
                if file_of(rank) not in self.files:
                    raise ValueError(f"{names[kind]} is in {file_of(rank)}, which is not listed")
            if (size := bytes_each * math.prod(shape)) > total:  # also more than an integer of 64 bits may hold
                raise ValueError(f"{names[kind]}: the files have {total} bytes and would hold tensors of {size}")
            np.add.at(declared, ranks, numel * bytes_each)
        return {file_of(rank): int(declared[rank]) for rank in np.flatnonzero(declared).tolist()}

    @functools.cached_property
    def entries(self) -> dict[str, SavedTensor]:
        """The tensors, by key."""
        return {
            key: LaidOutTensor(key, tensor.dtype, tensor.shape, self.layouts[tensor.layout], tensor.rank)
            for key, tensor in self.tensors.items()
        }


class ListingManifest(Strict):
    """The index of a checkpoint in format 1."""

    format: str = FORMAT
    version: int = 1
    written_by: dict[str, str | int]
    files: dict[str, FileEntry]
    nonfinite: tuple[str, ...] = ()
    tensors: dict[str, TensorEntry]

    @pydantic.model_validator(mode="after")
    def _held(self) -> ListingManifest:
        declared = dict.fromkeys(self.files, 0)
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                if chunk.file not in declared:
                    raise ValueError(f"{key} is in {chunk.file}, which is not listed")
                declared[chunk.file] += math.prod(chunk.shape) * DTYPES[entry.dtype].itemsize
        check_held(self.files, declared)
        check_marked(self.nonfinite, self.tensors)
        return self

    @property
    def entries(self) -> dict[str, SavedTensor]:
        """The tensors, by key."""
        return dict(self.tensors)


AnyManifest = Manifest | ListingManifest


class Head(pydantic.BaseModel):
    """What tells how to read the rest."""

    format: str = FORMAT
    version: int = 1


def check_known(head: Head) -> None:
    """Raise UnknownFormatError if this version of flextrain cannot read what is of this format."""
    if head.format != FORMAT:
        raise UnknownFormatError(f'is of format "{one_line(head.format)}", this flextrain reads {FORMAT}')
    if head.version > VERSION:
        raise UnknownFormatError(
            f"was written by a newer flextrain, in version {one_line(head.version)} of the format; this one reads up to version "
            f"{VERSION}, install a newer one"
        )
    if head.version < 1:
        raise UnknownFormatError(f"is in version {one_line(head.version)} of the format, which does not exist")


def is_newer(text: bytes) -> bool:
    """Whether a JSON text, which need not have a checksum as manifests have today, says that a newer flextrain wrote it."""
    try:
        head = Head.model_validate_json(text)
    except pydantic.ValidationError:
        return False
    return head.format == FORMAT and head.version > VERSION


def parse_manifest(text: bytes) -> AnyManifest:
    """The manifest in a JSON text.

    Raises:
        pydantic.ValidationError: it is damaged.
        UnknownFormatError: this version of flextrain does not know the format.
    """
    head = Head.model_validate_json(text)
    check_known(head)
    return (ListingManifest if head.version == 1 else Manifest).model_validate_json(text)


def manifest_in(path: Path, text: bytes) -> AnyManifest:
    """The manifest of the checkpoint at ``path`` in its JSON text, without a look at the storage.

    Raises:
        CheckpointError: it is damaged, or has a newer version.
    """
    try:
        manifest = parse_manifest(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        at, reason = one_line(".".join(map(str, first["loc"]))), first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path / MANIFEST}: is damaged at {at or 'its beginning'}, {one_line(reason)}") from None
    except UnknownFormatError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from None
    if VALUES not in manifest.files:
        raise CheckpointError(f"{path / MANIFEST}: is damaged at files, it lacks {VALUES}")
    for name in manifest.files:
        if name != VALUES and not SHARD.fullmatch(name):
            raise CheckpointError(f'{path / MANIFEST}: "{one_line(name)}" is no name of a file of a checkpoint')
    return manifest


def manifest_of(
    tensors: Mapping[str, LaidOutTensor],
    files: Mapping[str, FileEntry],
    written_by: Mapping[str, str | int],
    nonfinite: Iterable[str] = (),
) -> bytes:
    """The JSON text of the manifest of these tensors, each of whose layouts it has once."""
    numbers: dict[Layout, int] = {}
    placed = {
        key: PlacedTensor(
            dtype=tensor.dtype,
            shape=tensor.shape,
            layout=numbers.setdefault(tensor.layout, len(numbers)),
            rank=tensor.rank,
        )
        for key, tensor in tensors.items()
    }
    manifest = Manifest(
        written_by=dict(written_by),
        files=dict(files),
        nonfinite=tuple(nonfinite),
        layouts=tuple(numbers),
        tensors=placed,
    )
    # A manifest without marked tensors has no word of them, nor a layout of the fields that others have.
    return manifest.model_dump_json(exclude_none=True, exclude=None if manifest.nonfinite else {"nonfinite"}).encode()


def check_held(files: Mapping[str, FileEntry], declared: Mapping[str, int]) -> None:
    """Raise ValueError if a file is smaller than its tensors: loading allocates memory for them before it reads."""
    for file, size in declared.items():
        if size > files[file].size:
            raise ValueError(f"{file} has {files[file].size} bytes and would hold tensors of {size}")


def check_marked(nonfinite: Iterable[str], tensors: Mapping[str, object]) -> None:
    """Raise ValueError if a key that is marked as not finite has no tensor."""
    if stray := next((key for key in nonfinite if key not in tensors), None):
        raise ValueError(f"{stray} is marked as not finite and does not exist")
