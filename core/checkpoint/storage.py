"""Open the files of a checkpoint, or safetensors files of any origin, to read parts of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .load.filling import Source
from .load.partial_read import Fetch
from .paths import is_local
from .safetensors_file import SafetensorsFile


def checkpoint_source(folder: Path) -> Source:
    """A source of the checkpoint files in ``folder`` (local or remote) that reads directly into tensors."""

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        path = folder / file
        with path.open("rb", buffering=0) if is_local(path) else path.open("rb") as opened:
            yield SafetensorsFile(path, opened)

    return source


def mapped_source(folder: Path) -> Source:
    """A source of safetensors files of any origin in ``folder``, mapped by the safetensors package."""

    @contextmanager
    def source(file: str) -> Iterator[Fetch]:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                # get_slice does not work for a 0-dim tensor.
                yield Fetch(
                    folder / file,
                    lambda name, slices: opened.get_slice(name)[slices] if slices else opened.get_tensor(name),
                )
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file}: is damaged, {error}") from None

    return source
