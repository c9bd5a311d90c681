"""Guards for what others may have written: names of files, and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

# Plain values and lists of names and shapes; what is larger belongs into tensors.
MAX_JSON_BYTES = 256 * 2**20


def sibling(path: Path, name: str) -> Path:
    """The file called ``name`` that lies beside ``path``, which names it.

    Raises:
        CheckpointError: the name leads elsewhere, itself or through a link, or there is no such file.
    """
    if name != Path(name).name or name in ("", ".", "..") or "\0" in name or "\\" in name:
        raise CheckpointError(f'{path}: names "{name[:200]}", which is no file beside it')
    file = path.with_name(name)
    if not file.is_file():
        raise CheckpointError(f"{file}: is missing, {path.name} names it")
    if not any(file.resolve().is_relative_to(folder) for folder in _homes(path.parent)):
        raise CheckpointError(f"{file}: is a link to a file outside of {path.parent}")
    return file


def _homes(folder: Path) -> list[Path]:
    """Where the files of a folder may be: in it, and where the cache of Hugging Face's hub links to.

    The cache has ``models--x/snapshots/<revision>/`` with links to ``models--x/blobs/``.
    """
    real = folder.resolve()
    is_cache = real.parent.name == "snapshots"
    return [real, real.parent.parent / "blobs"] if is_cache else [real]


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        CheckpointError: it is not there, no JSON, nested too deeply, or larger than 256 MiB.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {size} bytes, more than {MAX_JSON_BYTES} are not read")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged, {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: is damaged, it is nested too deeply") from None
