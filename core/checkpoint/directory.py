"""What lies where in a checkpoint, and how a directory becomes one: all at once, or not at all.

::

    work_dir/
        latest                      the name of the newest complete checkpoint with finite weights
        epoch_3/
            manifest.json           format, files with sizes and checksums, and for each tensor dtype, shape and pieces
            values.json             everything that is not a tensor
            rank-00000.safetensors  what rank 0 wrote, and so on; read by any safetensors reader

A save goes to ``.epoch_3.tmp`` and is renamed when every byte is on disk. A directory without its manifest is not a
checkpoint: never loaded, never counted, never in the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic
import xxhash

from ..errors import CheckpointError
from .manifest import FORMAT, MANIFEST, SHARD, VALUES, VERSION, FileEntry, Manifest
from .paths import is_local, place, reaching, remove_tree
from .untrusted import MAX_JSON_BYTES, one_line, read_name, sibling

LATEST = "latest"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a complete checkpoint directory."""
    return (place(path) / MANIFEST).is_file()


def temporary(path: Path) -> Path:
    """Where a save of ``path`` is put together; in other storage only if ``path`` is a checkpoint already."""
    return path.with_name(f".{path.name}.tmp")


def replaced(path: Path) -> Path:
    """Where the previous checkpoint of the same name waits while its successor takes the name."""
    return path.with_name(f".{path.name}.old")


def begin(path: Path) -> Path:
    """An empty directory to put the checkpoint ``path`` together in; leftovers of a killed save are removed.

    Raises:
        CheckpointError: ``path`` is something else than a checkpoint, which a new one would wipe out.
    """
    recover(path)
    if foreign := _foreign(path):
        raise CheckpointError(f"{foreign}: is no part of a checkpoint and would be deleted, give another name")
    # A folder in other storage cannot be renamed; what makes it a checkpoint is the manifest, written last.
    folder = temporary(path) if is_local(path) or is_checkpoint(path) else path
    remove_tree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def abandon(folder: Path) -> None:
    """Remove what a failed save had put together; unless it is whole, and what it was to replace is gone already."""
    if is_local(folder) or not is_checkpoint(folder):
        remove_tree(folder)


def commit(path: Path, folder: Path) -> None:
    """Give the finished save in ``folder`` its name; the checkpoint that had the name before goes only after that."""
    if not is_local(path):
        if folder != path:
            _move_into(folder, path)
        return
    old = replaced(path)
    sync_directory(folder)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    folder.rename(path)
    sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _foreign(path: Path) -> Path | None:
    """What stands at ``path`` and no save has put there."""
    if is_checkpoint(path) or not path.exists():
        return None
    if not path.is_dir():
        return path
    names = (file for file in sorted(path.iterdir()) if file.name not in (MANIFEST, VALUES))
    return next((file for file in names if not SHARD.fullmatch(file.name)), None)


def recover(path: Path) -> None:
    """Undo a replacement that was killed between its two renames; or, in other storage, carry it on."""
    if not is_local(path):
        if not is_checkpoint(path) and is_checkpoint(temporary(path)):
            _move_into(temporary(path), path)
        return
    if not path.exists() and is_checkpoint(replaced(path)):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            replaced(path).rename(path)


def _move_into(folder: Path, path: Path) -> None:
    """Replace a checkpoint by a complete one, file by file; until the last has moved, ``folder`` is the checkpoint."""
    remove_checkpoint(path)
    path.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.iterdir(), key=lambda file: file.name == MANIFEST)
    for file in files:
        _copy(file, path / file.name)
    remove_checkpoint(folder)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, _BLOCK)


def mark_latest(path: Path) -> None:
    """Make ``path`` the checkpoint that resuming starts from."""
    if not is_local(path):  # where a file is there as a whole or not at all
        write_file(path.parent / LATEST, path.name.encode())
        return
    write_file(path.parent / f".{LATEST}.tmp", path.name.encode())
    (path.parent / f".{LATEST}.tmp").replace(path.parent / LATEST)
    sync_directory(path.parent)


def find_latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint with finite weights in a work directory; None when there is none.

    Raises:
        CheckpointError: ``latest`` names something that is no longer there.
    """
    pointer = place(folder) / LATEST
    with reaching(pointer):
        # Of other storage that cannot be reached, is_file says that there is none.
        if not pointer.exists() or not pointer.is_file():
            return None
    name = read_name(pointer)
    if name is None:
        raise CheckpointError(f"{pointer}: holds no name of a checkpoint beside it")
    path = pointer.parent / name
    recover(path)
    if not is_checkpoint(path):
        raise CheckpointError(f'{pointer}: names "{name}", which is no complete checkpoint; name another one in it')
    return path


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; it stops being one before its first file goes."""
    path = place(path)
    (path / MANIFEST).unlink(missing_ok=True)
    remove_tree(path)


