"""Open a checkpoint and load its tensors on all processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...comm.collectives import get_rank, get_world_size
from ...comm.joint_errors import gather_differing, raising_together, told_by_rank_0
from ...errors import CheckpointError
from ...stored_dtypes import DTYPES
from .. import directory, rows
from ..manifest import VALUES, FileEntry, manifest_in
from ..participants import Participants
from ..paths import as_path
from ..rows import rows_by_key
from ..saved_tensor import SavedTensor
from ..storage import checkpoint_source
from ..untrusted import parse_json, read_limited
from .filling import Source, fill


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
        values |= rows_by_key(path, entries.pop(rows.KEY, None), values.pop(rows.KEY, None), source)
        return cls(path, entries, values, source, shards, manifest.nonfinite)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, by key."""
        return {key: TensorInfo(entry.shape, DTYPES[entry.dtype]) for key, entry in self.entries.items()}

    @property
    def saved(self) -> dict[str, Any]:
        """The argument of ``Strategy.load_template``: plain values, and shape and dtype of the tensors."""
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
