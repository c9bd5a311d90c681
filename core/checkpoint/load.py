"""Open a checkpoint and load its tensors on all processes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from ..base.errors import CheckpointError, counted
from ..base.tensors import DTYPES, dtype_name
from ..comm.agreement import gather_differing, raising_together, told_by_rank_0
from ..comm.collectives import get_rank, get_world_size
from . import directory
from .chunks import FlatShard, held_chunks
from .directory import is_checkpoint, read_manifest
from .folders import as_path, is_local, reaching
from .manifest import MANIFEST, VALUES, Box, FileEntry, SavedTensor, StoredChunk, manifest_in, overlap
from .participants import Participants
from .safetensors_file import Fetch, SafetensorsFile
from .untrusted import parse_json, read_limited

_logger = logging.getLogger("flextrain")

# Fill tensors in place from the chunks of a checkpoint; a process reads what it needs, and nothing else.


Source = Callable[[str], AbstractContextManager[Fetch]]
"""Context that opens a file by its name."""


class _Read(NamedTuple):
    """A part of a stored chunk, and the view that it fills."""

    chunk: StoredChunk
    dtype: torch.dtype
    """In the file."""
    begins: tuple[int, ...]
    """Where the part begins in the chunk."""
    target: Tensor


@torch.no_grad()
def fill(template: Mapping[str, Tensor], entries: Mapping[str, SavedTensor], source: Source) -> None:
    """Fill what this process holds of each tensor, file by file; no communication.

    Args:
        template: key to a tensor of the stored shape, of any layout.
        entries: the stored tensors.
        source: opens the files with the chunks.

    Raises:
        CheckpointError: a file is damaged.
    """
    by_file: dict[str, list[_Read]] = {}
    for key, tensor in template.items():
        for read in _reads(key, tensor, entries[key]):
            by_file.setdefault(read.chunk.file, []).append(read)
    for file, reads in by_file.items():
        with source(file) as fetch:
            for chunk, dtype, begins, target in reads:
                fetch.check(chunk.name, dtype, chunk.shape)
                spans = zip(begins, target.shape, strict=True)
                fetch.fill(chunk.name, tuple(slice(begin, begin + size) for begin, size in spans), target)


def _reads(key: str, tensor: Tensor, entry: SavedTensor) -> Iterator[_Read]:
    for offsets, held in held_chunks(key, tensor).items():
        wanted: Box = offsets, tuple(held.shape)
        for chunk in entry.overlapping(wanted):
            found = overlap(wanted, (chunk.offsets, chunk.shape))
            assert found is not None
            target = held
            for dim, (begin, size) in enumerate(zip(*found, strict=True)):
                target = target.narrow(dim, begin - offsets[dim], size)
            begins = tuple(b - o for b, o in zip(found[0], chunk.offsets, strict=True))
            yield _Read(chunk, DTYPES[entry.dtype], begins, target)


# Open safetensors files, those of a checkpoint or of any origin, to read parts of tensors.


def checkpoint_source(folder: Path) -> Source:
    """A source of the files in ``folder`` (local or remote) that reads directly into tensors."""

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        path = folder / file
        with path.open("rb", buffering=0) if is_local(path) else path.open("rb") as opened:
            yield SafetensorsFile(path, opened)

    return source


# Plain values that differ by process, such as states of random generators: each process has them in its own file.
#
# They are a row of one tensor of bytes, ``values by process``, which the index has as any other tensor. A row is JSON
# with its checksum, filled up with spaces. Rank 0 would get 90 MB of them from 4,096 processes, and every process
# would read as much.


KEY = "values by process"
"""Of the tensor, and, in the plain values, of the list of the values' keys."""
DTYPE = "U8"
_DIGITS = 16


def as_row(text: bytes, length: int) -> Tensor:
    """The row, of shape (1, length), of a JSON text of at most ``room(length)`` bytes."""
    padded = text.ljust(room(length))
    return torch.frombuffer(bytearray(_digest(padded) + padded), dtype=torch.uint8).view(1, length)


def room(length: int) -> int:
    """How many bytes of JSON a row of this length may have."""
    return length - _DIGITS


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


