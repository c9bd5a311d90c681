"""The record: which global batch each update of the final weights was made of, and by how many groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flextrain import ConfigError

FILE = "torchft.jsonl"


def next_head(head: int, step: int, groups: Iterable[int]) -> int:
    """Return the head after update ``step``, which all groups that make this update together share."""
    text = json.dumps([head, step, *groups])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def begin(work_dir: str | Path) -> None:
    """End the line in which a killed process may have been."""
    with open(Path(work_dir) / FILE, "a") as file:
        file.write("\n")


def append(work_dir: str | Path, line: dict[str, Any]) -> None:
    """Add an update to the record of a group."""
    with open(Path(work_dir) / FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


def lineage(work_dirs: Iterable[str | Path], head: int | None = None, since: int = 1) -> list[dict[str, Any]]:
    """Return the updates that weights are made of, in their order, from the records of all groups.

    An update that no surviving group had, because its groups were lost right after it, is in a record and not here.

    Args:
        work_dirs: those of all groups that have trained, also of lost ones.
        head: that of the weights, ``hook.TorchFTHook`` of a checkpoint has it; None: the furthest of the first work directory.
        since: the first update; above 1 for a run that has begun from a checkpoint of another one.

    Returns:
        Of each update ``update`` (from 1), ``epoch`` (from 0), ``batch`` (of the epoch, from 0), ``rows`` of each micro-batch of a
        group's first process before the division, ``groups``, their number, ``head`` and ``parent``.

    Raises:
        ConfigError: an update is in no record.
    """
    folders = [Path(folder) for folder in work_dirs]
    lines: dict[int, dict[str, Any]] = {}
    furthest: dict[str, Any] | None = None
    for folder in folders:
        path = folder / FILE
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:  # empty, or half a line of a killed process
                continue
            lines[line["head"]] = line
            if folder == folders[0] and (furthest is None or line["update"] >= furthest["update"]):
                furthest = line
    if head is None and furthest is None:
        raise ConfigError(f"{folders[0] / FILE}: has no update")
    found: list[dict[str, Any]] = []
    at = furthest["head"] if head is None and furthest is not None else head
    while not found or found[-1]["update"] > since:
        if at not in lines:
            raise ConfigError(
                f"{FILE}: no record has the update with head {at}, give the work directories of all groups"
            )
        found.append(lines[at])
        at = found[-1]["parent"]
    return found[::-1]
