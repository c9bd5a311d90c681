"""FileSource: base class of data sets that are read from files, sample by sample, by number."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import json
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.utils.data import Dataset

from ....core.base.config import PositiveInt
from ....core.base.errors import ConfigError, DataError, FlexTrainError, counted, nearest
from ....core.base.registry import FUNCTIONS
from ....core.torch_compat.torch_private import with_values
from ..stream_orders import LocalOrder, Order, default_order

# The files of a source: found by name or pattern, each once, with a fingerprint of what is in them.


logger = logging.getLogger("flextrain")

_END = 4096
"""Bytes at the beginning and at the end of a file that its fingerprint looks at."""


def find_files(paths: Any, suffixes: Sequence[str], where: str) -> list[Path]:
    """Return the files that ``paths`` names: files and patterns in the given order, those of one pattern by name.

    Args:
        paths: a path, a folder, a pattern such as ``"data/*.jsonl"``, or a list of them.
        suffixes: endings of the files that are taken from a folder.
        where: the configuration key, for messages.

    Raises:
        ConfigError: nothing is found, something is no path, or a file is named twice.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"{where}: {paths!r} is not allowed, give a path, a pattern, or a list of at least one")
    found: list[Path] = []
    for item in given:
        if not isinstance(item, (str, os.PathLike)):
            raise ConfigError(f"{where}: {item!r} is not allowed, give a path or a pattern")
        found += _matches(os.fspath(item), suffixes, where)
    seen: dict[Path, Path] = {}
    for path in found:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            other = "" if str(first) == str(path) else f" and {first}, which are one file"
            raise ConfigError(f"{where}: names {path}{other} twice, its samples would be twice in every pass")
    return found


def _matches(pattern: str, suffixes: Sequence[str], where: str) -> list[Path]:
    if "://" in pattern:
        raise ConfigError(f'{where}: "{pattern}" is a URL, give files of a local or mounted file system')
    if not pattern:
        raise ConfigError(f"{where}: an empty text is not allowed, give a path or a pattern")
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.is_file() and each.name.endswith(tuple(suffixes)))
        if not inside:
            raise ConfigError(f"{where}: the folder {path} has no file *{' or *'.join(suffixes)}")
        return inside
    if path.exists():
        return [path]
    if path.is_symlink():
        raise ConfigError(f"{where}: {path} is a link to a file that is not there")
    start = Path(path.anchor) if path.is_absolute() else Path()
    relative = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
    matches = sorted(each for each in start.glob(relative) if each.is_file()) if relative != "." else []
    if not matches:
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = nearest(path.name, names)
        raise ConfigError(f'{where}: no file matches "{pattern}"{f", did you mean {meant}?" if meant else ""}')
    return matches


def prints_of_files(paths: Sequence[Path]) -> list[str]:
    """A text for each file, of its name, size, beginning and end: it changes with the data, and not if a file is copied.

    Two files of one content under different names are warned of.
    """
    contents: dict[str, Path] = {}
    found = []
    for path in paths:
        content, size = _content_of(path)
        first = contents.setdefault(content, path)
        if first is not path and size:
            logger.warning(
                f"{path} and {first} have the same size, beginning and end: a copy's samples come twice in every pass"
            )
        found.append(_print(path, content))
    return found


def print_of_file(path: Path) -> str:
    """The text that ``prints_of_files`` gives for a file."""
    return _print(path, _content_of(path)[0])


def _print(path: Path, content: str) -> str:
    return f"{path.name} {content}"


