"""ArrowFiles: rows of Arrow and Feather files, mapped into memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from ....core.base.config import PositiveInt
from ....core.base.errors import ConfigError, one_of, suggest
from ....core.base.registry import DATASETS
from ..stream_orders import MIXED, Order, default_order
from .file_source import FileSource

# pyarrow, which reads Parquet and Arrow files, and the values of its columns.


def pyarrow(where: str) -> Any:
    """Return the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow as package
    except ImportError:
        raise ConfigError(f"{where}: needs pyarrow, pip install flextrain[data]") from None
    return package


def check_columns(columns: list[str] | None, known: list[str], where: str) -> None:
    """Raise ConfigError if a column is not in a file."""
    if columns is not None and not columns:
        raise ConfigError(f"{where}: [] is not allowed, give at least one column, or None for all")
    for name in columns or ():
        if name not in known:
            raise ConfigError(
                f'{where}: "{name}" is no column{suggest(name, known) or f", choose {one_of(known)}" if known else ""}'
            )


def row_of(batch: Any, row: int) -> dict[str, Any]:
    """One row of a table or record batch: column to value; lists of numbers are NumPy arrays."""
    return {name: _value(batch.column(at), row) for at, name in enumerate(batch.schema.names)}


def _value(column: Any, row: int) -> Any:
    found = column[row]
    values = getattr(found, "values", None)
    if values is not None and hasattr(values, "null_count") and not values.null_count and _is_number(values.type):
        return values.to_numpy(zero_copy_only=False).copy()
    return found.as_py()


def _is_number(kind: Any) -> bool:
    import pyarrow as package

    return bool(package.types.is_integer(kind) or package.types.is_floating(kind))


_STREAM = b"\xff\xff\xff\xff"


class _ArrowReader:
    """An open Arrow file: the ends of its record batches, and the one that was read last."""

    def __init__(self, path: Path, columns: list[str] | None) -> None:
        import pyarrow as package

        data, self.columns = package.memory_map(str(path)), columns
        if bytes(data.read_at(4, 0)) == _STREAM:
            # No index says where its batches are: their headers are read, one after the other.
            reader = package.ipc.open_stream(data)
            batches = list(reader)
            self._read: Any = batches.__getitem__
            sizes = [batch.num_rows for batch in batches]
        else:
            reader = package.ipc.open_file(data)
            self._read = reader.get_batch
            sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
        self.names = reader.schema.names
        self.ends = np.cumsum(sizes, dtype=np.int64)
        self._last: tuple[int, Any] = (-1, None)

    def batch(self, number: int) -> Any:
        if self._last[0] != number:
            found = self._read(number)
            self._last = number, found.select(self.columns) if self.columns else found
        return self._last[1]


@DATASETS.register_module()
class ArrowFiles(FileSource):
    """Rows of Arrow and Feather files, as dicts of columns; the files are mapped into memory.

    Arrow files may be of the file format or of the stream format, which the data sets of Hugging Face are kept in.

    Args:
        paths, transform: see FileSource.
        columns: names of the columns to read; None: all.
        local_shuffle: see FileSource. Of use for compressed files, whose record batches are decoded as a whole.

    Raises:
        ConfigError: pyarrow is missing, or a column is.

    Example:
        train_dataloader = dict(batch_size=32, dataset=dict(type="ArrowFiles", paths="data/*.arrow"))
    """

    suffixes = (".arrow", ".feather", ".ipc")

    def __init__(
        self,
        paths: Any,
        *,
        columns: list[str] | None = None,
        transform: Any = None,
        local_shuffle: PositiveInt | None = None,
        where: str = "",
    ) -> None:
        where = where or "ArrowFiles"
        pyarrow(where)
        self.columns, self._where = columns, where
        super().__init__(paths, transform=transform, local_shuffle=local_shuffle, where=where)

    def _count(self, path: Path) -> int:
        opened = self._open(path)
        check_columns(self.columns, opened.names, f"{self._where}.columns")
        return int(opened.ends[-1]) if len(opened.ends) else 0

    def _open(self, path: Path) -> Any:
        return _ArrowReader(path, self.columns)

    def _read(self, opened: _ArrowReader, row: int) -> Any:
        number = int(np.searchsorted(opened.ends, row, side="right"))
        return row_of(opened.batch(number), row - (int(opened.ends[number - 1]) if number else 0))


# ParquetFiles: rows of Parquet files, read by row group.


@DATASETS.register_module()
class ParquetFiles(FileSource):
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
        where = where or "ParquetFiles"
        if cached < 1:
            raise ConfigError(f"{where}.cached: {cached} is not allowed, give 1 or more")
        pyarrow(where)
        self.columns, self.cached, self._where = columns, cached, where
        self._group_ends: dict[Path, list[int]] = {}
        self._tables: OrderedDict[tuple[str, int], Any] = OrderedDict()
        super().__init__(paths, transform=transform, local_shuffle=local_shuffle, where=where)

    def _count(self, path: Path) -> int:
        opened = self._open(path)
        facts = opened.metadata
        check_columns(self.columns, opened.schema_arrow.names, f"{self._where}.columns")
        sizes = [facts.row_group(number).num_rows for number in range(facts.num_row_groups)]
        self._group_ends[path] = np.cumsum(sizes, dtype=np.int64).tolist()
        return int(facts.num_rows)

    def _open(self, path: Path) -> Any:
        import pyarrow.parquet as parquet

        found = parquet.ParquetFile(path, memory_map=True)
        found.path = path
        return found

    def _read(self, opened: Any, row: int) -> Any:
        ends = self._group_ends[opened.path]
        group = int(np.searchsorted(ends, row, side="right"))
        key = os.fspath(opened.path), group
        if key not in self._tables:
            while len(self._tables) >= self.cached:
                self._tables.popitem(last=False)
            table = opened.read_row_group(group, columns=self.columns, use_threads=False)
            self._tables[key] = table.combine_chunks()
        self._tables.move_to_end(key)
        return row_of(self._tables[key], row - (ends[group - 1] if group else 0))

    def order_of_pass(self, seed: int, number: int, shuffle: bool) -> Order:
        """See FileSource."""
        if shuffle and self.local_shuffle is None:
            from ..stream_orders import LocalOrder

            return LocalOrder(self._block_ends(1), seed, number)
        return (
            super().order_of_pass(seed, number, shuffle) if shuffle else default_order(len(self), seed, number, False)
        )

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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tables": OrderedDict()}
