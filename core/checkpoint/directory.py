"""Layout of a checkpoint directory, and how it is written, replaced and removed atomically.

::

    work_dir/
        latest                      the name of the newest complete checkpoint with finite weights
        epoch_3/
            manifest.json           format, files with sizes and checksums, and for each tensor dtype, shape and layout
            values.json             everything that is not a tensor
            rank-00000.safetensors  what rank 0 wrote, and so on; read by any safetensors reader

A save writes to ``.epoch_3.tmp``, which is renamed when every byte is on disk. A directory without a manifest is not a
checkpoint: it is never loaded or counted, and never prevents a save.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ..base.errors import CheckpointError
from ..base.events import heartbeat
from .folders import SHARD, as_path, is_local, reaching, remove_tree
from .manifest import MANIFEST, VALUES, AnyManifest, FileEntry, is_newer, manifest_in
from .untrusted import MAX_JSON_BYTES, read_name, sibling

LATEST = "latest"
_SCALARS = {int, float, str, bool, type(None)}
ANOTHER_NAME = "; write the name of another one"
"""Advice at the end of an error of ``find_latest``."""


_SYNCED_BYTES = 4 * 2**30
"""What is synced to disk at a time: all at the end could take so long that the watchdog takes it for a hang."""


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a complete checkpoint directory."""
    return (as_path(path) / MANIFEST).is_file()


def temporary(path: Path) -> Path:
    """The folder in which ``path`` is assembled; for a URL only if ``path`` is a checkpoint already."""
    return path.with_name(f".{path.name}.tmp")


def replaced(path: Path) -> Path:
    """The temporary name of the previous checkpoint ``path`` while a new one replaces it."""
    return path.with_name(f".{path.name}.old")


def finite(path: Path) -> Path:
    """The name of a checkpoint in whose place ``path`` has NaN or infinity."""
    return path.with_name(f"{path.name}.finite")


def keep_finite(path: Path) -> None:
    """Give the checkpoint ``path``, which is about to be replaced by one with NaN or infinity, the name ``finite(path)``.

    Raises:
        CheckpointError: something that is no checkpoint has this name.
    """
    kept = finite(path)
    check_no_other_files(kept)
    shutil.rmtree(kept, ignore_errors=True)
    path.rename(kept)


def begin(path: Path) -> Path:
    """Make the empty directory in which the checkpoint ``path`` is assembled; remove leftovers of a killed save.

    Raises:
        CheckpointError: ``path`` exists and is not a checkpoint, so that saving would delete other files.
        StorageError: the storage of a URL cannot be reached.
    """
    with reaching(path):
        recover(path)
        check_no_other_files(path)
        # A remote folder cannot be renamed; it becomes a checkpoint by its manifest, which is written last.
        folder = temporary(path) if is_local(path) or is_checkpoint(path) else path
        remove_tree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def abandon(folder: Path) -> None:
    """Remove the files of a failed save; a complete remote one is kept, because its predecessor may be gone."""
    with reaching(folder):
        if is_local(folder) or not is_checkpoint(folder):
            remove_tree(folder)


def commit(path: Path, folder: Path) -> None:
    """Rename the finished save in ``folder`` to ``path``; a previous checkpoint there is deleted only after that."""
    if not is_local(path):
        if folder != path:
            with reaching(path):
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


def check_no_other_files(path: Path) -> None:
    """Check that nothing is at ``path`` but a checkpoint or a part of one, which may be deleted.

    Raises:
        CheckpointError: something else is.
    """
    if foreign := _foreign(path):
        raise CheckpointError(f"{foreign}: is no part of a checkpoint and would be deleted, give another name")


def _foreign(path: Path) -> Path | None:
    """The first file at ``path`` that no save has written; None if there is none."""
    if is_checkpoint(path) or not path.exists():
        return None
    if not path.is_dir():
        return path
    names = (file for file in sorted(path.iterdir()) if file.name not in (MANIFEST, VALUES))
    return next((file for file in names if not SHARD.fullmatch(file.name)), None)


def recover(path: Path) -> None:
    """Undo a replacement that was killed between its two renames; in remote storage, complete it."""
    if not is_local(path):
        if not is_checkpoint(path) and is_checkpoint(temporary(path)):
            _move_into(temporary(path), path)
        return
    if not path.exists() and is_checkpoint(replaced(path)):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            replaced(path).rename(path)


