"""FileSource: base class of data sets that are read from files, sample by sample, by number."""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from torch.utils.data import Dataset

from ....core.errors import ConfigError, DataError, FlexTrainError
from ....core.registry import FUNCTIONS
from ..streams.stream_orders import LocalOrder, Order, default_order
from .file_list import find_files, print_of_file, print_of_parts, prints_of_files

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
        local_shuffle: int | None = None,
        index_dir: str | os.PathLike[str] | None = None,
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
        self.fingerprint = print_of_parts(type(self).__name__, len(self), self._prints)
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
