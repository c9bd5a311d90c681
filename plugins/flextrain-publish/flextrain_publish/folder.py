"""Publish to a folder: every version is complete before readers see it, and files that have not changed are shared.

``PATH/versions/7`` has what ``from_pretrained`` reads, and ``published.json``; ``PATH/current`` is a link to the newest version,
which is replaced in one step. A version that was published never changes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flextrain import ConfigError, LiveWeights

from .manifest import Entry, PublishError, check, entry_of, of_json, to_json

CURRENT, VERSIONS, MANIFEST, INDEX = "current", "versions", "published.json", "model.safetensors.index.json"
_LOCK, _UNFINISHED = ".lock", ".unfinished"


@dataclass(frozen=True)
class Published:
    """A version in a folder.

    Attributes:
        folder: with this version; it does not change, and stays until ``keep`` newer ones are there.
        version: its number.
        tensors: what was published, by name.
    """

    folder: Path
    version: int
    tensors: Mapping[str, Entry]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every name and tensor, each after its checksum was compared; one tensor at a time is in memory.

        Raises:
            PublishError: a tensor is not what was published, or a file has other tensors than the manifest.
        """
        for file in sorted({entry.file for entry in self.tensors.values()}):
            names = {name for name, entry in self.tensors.items() if entry.file == file}
            try:
                with safe_open(self.folder / file, "pt") as opened:
                    if differing := names.symmetric_difference(opened.keys()):
                        raise PublishError(
                            f"{self.folder / file}: {min(differing)} is in it or in {MANIFEST}, not in both"
                        )
                    for name in sorted(names):
                        tensor = opened.get_tensor(name)
                        check(name, tensor, self.tensors[name], self.folder / file)
                        yield name, tensor
            except (OSError, SafetensorError) as error:
                raise PublishError(f"{self.folder / file}: cannot be read, {error}") from None

    def check(self) -> None:
        """Compare every tensor with its checksum.

        Raises:
            PublishError: one is not what was published.
        """
        for _ in self.read():
            pass


def published(path: str | os.PathLike[str]) -> Published | None:
    """Return the current version of a folder, or the version whose own folder is given; None: nothing was published.

    Raises:
        PublishError: the manifest cannot be read.
    """
    root = Path(path)
    # Resolved once: all that is read is of one version, whatever is published meanwhile.
    folder = (root if (root / MANIFEST).is_file() else root / CURRENT).resolve()
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PublishError(f"{folder / MANIFEST}: is damaged, {error}") from None
    return Published(folder, *of_json(value, folder / MANIFEST))


class FolderTarget:
    """Publishes to a folder that ``from_pretrained``, vLLM and SGLang load.

    Args:
        path: the folder, which rank 0 and the readers reach.
        keep: how many versions stay, the current one included; readers of an older one lose its files.
        size: largest size of a file, and of what is gathered in memory; a larger tensor has a file of its own.
        verify: read all tensors of a version again before readers see it.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int = 2, size: int | str = "1GB", verify: bool = True
    ) -> None:
        if keep < 1:
            raise ConfigError(f"FolderTarget.keep: {keep} is not allowed, give 1 or more")
        self.path, self.keep, self.size, self.verify = Path(path).absolute(), keep, size, verify

    def __str__(self) -> str:
        return str(self.path)

    def publish(self, weights: LiveWeights) -> dict[str, Any]:
        """Write a version, then let ``current`` name it; until then readers see the one before, also if this fails.

        Returns:
            ``version``, ``folder``, ``tensors``, ``changed`` (number of tensors with another checksum than before),
            ``written_bytes`` and ``seconds``.

        Raises:
            PublishError: a tensor has NaN or infinity, another process publishes there, or what was written reads differently.
        """
        begin = time.perf_counter()
        versions = self.path / VERSIONS
        versions.mkdir(parents=True, exist_ok=True)
        with self._alone():
            before = published(self.path)
            there = [int(one.name) for one in versions.iterdir() if one.name.isdigit()]
            number = max([0, *there]) + 1
            staged = versions / _UNFINISHED
            shutil.rmtree(staged, ignore_errors=True)  # of a process that was killed
            staged.mkdir()
            try:
                tensors, written = self._write(weights, staged, before)
                weights.write_configuration(staged)
                (staged / MANIFEST).write_text(to_json(number, tensors), encoding="utf-8")
                if self.verify:
                    Published(staged, number, tensors).check()
                for file in (*staged.iterdir(), staged):
                    _flush(file)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
            folder = versions / str(number)
            staged.rename(folder)
            _flush(versions)
            self._swap(folder)
            for old in sorted(there)[: max(len(there) + 1 - self.keep, 0)]:
                shutil.rmtree(versions / str(old), ignore_errors=True)
        known = before.tensors if before else {}
        changed = sum(name not in known or known[name].sha256 != one.sha256 for name, one in tensors.items())
        return {
            "version": number,
            "folder": str(folder),
            "tensors": len(tensors),
            "changed": changed,
            "written_bytes": written,
            "seconds": time.perf_counter() - begin,
        }

    def _write(self, weights: LiveWeights, folder: Path, before: Published | None) -> tuple[dict[str, Entry], int]:
        buckets = weights.buckets(self.size)
        if not buckets:
            raise PublishError(f"{self.path}: the model has no weights")
        found: dict[str, Entry] = {}
        written = 0
        for number, bucket in enumerate(buckets, 1):
            file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05d}-of-{len(buckets):05d}.safetensors"
            entries, is_new = _write_bucket(weights, bucket, folder / file, before)
            found |= entries
            written += is_new * sum(one.nbytes for one in bucket)
        if len(buckets) > 1:
            total = sum(one.nbytes for bucket in buckets for one in bucket)
            index = {"metadata": {"total_size": total}, "weight_map": {name: one.file for name, one in found.items()}}
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        return found, written

    def _swap(self, folder: Path) -> None:
        link = self.path / f".{CURRENT}"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(VERSIONS) / folder.name)
        link.replace(self.path / CURRENT)
        _flush(self.path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other process publishes to the folder; a killed one is in nobody's way."""
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise PublishError(f"{self.path}: another process publishes there now, give another folder") from None
            yield


def _write_bucket(
    weights: LiveWeights, bucket: Sequence[Any], path: Path, before: Published | None
) -> tuple[dict[str, Entry], bool]:
    """Write a file, or share that of the version before; return its tensors, and whether it is new. It keeps none in memory."""
    tensors = {one.name: weights.read(one) for one in bucket}
    entries = {name: entry_of(name, tensor, path.name) for name, tensor in tensors.items()}
    if before is not None and entries == {n: e for n, e in before.tensors.items() if e.file == path.name}:
        _link(before.folder / path.name, path)
        return entries, False
    save_file(tensors, path, {"format": "pt"})
    return entries, True


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # some file systems have no hard links
        shutil.copyfile(old, new)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
