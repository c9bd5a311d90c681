"""ParquetFiles: rows of Parquet files, read by row group."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from ....core.config import PositiveInt
from ....core.errors import ConfigError
from ....core.registry import DATASETS
from ..streams.stream_orders import MIXED, Order, default_order
from .arrow_package import check_columns, pyarrow, row_of
from .file_source import FileSource


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
            from ..streams.stream_orders import LocalOrder

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
