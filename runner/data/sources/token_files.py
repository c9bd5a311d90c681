"""TokenFiles: documents of token numbers in files that are mapped into memory."""

from __future__ import annotations

import bisect
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ....core.base.config import PositiveInt
from ....core.base.errors import ConfigError, DataError, counted, one_of
from ....core.base.registry import DATASETS
from .file_source import FileSource, index_of, print_of_file, print_of_parts

_CHUNK = 2**24
_OTHERS = frozenset(
    [
        ".arrow",
        ".bz2",
        ".csv",
        ".feather",
        ".gz",
        ".json",
        ".jsonl",
        ".md",
        ".ndjson",
        ".npz",
        ".parquet",
        ".pt",
        ".pth",
        ".safetensors",
        ".tar",
        ".tsv",
        ".txt",
        ".xz",
        ".zip",
        ".zst",
    ]
)
TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]
Tokens = np.ndarray[Any, Any]


class _TokenReader:
    """The tokens of a file, and where its documents end."""

    def __init__(self, tokens: Tokens, ends: Any) -> None:
        self.tokens, self.ends = tokens, ends


class DocumentLengths:
    """The lengths of the documents of token files; a slice is read when it is asked for."""

    def __init__(self, source: TokenFiles) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, span: slice) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the lengths of documents ``span.start`` to ``span.stop``, int64."""
        start, stop, _ = span.indices(len(self))
        found = [np.empty(0, np.int64)]
        while start < stop:
            number, row = self._source.find(start)
            ends = self._source.opened(number).ends
            here = min(len(ends), row + stop - start)
            before = int(ends[row - 1]) if row else 0
            own = np.asarray(ends[row:here], np.int64)
            found.append(own - np.concatenate([[before], own[:-1]]))
            start += here - row
        return np.concatenate(found)


@DATASETS.register_module()
class TokenFiles(FileSource):
    """Documents of tokens: ``dict(input_ids=...)``, int64 tensors. For training on sequences of one length see PackedTokens.

    Args:
        paths, transform, local_shuffle, index_dir: see FileSource.
        dtype: type of the numbers in a ``.bin`` file, little-endian; a ``.npy`` file says its own.
        skip_bytes: length of a header of ``.bin`` files, which is not read.
        end_token: the token that ends a document, and belongs to it. Where it stands is written to ``<file>.ftindex``.
        ends: ending of the name of a ``.npy`` file beside each file, with the number of tokens up to the end of each
            document: ``".ends.npy"``. Without this and ``end_token`` a file is one document.
        vocab_size: tokens have to be below it; checked when they are read.

    Raises:
        ConfigError: ``dtype`` cannot hold tokens of this vocabulary.
        DataError: the size of a file is no multiple of its dtype's, or a token is not in the vocabulary.

    Example:
        train_dataloader = dict(
            batch_size=8,
            dataset=dict(type="PackedTokens", source=dict(type="TokenFiles", paths="tokens/*.bin", end_token=0), length=2048),
        )
    """

    suffixes = (".bin", ".npy")

    def __init__(
        self,
        paths: Any,
        *,
        dtype: TokenType = "uint16",
        skip_bytes: int = 0,
        end_token: int | None = None,
        ends: str | None = None,
        vocab_size: PositiveInt | None = None,
        transform: Any = None,
        local_shuffle: PositiveInt | None = None,
        index_dir: str | Path | None = None,
        where: str = "",
    ) -> None:
        where = where or "TokenFiles"
        if dtype not in TokenType.__args__:  # type: ignore[attr-defined]
            raise ConfigError(f"{where}.dtype: {dtype!r} is not allowed, choose {one_of(TokenType.__args__)}")  # type: ignore[attr-defined]
        if ends is not None and end_token is not None:
            raise ConfigError(f"{where}.ends: end_token is given too, give one of them")
        if skip_bytes < 0:
            raise ConfigError(f"{where}.skip_bytes: {skip_bytes} is not allowed, give 0 or more")
        if end_token is not None and not 0 <= end_token <= min(np.iinfo(dtype).max, (vocab_size or 2**63) - 1):
            raise ConfigError(f"{where}.end_token: {end_token} is no token of the files, whose dtype is {dtype}")
        self.dtype, self.skip_bytes, self.end_token, self.ends = dtype, skip_bytes, end_token, ends
        self.vocab_size, self._where = vocab_size, where
        super().__init__(paths, transform=transform, local_shuffle=local_shuffle, index_dir=index_dir, where=where)
        sizes = [self._size(path) for path in self.files]
        self._token_ends = list(accumulate(sizes))
        if ends is not None:  # other ends are other documents
            beside = [path.with_name(path.name + ends) for path in self.files]
            parts = [*self._prints, *map(print_of_file, beside), *self._order]
            self.fingerprint = print_of_parts(type(self).__name__, len(self), parts)
        self._check_end_token([path for path, size in zip(self.files, sizes, strict=True) if size])

    def _check_end_token(self, files: list[Path]) -> None:
        """Raise ConfigError if it is in none of the files, which have tokens."""
        if self.end_token is None or len(self) != len(files):
            return
        if not any(int(self._tokens(path)[-1]) == self.end_token for path in files):
            raise ConfigError(
                f"{self._where}.end_token: {self.end_token} is nowhere in {counted(len(files), 'file')}, each would be one "
                "document; give the token that ends documents, or leave it out"
            )

    def _count(self, path: Path) -> int:
        if self.end_token is None and self.ends is None:
            return int(self._size(path) > 0)
        return len(self._ends_in(path))

    def _size(self, path: Path) -> int:
        return len(self._tokens(path))

    def _tokens(self, path: Path) -> Tokens:
        if path.suffix.lower() in _OTHERS:  # its bytes would be read as numbers
            raise ConfigError(f"{self._where}.paths: {path} has no token numbers, by its name; give .bin or .npy files")
        if path.suffix == ".npy":
            tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
                raise DataError(
                    f"{path}: holds {tokens.dtype} of shape {tokens.shape}, it must hold integers in one row"
                )
            self._check_vocabulary(path, tokens.dtype)
            return np.asarray(tokens)
        kind = np.dtype(self.dtype).newbyteorder("<")
        self._check_vocabulary(path, kind)
        size = path.stat().st_size - self.skip_bytes
        if size < 0 or size % kind.itemsize:
            raise DataError(
                f"{path}: {size} bytes{' after its header' if self.skip_bytes else ''} are no multiple of {kind.itemsize}, "
                f"the size of {self.dtype}; say its dtype, or write it again"
            )
        if not size:
            return np.empty(0, kind)
        # A view without memmap's own methods is read faster.
        return np.asarray(np.memmap(path, kind, "r", self.skip_bytes, (size // kind.itemsize,)))

    def _check_vocabulary(self, path: Path, kind: Any) -> None:
        if self.vocab_size is not None and self.vocab_size - 1 > np.iinfo(kind).max:
            raise ConfigError(
                f"{self._where}.vocab_size: {self.vocab_size} is more than the {np.iinfo(kind).max + 1} tokens that {kind.name} "
                f"of {path.name} can tell apart; its larger tokens are lost, write it again as uint32"
            )

    def _ends_in(self, path: Path) -> Any:
        """The number of tokens up to the end of each document of a file; tokens after the last end are one more."""
        size = self._size(path)
        if self.ends is not None:
            beside = path.with_name(path.name + self.ends)
            if not beside.exists():
                raise ConfigError(
                    f"{self._where}.ends: {beside} is missing, which says where the documents of {path.name} end"
                )
            found: Any = np.load(beside, mmap_mode="r", allow_pickle=False)
            if found.ndim != 1 or found.dtype.kind not in "ui" or not len(found) or int(found[-1]) != size:
                last = int(found[-1]) if found.ndim == 1 and len(found) else None
                raise DataError(f"{beside}: its last end is {last}, and {path.name} has {size} tokens")
            return found
        if self.end_token is not None:
            kind = f"documents 1 {self.dtype} {self.skip_bytes} {self.end_token}"
            return index_of(path, kind, lambda: {"ends": self._find_ends(path)}, self.index_dir)["ends"]
        return np.array([size] if size else [], np.int64)

    def _find_ends(self, path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
        tokens = self._tokens(path)
        found = [
            np.flatnonzero(tokens[at : at + _CHUNK] == self.end_token) + (at + 1)
            for at in range(0, len(tokens), _CHUNK)
        ]
        ends = np.concatenate([np.empty(0, np.int64), *found])
        return ends if not len(tokens) or (len(ends) and ends[-1] == len(tokens)) else np.append(ends, len(tokens))

    def _open(self, path: Path) -> Any:
        return _TokenReader(self._tokens(path), self._ends_in(path))

    def _read(self, opened: _TokenReader, row: int) -> Any:
        begin = int(opened.ends[row - 1]) if row else 0
        return {"input_ids": torch.from_numpy(self._checked(opened.tokens[begin : int(opened.ends[row])], begin))}

    def _checked(self, tokens: Tokens, begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        found = tokens.astype(np.int64)
        if self.vocab_size is not None and len(found) and (int(found.max()) >= self.vocab_size or int(found.min()) < 0):
            at = int(np.flatnonzero((found >= self.vocab_size) | (found < 0))[0])
            raise ValueError(f"token {int(found[at])} at {begin + at} is not below vocab_size={self.vocab_size}")
        return found

    # For PackedTokens

    def lengths(self) -> DocumentLengths:
        """Return the number of tokens of every document: an object whose slices are int64 arrays."""
        return DocumentLengths(self)

    @property
    def num_tokens(self) -> int:
        """Tokens in all files."""
        return self._token_ends[-1]

    def span(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return tokens ``start`` to ``stop`` of all files one after the other, int64."""
        found, number = [], bisect.bisect_right(self._token_ends, start)
        while start < stop:
            before = self._token_ends[number - 1] if number else 0
            found.append(self._of_file(number, self.opened(number), start - before, stop - before))
            start += len(found[-1])
            number += 1
        return np.concatenate(found) if len(found) != 1 else found[0]

    def document_span(self, index: int, first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return tokens ``first`` to ``last`` of a document, int64."""
        number, row = self.find(index)
        opened = self.opened(number)
        begin = int(opened.ends[row - 1]) if row else 0
        return self._of_file(number, opened, begin + first, begin + last)

    def _of_file(self, number: int, opened: _TokenReader, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        try:
            return self._checked(opened.tokens[start:stop], start)
        except ValueError as error:
            raise DataError(f"{self.files[number]}: {error}") from None
