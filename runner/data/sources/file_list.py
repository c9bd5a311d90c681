"""The files of a source: found by name or pattern, each once, with a fingerprint of what is in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from ....core.errors import ConfigError, counted, nearest

logger = logging.getLogger("flextrain")

_END = 4096
"""Bytes at the beginning and at the end of a file that its fingerprint looks at."""


def find_files(paths: Any, suffixes: Sequence[str], where: str) -> list[Path]:
    """Return the files that ``paths`` names: files and patterns in the given order, those of one pattern by name.

    Args:
        paths: a path, a folder, a pattern such as ``"data/*.jsonl"``, or a list of them.
        suffixes: endings of the files that are taken from a folder.
        where: the configuration key, for messages.

    Raises:
        ConfigError: nothing is found, something is no path, or a file is named twice.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"{where}: {paths!r} is not allowed, give a path, a pattern, or a list of at least one")
    found: list[Path] = []
    for item in given:
        if not isinstance(item, (str, os.PathLike)):
            raise ConfigError(f"{where}: {item!r} is not allowed, give a path or a pattern")
        found += _matches(os.fspath(item), suffixes, where)
    seen: dict[Path, Path] = {}
    for path in found:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            other = "" if str(first) == str(path) else f" and {first}, which are one file"
            raise ConfigError(f"{where}: names {path}{other} twice, its samples would be twice in every pass")
    return found


def _matches(pattern: str, suffixes: Sequence[str], where: str) -> list[Path]:
    if "://" in pattern:
        raise ConfigError(f'{where}: "{pattern}" is a URL, give files of a local or mounted file system')
    if not pattern:
        raise ConfigError(f"{where}: an empty text is not allowed, give a path or a pattern")
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = sorted(each for each in path.iterdir() if each.is_file() and each.name.endswith(tuple(suffixes)))
        if not inside:
            raise ConfigError(f"{where}: the folder {path} has no file *{' or *'.join(suffixes)}")
        return inside
    if path.exists():
        return [path]
    if path.is_symlink():
        raise ConfigError(f"{where}: {path} is a link to a file that is not there")
    start = Path(path.anchor) if path.is_absolute() else Path()
    relative = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
    matches = sorted(each for each in start.glob(relative) if each.is_file()) if relative != "." else []
    if not matches:
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = nearest(path.name, names)
        raise ConfigError(f'{where}: no file matches "{pattern}"{f", did you mean {meant}?" if meant else ""}')
    return matches


def prints_of_files(paths: Sequence[Path]) -> list[str]:
    """A text for each file, of its name, size, beginning and end: it changes with the data, and not if a file is copied.

    Two files of one content under different names are warned of.
    """
    contents: dict[str, Path] = {}
    found = []
    for path in paths:
        content, size = _content_of(path)
        first = contents.setdefault(content, path)
        if first is not path and size:
            logger.warning(
                f"{path} and {first} have the same size, beginning and end: a copy's samples come twice in every pass"
            )
        found.append(_print(path, content))
    return found


def print_of_file(path: Path) -> str:
    """The text that ``prints_of_files`` gives for a file."""
    return _print(path, _content_of(path)[0])


def _print(path: Path, content: str) -> str:
    return f"{path.name} {content}"


def _content_of(path: Path) -> tuple[str, int]:
    size = path.stat().st_size
    digest = xxhash.xxh3_64(f"{size} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_END))
        if size > _END:
            file.seek(max(_END, size - _END))
            digest.update(file.read(_END))
    return digest.hexdigest(), size


def print_of(dataset: object) -> str | None:
    """The ``fingerprint`` of a dataset; None if it has none."""
    found = getattr(dataset, "fingerprint", None)
    return found if isinstance(found, str) else None


def print_of_parts(kind: str, samples: int, parts: Sequence[object]) -> str:
    """The fingerprint of a source as text: what it is, how many samples it has, and a hash of its parts in order."""
    digest = xxhash.xxh3_64("\n".join(map(str, parts)).encode()).hexdigest()
    return f"{kind} of {counted(samples, 'sample')} ({digest})"