def _content_of(path: Path) -> tuple[str, int]:
    size = path.stat().st_size
    digest = xxhash.xxh3_64(f"{size} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_END))
        if size > _END:
            file.seek(max(_END, size - _END))
            digest.update(file.read(_END))
    return digest.hexdigest(), size


def print_of_parts(kind: str, samples: int, parts: Sequence[object]) -> str:
    """The fingerprint of a source as text: what it is, how many samples it has, and a hash of its parts in order."""
    digest = xxhash.xxh3_64("\n".join(map(str, parts)).encode()).hexdigest()
    return f"{kind} of {counted(samples, 'sample')} ({digest})"


T = TypeVar("T")
_OPEN_FILES = 64


class _Forks:
    """How often this process was forked off; cheaper to ask than its number, which is a system call."""

    number = 0

    @classmethod
    def count(cls) -> None:
        cls.number += 1


os.register_at_fork(after_in_child=_Forks.count)


class DataSource(Protocol):
    """What can be dealt out by position: any object with a length and an item for every number, as map-style datasets have.

    Its methods are ``__len__`` and ``__getitem__``. Three more things are used where a source has them: ``fingerprint`` (a string that changes with the data, compared on
    resuming), ``order_of_pass(seed, number, shuffle)`` (an order of its own, see ``Order``), and ``lengths`` (the
    tokens of each sample, for packing).
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``, the same at every call, from 0 to the length."""
        ...


class FileSource(Dataset[Any]):
    """Base class of sources in files. Sample ``i`` is counted over the files in the order in which they are given.

    A subclass says how many samples a file has, how to open it, and how to read one sample of an open file. Files are
    opened when they are first read, in the process that reads; the least recently used are closed.

    Args:
        paths: a file, a folder, a pattern such as ``"data/*.jsonl"``, or a list of them.
        transform: function of a sample that returns what the dataset gives; its name, or ``dict(type=..., **arguments)``.
            Its random numbers follow from seed, epoch and position.
        local_shuffle: samples in a block, for sources whose neighbours are faster to read together. Shuffling then moves
            whole blocks, and mixes samples with those of three other blocks. None: any sample may come after any other.
        index_dir: folder for the index of the files, where a kind of file needs one; None: beside each file.

    Raises:
        ConfigError: an argument cannot be honoured, or there is no sample.
        DataError: a file is damaged.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Endings of the files that are taken from a folder."""

    def __init__(
        self,
        paths: Any,
        *,
        transform: Any = None,
        local_shuffle: PositiveInt | None = None,
        index_dir: str | Path | None = None,
        where: str = "",
    ) -> None:
        where = where or type(self).__name__
        if local_shuffle is not None and (isinstance(local_shuffle, bool) or local_shuffle < 1):
            raise ConfigError(f"{where}.local_shuffle: {local_shuffle!r} is not allowed, give 1 or more, or None")
        self.files = find_files(paths, self.suffixes, f"{where}.paths")
        self.transform = as_function(transform, f"{where}.transform")
        self.local_shuffle, self.index_dir = local_shuffle, index_dir
        self._handles: OrderedDict[int, Any] = OrderedDict()
        self._forks = _Forks.number
        self._stats = [path.stat() for path in self.files]
        self._ends = list(accumulate(about_file(path, self._count, path) for path in self.files))
        if not len(self):
            raise ConfigError(f"{where}.paths: the {len(self.files)} files have no samples, first {self.files[0]}")
        self._prints = prints_of_files(self.files)
        # Without blocks the fingerprint is that of older checkpoints.
        self._order = [] if local_shuffle is None else [f"local_shuffle={local_shuffle}"]
        self.fingerprint = print_of_parts(type(self).__name__, len(self), [*self._prints, *self._order])
        """Changes with names, sizes and contents of the files; a checkpoint in the middle of a pass holds it."""

    # What a subclass says

    def _count(self, path: Path) -> int:
        """Return the number of samples in a file, 0 or more."""
        raise NotImplementedError

    def _open(self, path: Path) -> Any:
        """Return an open file, for ``_read``; with ``close()`` if it has to be closed."""
        raise NotImplementedError

    def _read(self, opened: Any, row: int) -> Any:
        """Return sample ``row`` of an open file, counted from 0."""
        raise NotImplementedError

    # What a dataset has

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, row = self.find(index)
        opened = self.opened(number)
        try:
            sample = self._read(opened, row)
        except Exception as error:
            raise as_data_error(f"{self.files[number]}: sample {row}", error) from error
        return sample if self.transform is None else self.transform(sample)

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of the file that has sample ``index``, and the sample's number in it."""
        if not 0 <= index < self._ends[-1]:
            index = range(len(self))[index]
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def order_of_pass(self, seed: int, number: int, shuffle: bool) -> Order:
        """Return the order of pass ``number``; see ``Order``."""
        if not shuffle or self.local_shuffle is None or self.local_shuffle <= 1:
            return default_order(len(self), seed, number, shuffle)
        return LocalOrder(self._block_ends(self.local_shuffle), seed, number)

    def _block_ends(self, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the ends of the blocks that stay together, of about ``size`` samples."""
        ends = np.arange(size, len(self) + size, size, dtype=np.int64)
        ends[-1] = len(self)
        return ends

    def opened(self, number: int) -> Any:
        """Return file ``number``, open in this process."""
        if self._forks != _Forks.number:  # a forked worker, which must not share open files
            self._handles, self._forks = OrderedDict(), _Forks.number
        if (opened := self._handles.get(number)) is not None:
            if len(self.files) > _OPEN_FILES:
                self._handles.move_to_end(number)
            return opened
        if len(self._handles) >= _OPEN_FILES:
            close = getattr(self._handles.popitem(last=False)[1], "close", None)
            if close is not None:
                close()
        path = self.files[number]
        self._check_unchanged(number, path)
        self._handles[number] = about_file(path, self._open, path)
        return self._handles[number]

    def _check_unchanged(self, number: int, path: Path) -> None:
        """Raise DataError if a file is no longer the one that was counted: others may have opened that one."""
        now, then = path.stat(), self._stats[number]
        if now.st_size != then.st_size:
            raise DataError(
                f"{path}: has {now.st_size} bytes, it had {then.st_size} when this run began; start it again"
            )
        if now.st_mtime_ns != then.st_mtime_ns:  # written again; with the same contents it is no other file
            rows = self._ends[number] - (self._ends[number - 1] if number else 0)
            if print_of_file(path) != self._prints[number] or about_file(path, self._count, path) != rows:
                raise DataError(f"{path}: has other contents than when this run began; start it again")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": OrderedDict(), "_forks": -1}  # open files belong to this process


def as_function(given: Any, where: str) -> Callable[[Any], Any] | None:
    """Return the function that a configuration names: a function, its name, or ``dict(type=..., **arguments)``."""
    if given is None or (callable(given) and not isinstance(given, Mapping)):
        return given
    if isinstance(given, str):
        return FUNCTIONS.resolve(given, where)
    if isinstance(given, Mapping) and "type" in given:
        arguments = {key: value for key, value in given.items() if key != "type"}
        return partial(FUNCTIONS.resolve(given["type"], f"{where}.type"), **arguments)
    raise ConfigError(f"{where}: {given!r} is not allowed, give a function, its name, or dict(type=...)")


def about_file(what: object, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that reads a file, and name the file in what it raises.

    Raises:
        DataError: the file is damaged, or not what the source says.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raise as_data_error(what, error) from error


def as_data_error(what: object, error: Exception) -> Exception:
    """The error to raise for one that reading a file has raised: it names the file; those that name it stay as they are."""
    if isinstance(error, (FlexTrainError, FileNotFoundError, PermissionError, MemoryError)):
        return error
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{what}: cannot be read, {reason}")


# Index files: arrays that are made once from a data file, kept beside it, and mapped into memory.


Arrays = Mapping[str, np.ndarray[Any, Any]]
SUFFIX = ".ftindex"
"""Ending of an index, which is a file of safetensors."""

_not_kept: dict[str, Arrays] = {}
"""Indexes that no folder takes, of this process and of workers that are forked off."""


def index_of(path: Path, kind: str, make: Callable[[], Arrays], index_dir: str | Path | None) -> Arrays:
    """Return the index of a data file; made and kept at the first call, and again when the file has changed.

    Args:
        path: the data file.
        kind: what the index is of, with its version; another kind does not fit.
        make: reads the data file and returns the arrays.
        index_dir: folder of the index; None: beside the data file, or in the user's cache if that cannot be written.
    """
    stat = path.stat()
    facts = {"kind": kind, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return kept(f"{path.name}{SUFFIX}", path.resolve(), facts, make, path.parent, index_dir)


def kept(
    name: str,
    whose: object,
    facts: Mapping[str, Any],
    make: Callable[[], Arrays],
    beside: Path | None,
    index_dir: str | Path | None,
) -> Arrays:
    """Return arrays from the first folder that has them with these facts; else make them, and keep them.

    Only one process at a time makes them, where the file system has locks; the others wait and read the file.

    Args:
        name: file name of the index.
        whose: what the index is of, by which it is named in a folder for the indexes of several data.
        facts: plain values that have to be the same in the file.
        make: returns the arrays.
        beside: the folder to try first.
        index_dir: the only folder to use.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flextrain" / "index"
    folder = cache if index_dir is None else Path(index_dir).expanduser()
    if index_dir is not None and os.path.isfile(folder):  # noqa: PTH113 - Path's raises where it may not look
        raise ConfigError(f"index_dir: {folder} is a file, give a folder")
    files = [folder / f"{xxhash.xxh3_64_hexdigest(str(whose).encode())}-{name}"]  # files of one name may meet there
    if index_dir is None and beside is not None:
        files.insert(0, beside / name)
    said = json.dumps(facts, sort_keys=True)
    key = f"{whose} {said}"
    if key in _not_kept:
        return _not_kept[key]
    for file in files:
        if (found := _open(file, said)) is not None:
            return found
    made: Arrays | None = None  # once, however many folders refuse it
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with _alone(file):
                if (found := _open(file, said)) is None:
                    made = make() if made is None else made
                    _write(file, said, made)
                    found = _open(file, said)
            if found is not None:
                return found
        except PermissionError:
            continue
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            if index_dir is None:
                raise
            raise ConfigError(f"index_dir: {index_dir} is no folder and cannot be made, {error.strerror}") from None
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
    folders = " and ".join(str(file.parent) for file in files)
    logger.warning(f"{whose}: its index is not kept, {folders} cannot be written to; every start makes it anew")
    _not_kept[key] = make() if made is None else made
    return _not_kept[key]


_CANNOT_WRITE = {30, 28, 122}  # a read-only file system, no space, no quota


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Context in which no other process makes this file."""
    lock = file.with_name(f".{file.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: several processes make the same file
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Removed while it is held: who waits for it looks for the index first, and at worst makes it once more.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _write(file: Path, facts: str, arrays: Arrays) -> None:
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, {"facts": facts})
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _open(file: Path, facts: str) -> Arrays | None:
    """The arrays of an index file, mapped into memory; None if it is missing, damaged, or of other data."""
    try:
        with safe_open(file, framework="pt") as opened, with_values():
            if (opened.metadata() or {}).get("facts") != facts:
                return None
            return {name: opened.get_tensor(name).numpy() for name in opened.keys()}  # noqa: SIM118 - it has no __iter__
    except (OSError, SafetensorError):
        return None


_COMPRESSED = (b"\x1f\x8b", b"BZ", b"\x28\xb5")


def refuse_compressed(path: Path, what: str) -> None:
    """Raise DataError if a file is compressed, in which ``what`` cannot be found."""
    with path.open("rb") as file:
        if file.read(2) in _COMPRESSED:
            raise DataError(f"{path}: is compressed, its {what} cannot be found by number; decompress it")


# OpenBytes: a file that is open for reading spans of bytes.


class OpenBytes:
    """Reads spans of bytes of a file; the file's position is not used, so threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, begin: int, size: int, what: object) -> bytes:
        """Return ``size`` bytes from byte ``begin``.

        Raises:
            DataError: the file ends before; the message names ``what``.
        """
        found = os.pread(self._file, size, begin)
        while len(found) < size:  # one call gives at most 2 GiB
            more = os.pread(self._file, size - len(found), begin + len(found))
            if not more:
                raise DataError(f"{self.path}: {what}: the file has become shorter since it was indexed")
            found += more
        return found

    def close(self) -> None:
        """Close the file; nothing, if it is closed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # it is missing if the file could not be opened
            self.close()
