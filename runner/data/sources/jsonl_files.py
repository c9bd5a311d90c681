"""JsonlFiles: lines of JSON, found by an index of where they begin."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from ....core.base.registry import DATASETS
from .file_source import FileSource, OpenBytes, index_of, refuse_compressed

_CHUNK = 2**24
_BLANK = b" \t\r\n"
logger = logging.getLogger("flextrain")


class _LineReader(OpenBytes):
    """An open file and the index of its lines."""

    def __init__(self, path: Path, starts: Any) -> None:
        super().__init__(path)
        self.starts = starts

    def line(self, row: int) -> bytes:
        begin, end = int(self.starts[row]), int(self.starts[row + 1])
        return self.read(begin, end - begin, f"sample {row}")


@DATASETS.register_module()
class JsonlFiles(FileSource):
    """Lines of JSON: sample ``i`` is the object of line ``i``; blank lines are no samples.

    Where the lines begin is written to ``<file>.ftindex`` when a file is first read, or has changed since.

    Args:
        paths, transform, local_shuffle, index_dir: see FileSource.

    Raises:
        DataError: a file is compressed, or a line is no JSON or not UTF-8; the line is named when it is read.

    Example:
        train_dataloader = dict(batch_size=32, dataset=dict(type="JsonlFiles", paths="data/*.jsonl"))
    """

    suffixes = (".jsonl", ".ndjson")

    def _count(self, path: Path) -> int:
        return len(self._index(path)) - 1

    def _index(self, path: Path) -> Any:
        return index_of(path, "lines 1", lambda: {"starts": _starts(path)}, self.index_dir)["starts"]

    def _open(self, path: Path) -> Any:
        return _LineReader(path, self._index(path))

    def _read(self, opened: _LineReader, row: int) -> Any:
        line = opened.line(row)
        try:
            return json.loads(line.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError as error:
            begin = int(opened.starts[row])
            raise ValueError(f"byte {begin + error.start} of the file is not UTF-8; convert it") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"the line at byte {int(opened.starts[row])} is no JSON ({error})") from None


def _starts(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where the lines begin that are not blank, and the end of the file, in bytes."""
    size = path.stat().st_size
    if size > 2**30:
        logger.info(f"{path}: reads {size / 2**30:.1f} GiB once to find its lines")
    refuse_compressed(path, "lines")
    found, at = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + (at + 1))
            at += len(chunk)
        starts = np.concatenate(found)
        starts = starts[starts < at]
        ends = np.append(starts[1:], at)
        return np.append(starts[~_blank(file, starts, ends)], at)


def _blank(file: Any, starts: Any, ends: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each line has nothing but white space; only those that begin with some are read as a whole."""
    blank = np.zeros(len(starts), bool)
    if not len(starts):
        return blank
    data = np.memmap(file, np.uint8, "r")
    suspects = np.flatnonzero(np.isin(data[starts], np.frombuffer(_BLANK, np.uint8)))
    for line in suspects.tolist():
        blank[line] = not data[starts[line] : ends[line]].tobytes().strip()
    return blank
