"""Read whole tensors of a checkpoint, one after the other, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...stored_dtypes import DTYPES
from ..saved_tensor import StoredChunk
from .checkpoint import Checkpoint
from .partial_read import Fetch

# Mapped files stay in memory as far as they were read, until they are closed.
_CLOSE_AFTER_BYTES = 8 * 2**20


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

        Raises:
            CheckpointError: the tensor is missing or cannot be read, or a file's checksum is wrong.
        """
        path, entry = self.checkpoint.path, self.checkpoint.entries.get(key)
        if entry is None:
            raise CheckpointError(f"{path}: has no tensor {key}")
        own = DTYPES[entry.dtype]
        if len(entry.chunks) == 1 and dtype in (None, own):
            return self._read_chunk(key, entry.chunks[0], own).contiguous()
        whole = torch.empty(entry.shape, dtype=dtype or own)
        for chunk in entry.chunks:
            slices = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
            whole[slices].copy_(self._read_chunk(key, chunk, own))
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
    """Context with a ``TensorReader``, whose files are closed at its end."""
    reader = TensorReader(checkpoint)
    try:
        yield reader
    finally:
        reader.close()