class Rows(Sequence[Any]):
    """The values of one key, by process; each is read when it is asked for.

    Args:
        key: of the values.
        count: number of rows.
        read: reads the values of one process, by its number.
    """

    def __init__(self, key: str, count: int, read: Callable[[int], Mapping[str, Any]]) -> None:
        self._key, self._count, self._read = key, count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        numbers = range(self._count)[index]
        if isinstance(numbers, int):
            return self._read(numbers)[self._key]
        return [self._read(number)[self._key] for number in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(self._count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


def rows_by_key(path: Path, entry: SavedTensor | None, keys: Any, source: Source) -> dict[str, Rows]:
    """The values of all keys that a checkpoint has by process.

    Args:
        path: of the checkpoint.
        entry: its tensor of this name; None: it has none.
        keys: the list in its plain values; None: it has none.
        source: opens its files.

    Raises:
        CheckpointError: it has one without the other, or they are not valid.
    """
    if entry is None and keys is None:
        return {}
    if entry is None or not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError(f"{path}: is damaged, {KEY} are incomplete")
    if entry.dtype != DTYPE or len(entry.shape) != 2 or not entry.shape[1] > _DIGITS:
        raise CheckpointError(f"{path}: is damaged, {KEY} are {entry.dtype} {entry.shape}")
    last: dict[int, Mapping[str, Any]] = {}

    def read(number: int) -> Mapping[str, Any]:
        if number not in last:
            found = _values_in(path, entry, number, source)
            if not isinstance(found, dict) or not set(keys) <= found.keys():
                raise CheckpointError(f"{path}: is damaged, {KEY} lack some of {', '.join(keys)} in row {number}")
            last.clear()
            last[number] = found
        return last[number]

    return {key: Rows(key, entry.shape[0], read) for key in keys}


def _values_in(path: Path, entry: SavedTensor, number: int, source: Source) -> Any:
    count, length = entry.shape
    row = FlatShard(torch.empty(length, dtype=torch.uint8), (count, length), number * length)
    try:
        fill({KEY: row}, {KEY: entry}, source)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    content = bytes(row.to_local().numpy())
    if _digest(content[_DIGITS:]) != content[:_DIGITS]:
        raise CheckpointError(f"{path}: is damaged, row {number} of {KEY} has another checksum")
    return parse_json(path, content[_DIGITS:])


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """An open checkpoint: tensors by key, and plain values. Reading it executes no stored code.

    Args:
        path: its origin, for messages.
        entries: the tensors and their chunks.
        values: everything that is not a tensor.
        source: opens the files with the chunks.
        files: files whose checksums are compared before anything is read from them.
        nonfinite: keys of tensors with NaN or infinity, for which the checkpoint was marked when it was saved.
        origin: the program that wrote the files, for messages; empty for flextrain.
        not_read: names of what the files hold besides, which is not read.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, SavedTensor],
        values: Mapping[str, Any],
        source: Source,
        files: Mapping[str, FileEntry] | None = None,
        nonfinite: Sequence[str] = (),
        origin: str = "",
        not_read: Sequence[str] = (),
    ) -> None:
        self.nonfinite, self.origin, self.not_read = tuple(nonfinite), origin, tuple(not_read)
        self.path, self.entries, self.values, self.source = path, dict(entries), dict(values), source
        self._unchecked = dict(files or {})
        self.unverified: Mapping[str, FileEntry] = {}
        """Files with tensors that are not compared with their checksums, as the caller has asked."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a directory that ``save_checkpoint`` has written; no tensor is read yet.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged.
        """
        path = as_path(path)
        return cls._from_texts(path, *_read_texts(path))

    @classmethod
    def open_together(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint:
        """Like ``open`` on every process; rank 0 alone reads the index and the values, and tells the others. A collective.

        Args:
            path: the directory; the same one on all processes.
            verify: compare the files with tensors with their checksums before they are loaded.

        Raises:
            CheckpointError: on every process, if the checkpoint is missing, incomplete or damaged.
        """
        path = as_path(path)
        opened = cls._from_texts(path, *told_by_rank_0(lambda: _read_texts(path)))
        if not verify:
            opened.unverified, opened._unchecked = opened._unchecked, {}
        return opened

    @classmethod
    def _from_texts(cls, path: Path, index: bytes, text: bytes) -> Checkpoint:
        manifest, values = manifest_in(path, index), parse_json(path / VALUES, text)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path / VALUES}: is damaged, it is no mapping")
        shards = {name: entry for name, entry in manifest.files.items() if name != VALUES}
        entries, source = dict(manifest.entries), checkpoint_source(path)
        values |= rows_by_key(path, entries.pop(KEY, None), values.pop(KEY, None), source)
        return cls(path, entries, values, source, shards, manifest.nonfinite)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, by key."""
        return {key: TensorInfo(entry.shape, DTYPES[entry.dtype]) for key, entry in self.entries.items()}

    @property
    def saved(self) -> dict[str, Any]:
        """The argument of ``Strategy.template``: plain values, and shape and dtype of the tensors."""
        return {**self.values, **self.tensors}

    def load(self, template: Mapping[str, Tensor]) -> None:
        """Fill the tensors of a template in place, each process its shard. A collective, also with an empty template.

        All files are compared with their checksums before the first one is loaded; the processes divide that work.

        Raises:
            CheckpointError: on every process, if on any of them a key is not in the checkpoint, a shape differs, or a
                file is damaged or cannot be read.
        """
        with raising_together():
            self._check_fit(template)
        if not any(gather_differing(bool(template))):
            return
        self.check_files()
        everyone = Participants(f"{self.path}: could not be read")
        everyone.round(lambda: fill(template, self.entries, self.source), lambda filled: None)

    def _check_fit(self, template: Mapping[str, Tensor]) -> None:
        for key, tensor in template.items():
            if key not in self.entries:
                raise CheckpointError(f"{self.path}: has no tensor {key}")
            if tuple(tensor.shape) != self.entries[key].shape:
                raise CheckpointError(
                    f"{self.path}: {key} has shape {self.entries[key].shape}, shape {tuple(tensor.shape)} is needed"
                )
            saved = DTYPES[self.entries[key].dtype]
            if saved.is_complex and not tensor.is_complex():
                raise CheckpointError(
                    f"{self.path}: {key} is {dtype_name(saved)}, and {dtype_name(tensor.dtype)} has no imaginary parts"
                )

    def renamed(self, entries: Mapping[str, SavedTensor], values: Mapping[str, Any] | None = None) -> Checkpoint:
        """The same checkpoint with other keys of tensors, and other ``values`` if they are given."""
        kept = self.values if values is None else values
        other = Checkpoint(
            self.path,
            entries,
            kept,
            self.source,
            nonfinite=self.nonfinite,
            origin=self.origin,
            not_read=self.not_read,
        )
        other._unchecked = self._unchecked
        return other

    def from_program(self, origin: str, not_read: Sequence[str]) -> Checkpoint:
        """The same source, with the name of the program that wrote it, and of further files that are not read."""
        other = self.renamed(self.entries)
        other.origin, other.not_read = origin, (*self.not_read, *not_read)
        return other

    def check_file(self, name: str) -> None:
        """Compare one file with its checksum, unless it was compared before; on this process only.

        Raises:
            CheckpointError: the file is damaged.
        """
        if (entry := self._unchecked.get(name)) is not None:
            directory.check_file(self.path / name, entry)
            del self._unchecked[name]

    def check_files(self) -> None:
        """Compare every file with its checksum, unless it was compared before; a collective that divides the files.

        Raises:
            CheckpointError: on every process, if a file is damaged; it names the first one.
        """
        names = sorted(self._unchecked)
        if not names:
            return
        with raising_together():
            for name in names[get_rank() :: get_world_size()]:
                directory.check_file(self.path / name, self._unchecked[name])
        self._unchecked.clear()


def _read_texts(path: Path) -> tuple[bytes, bytes]:
    """The index and the values of a checkpoint as JSON, compared with their checksums; all files have their sizes."""
    index = directory.read_manifest_text(path)
    directory.check_file(path / VALUES, manifest_in(path, index).files[VALUES])
    return index, read_limited(path / VALUES)


# Read whole tensors of a checkpoint, one after the other, in one process.


# Mapped files of other programs stay in memory as far as they were read, until they are closed.
_CLOSE_AFTER_BYTES = 8 * 2**20


def _overflow(values: Tensor, cast: Tensor) -> bool:
    """Whether finite values have become infinite in another floating-point dtype."""
    if not (values.is_floating_point() and cast.is_floating_point() and values.numel() and cast.itemsize > 1):
        return False
    largest = torch.finfo(cast.dtype).max
    if largest >= torch.finfo(values.dtype).max:
        return False
    least, most = torch.aminmax(values)  # needs no memory
    return not -largest <= least <= most <= largest and bool((cast.isinf() & values.isfinite()).any())


class TensorReader:
    """Reads whole tensors of a checkpoint by key, in one process; not a collective.

    It keeps no tensor, and at most about 8 MiB of mapped files besides the last chunk.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, Fetch] = {}
        self._stack = ExitStack()
        self._bytes = 0

    def read(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read the tensor ``key``: contiguous, on the CPU, in ``dtype`` (None: its own).

        A file is compared with its checksum before the first tensor is read from it.

        Raises:
            CheckpointError: the tensor is missing or cannot be read, or a file's checksum is wrong.
        """
        path, entry = self.checkpoint.path, self.checkpoint.entries.get(key)
        if entry is None:
            raise CheckpointError(f"{path}: has no tensor {key}")
        own = DTYPES[entry.dtype]
        if len(entry.chunks) == 1 and dtype in (None, own):
            return self._read_chunk(key, entry.chunks[0], own).contiguous()
        whole, overflows = torch.empty(entry.shape, dtype=dtype or own), False
        for chunk in entry.chunks:
            slices = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
            part = self._read_chunk(key, chunk, own)
            whole[slices].copy_(part)
            overflows = overflows or _overflow(part, whole[slices])
        if overflows:
            largest = f"{torch.finfo(whole.dtype).max:.6g}"
            _logger.warning(
                f"{path}: {key} has values beyond {largest}, which are infinite in {dtype_name(whole.dtype)}"
            )
        return whole

    def _read_chunk(self, key: str, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        if self._bytes > _CLOSE_AFTER_BYTES:
            self.close()
        file = self._file(chunk.file)
        file.check(chunk.name, dtype, chunk.shape)
        tensor = file(chunk.name, tuple(slice(0, n) for n in chunk.shape))
        if tuple(tensor.shape) != chunk.shape or tensor.dtype != dtype:
            raise CheckpointError(
                f"{self.checkpoint.path}: {key} is damaged, {chunk.file} has another shape or dtype of it"
            )
        self._bytes += tensor.nbytes
        return tensor

    def _file(self, name: str) -> Fetch:
        if name not in self._files:
            self.checkpoint.check_file(name)
            self._files[name] = self._stack.enter_context(self.checkpoint.source(name))
        return self._files[name]

    def close(self) -> None:
        """Close all files; ``read`` opens them again."""
        self._files.clear()
        self._stack.close()
        self._bytes = 0


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[TensorReader]:
    """Context with a ``TensorReader``, whose files are closed at its end.

    Args:
        checkpoint: from ``open_weights`` or ``Checkpoint.open``.
    """
    reader = TensorReader(checkpoint)
    try:
        yield reader
    finally:
        reader.close()


# Find the complete checkpoints of a folder, in the order of training.


def complete_ones(folder: str | os.PathLike[str]) -> dict[Path, int]:
    """The complete checkpoints in ``folder``, each with its iteration, in the order of iterations; -1: it has none.

    Clocks go back and differ between machines. Therefore the time at which they were written orders only checkpoints of
    the same iteration.
    """
    found = as_path(folder)
    with reaching(found):
        if not found.is_dir():
            return {}
        paths = [path for path in found.iterdir() if not path.name.startswith(".") and is_checkpoint(path)]
        order: dict[Path, tuple[int, float]] = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # another run has just deleted it
                order[path] = iteration_of(path), (path / MANIFEST).stat().st_mtime
    return {path: order[path][0] for path in sorted(order, key=lambda path: (order[path], path.name))}


def iteration_of(path: str | os.PathLike[str]) -> int:
    """How many updates were done when the checkpoint at ``path`` was saved; -1 if it does not say, or is damaged."""
    try:
        loop = Checkpoint.open(path).values.get("loop")
    except CheckpointError:
        return -1
    found = loop.get("iter") if isinstance(loop, dict) else None
    return found if isinstance(found, int) else -1


def newest_complete(folder: str | os.PathLike[str], accepts: Callable[[Checkpoint], bool]) -> Path | None:
    """The undamaged checkpoint of the highest iteration for which ``accepts`` is true; None if there is none."""
    for path in reversed(complete_ones(folder)):
        try:
            if accepts(Checkpoint.open(path)):
                return path
        except CheckpointError:  # damaged: an older one may be whole
            continue
    return None


# Find checkpoints that are marked, because tensors that training should keep finite have NaN or infinity.


_NAMED = 3


def what_is_not_finite(keys: Sequence[str], noun: str = "tensor") -> str:
    """Text for a list of keys: how many there are, and the first few of them."""
    names = ", ".join(keys[:_NAMED])
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{counted(len(keys), noun)} ({names}{more})"


def is_marked(path: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint at ``path`` is marked; False if there is no complete one."""
    try:
        return bool(read_manifest(as_path(path)).nonfinite)
    except CheckpointError:
        return False


def passed_over(folder: str | os.PathLike[str], latest: Path | None) -> list[str]:
    """Names of the marked checkpoints in ``folder`` that come after ``latest`` (None: all), in the order of iterations."""
    found = complete_ones(folder)
    newer = list(found)
    if latest in found:
        newer = newer[newer.index(latest) + 1 :]
    elif latest is not None:  # in another folder
        reached = iteration_of(latest)
        newer = [path for path, iteration in found.items() if iteration > reached]
    return [path.name for path in newer if is_marked(path)]
