"""Manifest, the index of a checkpoint: its files, and for each tensor dtype, shape and layout.

Format 1, which flextrain wrote before version 2 of the format, lists the chunks of every tensor instead; it is still read.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pydantic

from ..errors import CheckpointError
from ..stored_dtypes import DTYPES
from .layouts import MAX_RANKS, Layout, Strict
from .names_in_files import SHARD, file_of
from .saved_tensor import LaidOutTensor, SavedTensor, TensorEntry, known_dtype
from .untrusted import check_shape, one_line

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