def _move_into(folder: Path, path: Path) -> None:
    """Replace a checkpoint by a complete one, file by file; ``folder`` stays complete until the last is copied."""
    names = [*read_manifest(folder).files, MANIFEST]  # a listing may lag behind and lack some
    remove_checkpoint(path)
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        _copy(folder / name, path / name)
    remove_checkpoint(folder)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, _BLOCK)


def mark_latest(path: Path) -> None:
    """Make ``path`` the checkpoint from which training resumes."""
    with becoming_latest(path):
        pass


@contextlib.contextmanager
def becoming_latest(path: Path) -> Iterator[None]:
    """``mark_latest`` at the end of a block; what it needs space for is written before it: a full disk fails the block too."""
    if is_local(path):
        write_file(path.parent / f".{LATEST}.tmp", path.name.encode())
        yield
        (path.parent / f".{LATEST}.tmp").replace(path.parent / LATEST)
        sync_directory(path.parent)
    else:  # remote files are written atomically
        yield
        write_file(path.parent / LATEST, path.name.encode())


def find_latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint with finite weights in a work directory; None if there is none.

    Raises:
        CheckpointError: ``latest`` names a checkpoint that does not exist any more.
    """
    pointer = as_path(folder) / LATEST
    with reaching(pointer):
        # is_file returns False for storage that cannot be reached; exists raises.
        if not pointer.exists() or not pointer.is_file():
            return None
    name = read_name(pointer)
    if name is None:
        raise CheckpointError(f"{pointer}: does not contain the name of a checkpoint in its folder")
    path = pointer.parent / name
    recover(path)
    if not is_checkpoint(path):
        raise CheckpointError(f'{pointer}: names "{name}", which is not a complete checkpoint{ANOTHER_NAME}')
    return path


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, its manifest first, so that no damaged one remains if this is interrupted."""
    path = as_path(path)
    with reaching(path):
        # Names that the manifest has are deleted even if a remote listing lags behind and lacks them.
        names = [] if is_local(path) else _names_in(path)
        (path / MANIFEST).unlink(missing_ok=True)
        for name in names:
            (path / name).unlink(missing_ok=True)
        remove_tree(path)


def _names_in(path: Path) -> list[str]:
    if not is_checkpoint(path):  # and not to be recovered now
        return []
    try:
        return list(read_manifest(path).files)
    except CheckpointError:  # damaged
        return []


