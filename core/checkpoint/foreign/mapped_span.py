"""A part of a mapped file, used like the whole of one."""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import TypeAlias


class MappedSpan:
    """A part of a mapped file, which reads, seeks and slices like a mapped file of its own.

    Args:
        data: the mapped file.
        begin: offset of the part, in bytes.
        length: its size in bytes.

    Raises:
        ValueError: the part is not inside the file.
    """

    def __init__(self, data: mmap.mmap, begin: int, length: int) -> None:
        if not 0 <= begin <= begin + length <= len(data):
            raise ValueError("a part that is not inside the file")
        self._data, self._begin, self._length = data, begin, length
        self._at = 0

    def __enter__(self) -> MappedSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self._length)
        return self._data[self._begin + begin : self._begin + max(begin, end)]

    def tell(self) -> int:
        """The position of the next byte to read."""
        return self._at

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position from the beginning (0), from here (1), or from the end (2).

        Raises:
            ValueError: it is outside of the part.
        """
        position += (0, self._at, self._length)[whence]
        if not 0 <= position <= self._length:
            raise ValueError("a position outside of the part")
        self._at = position
        return position

    def seekable(self) -> bool:
        """True, as for a file."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Read at most ``size`` bytes; -1 or None: all that are left."""
        end = self._length if size is None or size < 0 else min(self._length, self._at + size)
        found = self[self._at : end]
        self._at = end
        return found

    def readline(self) -> bytes:
        """Read up to the end of a line, or to the end of the part."""
        end = self._data.find(b"\n", self._begin + self._at, self._begin + self._length)
        return self.read(-1 if end < 0 else end + 1 - self._begin - self._at)


Mapped: TypeAlias = "mmap.mmap | MappedSpan"
