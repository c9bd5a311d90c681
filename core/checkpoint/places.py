"""Where checkpoints are: a folder of this machine, or of any storage that fsspec reaches (``s3://``, ``gs://``, ``memory://``).

universal_pathlib's paths do what those of pathlib do, so that most of the code need not know. What differs is here: other
storage has no flush to the disk and no renaming of folders, and its files cannot be mapped into memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError
from .untrusted import MAX_JSON_BYTES, one_line

REMOTE = "://"


def place(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute Path, or as what behaves like one for a URL.

    Raises:
        CheckpointError: a URL, and universal_pathlib or what it needs for this kind of storage is not installed.
    """
    if not isinstance(path, Path) and REMOTE in str(path):
        url = str(path)
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).absolute()
        try:
            from upath import UPath

            found = UPath(path)
            assert found.fs is not None  # made when it is first asked for
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: cannot be reached, {one_line(error)}; pip install flextrain[remote], and fsspec's package for "
                "this kind of storage"
            ) from None
        return cast(Path, found)
    return Path(path).absolute()


def is_local(path: Path) -> bool:
    """Whether ``path`` is in a file system of this machine."""
    return isinstance(path, Path)


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it, as far as it is there."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        cast(Any, path).fs.rm(cast(Any, path).path, recursive=True)


@contextmanager
def safetensors_slices(path: Path, dtypes: dict[str, torch.dtype]) -> Iterator[Any]:
    """Reads parts of a safetensors file that cannot be mapped: ``fetch(name, part)``, row by row of the first dimension.

    Source of the file format: https://huggingface.co/docs/safetensors
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: is damaged, its header would have {length} bytes")
        header = json.loads(file.read(length))

        def fetch(name: str, part: tuple[slice, ...]) -> Tensor:
            try:
                entry = header[name]
            except KeyError:
                raise CheckpointError(f"{path}: is damaged, it does not contain {name}") from None
            dtype, shape, (begin, end) = dtypes[entry["dtype"]], entry["shape"], entry["data_offsets"]
            first = 0
            if part and shape[0]:
                row = (end - begin) // shape[0]
                first, last = part[0].start, part[0].stop
                begin, end = begin + first * row, begin + last * row
                shape = [last - first, *shape[1:]]
            file.seek(8 + length + begin)
            data = bytearray(file.read(end - begin))
            whole = (
                torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)
                if data
                else torch.empty(shape, dtype=dtype)
            )
            inner = (slice(None), *part[1:])
            return whole[inner] if part else whole

        yield fetch
