"""TarFiles: samples of tar archives in the form of WebDataset, found by an index of their members."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ....core.base.config import PositiveInt
from ....core.base.errors import DataError
from ....core.base.registry import DATASETS
from .file_source import Arrays, FileSource, OpenBytes, index_of, refuse_compressed

_BLOCK = 512
_CHUNK = 2**20


class _TarReader(OpenBytes):
    """An open archive and the index of its samples."""

    def __init__(self, path: Path, index: Arrays) -> None:
        super().__init__(path)
        self.index = index

    def member(self, number: int) -> tuple[str, bytes]:
        names, at = self.index["names"], self.index["name_ends"]
        begin, size = int(self.index["offsets"][number]), int(self.index["sizes"][number])
        name = (
            names[int(at[number - 1]) if number else 0 : int(at[number])].tobytes().decode("utf-8", "surrogateescape")
        )
        return name, self.read(begin, size, name)


@DATASETS.register_module()
class TarFiles(FileSource):
    """Samples of tar archives: neighbouring members whose names are alike up to the first dot are one sample.

    A sample is a dict of endings to contents, with the common name as ``__key__``, as WebDataset has it. Where the members
    stand is written to ``<file>.ftindex`` when a file is first read, or has changed since.

    Args:
        paths, transform, local_shuffle, index_dir: see FileSource.
        decode: return the contents of json, txt, cls (an int) and npy members; False: all as bytes, as others always are.

    Raises:
        DataError: an archive is compressed, ends too early, or has links in place of contents.

    Example:
        train_dataloader = dict(batch_size=32, dataset=dict(type="TarFiles", paths="shards/*.tar"))
    """

    suffixes = (".tar",)

    def __init__(
        self,
        paths: Any,
        *,
        decode: bool = True,
        transform: Any = None,
        local_shuffle: PositiveInt | None = None,
        index_dir: str | Path | None = None,
        where: str = "",
    ) -> None:
        self.decode = decode
        super().__init__(paths, transform=transform, local_shuffle=local_shuffle, index_dir=index_dir, where=where)

    def _count(self, path: Path) -> int:
        return len(self._index(path)["ends"])

    def _index(self, path: Path) -> Arrays:
        return index_of(path, "members 3", lambda: _members(path), self.index_dir)

    def _open(self, path: Path) -> Any:
        return _TarReader(path, self._index(path))

    def _read(self, opened: _TarReader, row: int) -> Any:
        ends = opened.index["ends"]
        sample: dict[str, Any] = {}
        for number in range(int(ends[row - 1]) if row else 0, int(ends[row])):
            name, data = opened.member(number)
            key, ending = _split(name)
            sample["__key__"] = key
            sample[ending] = _decoded(data, ending) if self.decode else data
        return sample


def _split(name: str) -> tuple[str, str]:
    """The name of the sample with its folder, and the ending, of a member: "a/b.seg.png" is "a/b" and "seg.png"."""
    path = PurePosixPath(name)
    stem, _, ending = path.name.partition(".")
    return str(path.with_name(stem)), ending.lower()


def _decoded(data: bytes, ending: str) -> Any:
    match ending.rpartition(".")[2]:
        case "json":
            return json.loads(data)
        case "txt":
            return data.decode("utf-8")
        case "cls":
            return int(data)
        case "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
    return data


def _members(path: Path) -> Arrays:
    """The members by sample: where each stands, its size and name, and the number of members up to each sample's end."""
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    ends: list[int] = []
    keys: set[str] = set()
    size, after, last = path.stat().st_size, 0, None
    refuse_compressed(path, "members")
    if not size:
        return _arrays(names, offsets, sizes, ends)
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                after = member.offset_data + -(-member.size // _BLOCK) * _BLOCK if member.isfile() else archive.offset
                if member.isfile() and member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"{member.name} ends after byte {size}, the last")
                name = PurePosixPath(member.name).name
                if member.isdir() or name.startswith(".") or "." not in name:
                    continue
                if not member.isfile():  # also of equal files, which some programs pack once
                    raise tarfile.ReadError(
                        f"{member.name} is a link or no file, write it in full (tar -h --hard-dereference)"
                    )
                if member.sparse is not None:
                    raise tarfile.ReadError(f"{member.name} is a sparse file, write it in full")
                key, ending = _split(member.name)
                if key != last:
                    ends.append(len(names))
                    last, keys = key, set()
                if ending in keys:
                    raise tarfile.ReadError(f"{member.name} is there twice")
                keys.add(ending)
                names.append(member.name)
                offsets.append(member.offset_data)
                sizes.append(member.size)
    except tarfile.TarError as error:
        raise DataError(f"{path}: is no whole tar archive, {error}") from None
    with path.open("rb") as file:
        file.seek(after)
        if (rest := file.read(_BLOCK)).strip(b"\0"):
            raise DataError(
                f"{path}: is no whole tar archive, there are {len(rest)} bytes of no member at byte {after}"
            )
        while rest := file.read(_CHUNK):
            if more := rest.lstrip(b"\0"):
                raise DataError(
                    f"{path}: has more behind its end, at byte {file.tell() - len(more)}; give archives that were joined one by one"
                )
    return _arrays(names, offsets, sizes, [*ends[1:], len(names)] if ends else [])


def _arrays(names: list[str], offsets: list[int], sizes: list[int], ends: list[int]) -> Arrays:
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    return {
        "ends": np.array(ends, np.int64),
        "offsets": np.array(offsets, np.int64),
        "sizes": np.array(sizes, np.int64),
        "names": np.frombuffer(b"".join(encoded), np.uint8),
        "name_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
    }