def write_file(path: Path, content: bytes | Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file from bytes or parts of them, and sync it to disk; return its size and checksum."""
    size, synced, checksum = 0, 0, xxhash.xxh3_64()
    with reaching(path):
        file = path.open("wb")
    try:
        for part in (content,) if isinstance(content, bytes) else content:
            checksum.update(part)
            size += len(part)
            with reaching(path):  # not around the loop: making a part may fail too, which is no fault of the storage
                file.write(part)
                if size - synced > _SYNCED_BYTES and is_local(path):
                    file.flush()
                    os.fsync(file.fileno())
                    synced = size
            heartbeat()
        with reaching(path):
            file.flush()
            if is_local(path):
                os.fsync(file.fileno())
            file.close()
    except BaseException:
        with contextlib.suppress(Exception):  # a remote file sends the rest when it is closed, which fails again
            file.close()
        raise
    return FileEntry(size=size, xxh3=checksum.hexdigest())


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file; reads the whole file."""
    size, checksum, block = 0, xxhash.xxh3_64(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) if is_local(path) else path.open("rb") as file:
        while count := file.readinto(block):
            checksum.update(block[:count])
            size += count
            heartbeat()
    return FileEntry(size=size, xxh3=checksum.hexdigest())


def check_file(path: Path, entry: FileEntry) -> None:
    """Read a whole file, and compare its size and checksum with the entry.

    Raises:
        CheckpointError: the file cannot be read, or its size or checksum differs.
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
    """Write the manifest, a JSON object, with its checksum as the first entry.

    Raises:
        CheckpointError: the manifest is too long to be read.
    """
    check_length(folder / MANIFEST, manifest)
    write_file(folder / MANIFEST, (b'{"xxh3":"%s",' % _digest(manifest[1:]), manifest[1:]))


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


# The checksum, and the text after it.
_MANIFEST_TEXT = re.compile(rb'\{"xxh3":"([0-9a-f]{16})",(.*)', re.DOTALL)


def _manifest_text(path: Path) -> bytes:
    """Read the JSON of a manifest, check it against its checksum, and return it without the checksum."""
    content = path.read_bytes()
    found = _MANIFEST_TEXT.fullmatch(content)
    if found is None and is_newer(content):  # which may keep its checksum elsewhere
        return content
    if found is None or _digest(found[2]) != found[1]:
        raise CheckpointError(f"{path}: is damaged, its checksum is not that of its content")
    return b"{" + found[2]


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to disk."""
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
        CheckpointError: JSON cannot hold a value, or a key is not a string; the message names the first such key.
    """
    _check_keys(value, where)
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError):
        raise CheckpointError(f"{_culprit(value, where)}: cannot be saved, give plain values or tensors") from None


def _check_keys(value: Any, where: str) -> None:
    """Raise CheckpointError if a key is not a string: JSON would convert a number to text, and loading not find it."""
    has_keys = isinstance(value, Mapping)
    for key, item in _items(value):
        if has_keys and not isinstance(key, str):
            raise CheckpointError(f"{where}[{key!r}]: cannot be saved, keys have to be text, not {type(key).__name__}")
        # Asked first: states of generators are long lists of numbers.
        if type(item) not in _SCALARS and isinstance(item, (Mapping, list, tuple)):
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
    """Check that a file is not too long to be read again.

    Raises:
        CheckpointError: it is too long.
    """
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: would have {len(text)} bytes, more than {MAX_JSON_BYTES} are not read")


def newest_in(path: Path) -> Path | None:
    """The complete checkpoint in a folder that ``latest`` names, else the one that was written last; None: it has none.

    A URL is asked for ``latest`` only, because each look into it takes time.
    """
    latest = read_name(path / LATEST) if (path / LATEST).is_file() else None
    if latest and is_checkpoint(path / latest):
        return path / latest
    folders = path.iterdir() if is_local(path) and path.is_dir() else ()
    found = [folder for folder in folders if not folder.name.startswith(".") and is_checkpoint(folder)]
    return max(found, key=lambda folder: (folder / MANIFEST).stat().st_mtime, default=None)


def is_a_folder_of_them(path: Path, newest: Path) -> CheckpointError:
    """The error for a folder of checkpoints in place of one of them."""
    return CheckpointError(f"{path}: is no checkpoint, but a folder of checkpoints, give one of them, such as {newest}")


def check_no_pointer(path: Path) -> None:
    """Raise CheckpointError for the file ``latest``, which only names a checkpoint."""
    if path.name == LATEST and path.is_file() and (newest := newest_in(path.parent)) is not None:
        raise CheckpointError(f"{path}: is no checkpoint, but the name of one, give {newest}")


def check_present(path: Path) -> None:
    """Check that there is a checkpoint at ``path``; its files may be damaged.

    Raises:
        CheckpointError: there is none, or its storage cannot be reached.
    """
    with reaching(path):
        recover(path)
        if not path.exists():
            raise CheckpointError(f"{path}: does not exist")
        if is_checkpoint(path):
            return
        if (newest := newest_in(path)) is not None:
            raise is_a_folder_of_them(path, newest)
        check_no_pointer(path)
        hint = "; weights in a file are for load_from" if path.is_file() else ""
        raise CheckpointError(f"{path}: is not a complete checkpoint, it has no {MANIFEST}{hint}")


def read_manifest(path: Path) -> AnyManifest:
    """Read the manifest of the checkpoint at ``path``, and compare the sizes of all files with it.

    Raises:
        CheckpointError: there is no checkpoint, it has a newer version, or a file is missing, has another size or cannot
            be read.
    """
    return manifest_in(path, read_manifest_text(path))


def read_manifest_text(path: Path) -> bytes:
    """Like ``read_manifest``, but return the JSON text that was checked."""
    try:
        with reaching(path):
            check_present(path)
            file = sibling(path / MANIFEST, MANIFEST)
            if file.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{file}: has more than {MAX_JSON_BYTES} bytes, which are not read")
            text = _manifest_text(file)
            for name, entry in manifest_in(path, text).files.items():
                _check_size(sibling(path / MANIFEST, name), entry)
            return text
    except OSError as error:  # as of a checkpoint that is deleted meanwhile
        raise CheckpointError(f"{path}: cannot be read, {error.strerror or error}") from None
