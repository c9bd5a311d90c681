"""ArrowFiles and ParquetFiles: rows of tables, which their files hold in groups."""

from __future__ import annotations

import importlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....core.base.config import PositiveInt
from ....core.base.errors import ConfigError, one_of, suggest
from ....core.base.registry import DATASETS
from ..stream_orders import MIXED, LocalOrder, Order
from .file_source import FileSource


class _OpenTable(NamedTuple):
    """An open file.

    Attributes:
        path: the file.
        names: of its columns.
        sizes: rows of each group.
        group: returns the wanted columns of a group.
    """

    path: Path
    names: Sequence[str]
    sizes: Sequence[int]
    group: Callable[[int], Any]


class _TableFiles(FileSource):
    """Base class of sources of rows, as dicts of columns. A group of rows is read as a whole, and kept for the next rows.

    Args:
        paths, transform, local_shuffle: see FileSource.
        columns: names of the columns to read; None: all.
        cached: groups that a process keeps.

    Raises:
        ConfigError: pyarrow is missing, or a column is.
    """

    def __init__(
        self,
        paths: Any,
        *,
        columns: list[str] | None = None,
        transform: Any = None,
        local_shuffle: PositiveInt | None = None,
        cached: PositiveInt = MIXED + 1,
        where: str = "",
    ) -> None:
        where = where or type(self).__name__
        if cached < 1:
            raise ConfigError(f"{where}.cached: {cached} is not allowed, give 1 or more")
        if columns is not None and not columns:
            raise ConfigError(f"{where}.columns: [] is not allowed, give at least one column, or None for all")
        try:
            importlib.import_module("pyarrow")
        except ImportError:
            raise ConfigError(f"{where}: needs pyarrow, pip install flextrain[data]") from None
        self.columns, self.cached, self._where = columns, cached, where
        self._group_ends: dict[Path, list[int]] = {}
        self._groups: OrderedDict[tuple[str, int], Any] = OrderedDict()
        super().__init__(paths, transform=transform, local_shuffle=local_shuffle, where=where)

    def _open(self, path: Path) -> _OpenTable:
        raise NotImplementedError

    def _count(self, path: Path) -> int:
        opened = self._open(path)
        for name in self.columns or ():
            if name not in opened.names:
                hint = suggest(name, opened.names) or (f", choose {one_of(opened.names)}" if opened.names else "")
                raise ConfigError(f'{self._where}.columns: "{name}" is no column{hint}')
        self._group_ends[path] = np.cumsum(opened.sizes, dtype=np.int64).tolist()
        return sum(opened.sizes)

    def _read(self, opened: _OpenTable, row: int) -> Any:
        ends = self._group_ends[opened.path]
        number = int(np.searchsorted(ends, row, side="right"))
        key = os.fspath(opened.path), number
        if key not in self._groups:
            while len(self._groups) >= self.cached:
                self._groups.popitem(last=False)
            self._groups[key] = opened.group(number)
        self._groups.move_to_end(key)
        group, row = self._groups[key], row - (ends[number - 1] if number else 0)
        return {name: _value(group.column(at)[row]) for at, name in enumerate(group.schema.names)}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": OrderedDict()}


def _value(found: Any) -> Any:
    """A value of a column as Python has it; lists of numbers are NumPy arrays."""
    from pyarrow import types

    values: Any = getattr(found, "values", None)
    is_whole = values is not None and hasattr(values, "null_count") and not values.null_count
    if is_whole and (types.is_integer(values.type) or types.is_floating(values.type)):
        return values.to_numpy(zero_copy_only=False).copy()
    return found.as_py()


_STREAM = b"\xff\xff\xff\xff"


@DATASETS.register_module()
class ArrowFiles(_TableFiles):
    """Rows of Arrow and Feather files, as dicts of columns; the files are mapped into memory.

    Arrow files may be of the file format or of the stream format, which the data sets of Hugging Face are kept in.
    ``local_shuffle`` is of use for compressed files, whose record batches are decoded as a whole.

    Args:
        paths, transform, local_shuffle: see FileSource.
        columns: names of the columns to read; None: all.
        cached: record batches that a process keeps.

    Raises:
        ConfigError: pyarrow is missing, or a column is.

    Example:
        train_dataloader = dict(batch_size=32, dataset=dict(type="ArrowFiles", paths="data/*.arrow"))
    """

    suffixes = (".arrow", ".feather", ".ipc")

    def _open(self, path: Path) -> _OpenTable:
        import pyarrow

        data = pyarrow.memory_map(str(path))
        reader: Any
        if bytes(data.read_at(4, 0)) == _STREAM:
            # No index says where its batches are: their headers are read, one after the other.
            reader = pyarrow.ipc.open_stream(data)
            batches = list(reader)
            read, sizes = batches.__getitem__, [batch.num_rows for batch in batches]
        else:
            reader = pyarrow.ipc.open_file(data)
            read = reader.get_batch
            sizes = [read(number).num_rows for number in range(reader.num_record_batches)]
        columns = self.columns
        return _OpenTable(
            path, reader.schema.names, sizes, lambda at: read(at).select(columns) if columns else read(at)
        )


@DATASETS.register_module()
class ParquetFiles(_TableFiles):
    """Rows of Parquet files, as dicts of columns. A row group is decoded as a whole, and kept for the next rows.

    Shuffling moves whole row groups, and mixes the rows of four of them: reading any row after any other would decode a
    row group for each row. ``local_shuffle=1`` does that.

    Args:
        paths, transform: see FileSource.
        columns: names of the columns to read; None: all.
        local_shuffle: rows in a block, which is made of whole row groups; None: each row group is one.
        cached: row groups that a process keeps, decoded.

    Raises:
        ConfigError: pyarrow is missing, or a column is.

    Example:
        train_dataloader = dict(batch_size=32, dataset=dict(type="ParquetFiles", paths="data/*.parquet", columns=["text"]))
    """

    suffixes = (".parquet", ".pq")

    def _open(self, path: Path) -> _OpenTable:
        import pyarrow.parquet

        found = pyarrow.parquet.ParquetFile(path, memory_map=True)
        sizes = [found.metadata.row_group(number).num_rows for number in range(found.metadata.num_row_groups)]

        def read(number: int) -> Any:
            return found.read_row_group(number, columns=self.columns, use_threads=False).combine_chunks()

        return _OpenTable(path, found.schema_arrow.names, sizes, read)

    def order_of_pass(self, seed: int, number: int, shuffle: bool) -> Order:
        """See FileSource."""
        if shuffle and self.local_shuffle is None:
            return LocalOrder(self._block_ends(1), seed, number)
        return super().order_of_pass(seed, number, shuffle)

    def _block_ends(self, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        groups, before = [], 0
        for path in self.files:
            groups.append(np.asarray(self._group_ends[path], np.int64) + before)
            before += self._group_ends[path][-1] if self._group_ends[path] else 0
        ends = np.unique(np.concatenate(groups))
        ends = ends[ends > 0]
        if size <= 1:
            return ends
        # The last row group that begins below each multiple of the size; the end of all is one of the ends.
        return np.unique(ends[np.minimum(np.searchsorted(ends, np.arange(size, ends[-1] + size, size)), len(ends) - 1)])
