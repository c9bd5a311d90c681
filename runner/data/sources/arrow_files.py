"""ArrowFiles: rows of Arrow and Feather files, mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ....core.config import PositiveInt
from ....core.registry import DATASETS
from .arrow_package import check_columns, pyarrow, row_of
from .file_source import FileSource

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