def write_file(path: Path, content: bytes | Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file, given whole or in parts, down to the disk."""
    size, checksum = 0, xxhash.xxh3_64()
    with path.open("wb") as file:
        for part in (content,) if isinstance(content, bytes) else content:
            file.write(part)
            checksum.update(part)
            size += len(part)
        file.flush()
        if is_local(path):
            os.fsync(file.fileno())
    return FileEntry(size=size, xxh3=checksum.hexdigest())


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file, which is read through."""
    size, checksum, block = 0, xxhash.xxh3_64(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) if is_local(path) else path.open("rb") as file:
        while count := file.readinto(block):
            checksum.update(block[:count])
            size += count
    return FileEntry(size=size, xxh3=checksum.hexdigest())


def check_file(path: Path, entry: FileEntry) -> None:
    """Read a file through, and compare it with what was written.

    Raises:
        CheckpointError: it cannot be read, has another size, or its checksum differs.
    """
    try:
        _check_size(path, entry)
        found = file_entry(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
    if found != entry:
        raise CheckpointError(f"{path}: is damaged, its checksum is {found.xxh3} instead of {entry.xxh3}")


def _check_size(path: Path, entry: FileEntry) -> None:
    if (found := path.stat().st_size) != entry.size:
        raise CheckpointError(f"{path}: has {found} bytes instead of {entry.size}")


_BLOCK = 2**20


def seal(folder: Path, manifest: bytes) -> None:
    """Write the index, a JSON object, with a checksum of itself as its first entry.

    Raises:
        CheckpointError: it is longer than what is read.
    """
    check_length(folder / MANIFEST, manifest)
    write_file(folder / MANIFEST, (b'{"xxh3":"%s",' % _digest(manifest[1:]), manifest[1:]))


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


# The checksum, and all that follows it.
_MANIFEST_TEXT = re.compile(rb'\{"xxh3":"([0-9a-f]{16})",(.*)', re.DOTALL)


def _manifest_text(path: Path) -> bytes:
    """The JSON of an index without its checksum, which it agrees with."""
    found = _MANIFEST_TEXT.fullmatch(path.read_bytes())
    if found is None or _digest(found[2]) != found[1]:
        raise CheckpointError(f"{path}: is damaged, its checksum is not that of its content")
    return b"{" + found[2]


def sync_directory(path: Path) -> None:
    """Write a directory's entries down to the disk."""
    if not is_local(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, where: str) -> bytes:
    """``value`` as JSON.

    Raises:
        CheckpointError: naming the first key whose value JSON cannot hold, or that is not text itself.
    """
    _check_keys(value, where)
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError):
        raise CheckpointError(f"{_culprit(value, where)}: cannot be saved, give plain values or tensors") from None


def _check_keys(value: Any, where: str) -> None:
    """JSON makes text of numbers that are keys, so that they would not be found again."""
    for key, item in _items(value):
        if isinstance(value, Mapping) and not isinstance(key, str):
            raise CheckpointError(f"{where}[{key!r}]: cannot be saved, keys have to be text, not {type(key).__name__}")
        if isinstance(item, (Mapping, list, tuple)):
            _check_keys(item, f"{where}.{key}")


def _culprit(value: Any, where: str) -> str:
    for key, item in _items(value):
        try:
            json.dumps(item)
        except (TypeError, ValueError):
            return _culprit(item, f"{where}.{key}")
    return f"{where} ({type(value).__name__})"


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()


def check_length(path: Path, text: bytes) -> None:
    """Nothing is written that would be too long to read.

    Raises:
        CheckpointError: it is.
    """
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: would have {len(text)} bytes, more than {MAX_JSON_BYTES} are not read")


def _meant(path: Path) -> str:
    """The tail of an error: what whoever gave this path may have meant."""
    if path.is_file():
        return "; weights in a file are for load_from"
    latest = read_name(path / LATEST) if (path / LATEST).is_file() else None
    return f"; the newest one in it is {path / latest}" if latest else ""


def check_present(path: Path) -> None:
    """See that there is a checkpoint at ``path``, whole or damaged.

    Raises:
        CheckpointError: there is none, or its storage cannot be reached.
    """
    with reaching(path):
        recover(path)
        if not path.exists():
            raise CheckpointError(f"{path}: does not exist")
        if not is_checkpoint(path):
            raise CheckpointError(f"{path}: is no complete checkpoint, it has no {MANIFEST}{_meant(path)}")


def read_manifest(path: Path) -> Manifest:
    """The index of the checkpoint at ``path``, after sizes were compared with the files.

    Raises:
        CheckpointError: no checkpoint, another version, or a file that is missing or not as long as it was.
    """
    check_present(path)
    file = sibling(path / MANIFEST, MANIFEST)
    if file.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: has more than {MAX_JSON_BYTES} bytes, which are not read")
    try:
        manifest = Manifest.model_validate_json(_manifest_text(file))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, reason = one_line(".".join(map(str, first["loc"]))), first["msg"].removeprefix("Value error, ")
        raise CheckpointError(
            f"{path / MANIFEST}: is damaged at {place or 'its beginning'}, {one_line(reason)}"
        ) from None
    if manifest.format != FORMAT or manifest.version > VERSION:
        raise CheckpointError(
            f"{path / MANIFEST}: is {manifest.format} version {manifest.version}, this flextrain reads {FORMAT} {VERSION}"
        )
    if VALUES not in manifest.files:
        raise CheckpointError(f"{path / MANIFEST}: is damaged at files, it lacks {VALUES}")
    for name, entry in manifest.files.items():
        if name != VALUES and not SHARD.fullmatch(name):
            raise CheckpointError(f'{path / MANIFEST}: "{one_line(name)}" is no name of a file of a checkpoint')
        _check_size(sibling(path / MANIFEST, name), entry)
    return manifest
