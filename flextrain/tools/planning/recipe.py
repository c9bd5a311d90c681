"""What of a training could be changed so that it needs less memory, and what planned changes give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """What of the training could be changed, see Advice.

    Attributes:
        options: names of the options that the strategy has.
        blocks: classes of the model's repeated blocks, those with the most parameters first.
        data_shards: number of processes, or groups of processes, that train on different samples.
        accumulate: micro-batches of an update.
        batch_size: samples of a micro-batch of one data shard; None if no key of the configuration says so.
        is_dict: the optim_wrapper is a dict, whose keys can be changed.
        is_float32: it is an OptimWrapper, which leaves the computation as it is.
    """

    options: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    data_shards: int = 1
    accumulate: int = 1
    batch_size: int | None = None
    is_dict: bool = False
    is_float32: bool = False


@dataclass(frozen=True)
class Advice:
    """A change of a configuration that does not fit, planned again. The samples of an update are the same.

    Attributes:
        keys: the changed arguments of the runner, as Python text to paste.
        changes: the same by dotted key; see PlannedJob.
        peak: bytes at the peak after the change; 0 if it was refused.
        fits: whether it fits then.
        flops: floating-point operations after the change, by those before.
        sent: bytes sent after the change, by those before; None if there were none before.
        message: why the change was refused, one line.
    """

    keys: str
    changes: dict[str, Any]
    peak: int = 0
    fits: bool = False
    flops: float = 1.0
    sent: float | None = None
    message: str = ""


@dataclass(frozen=True)
class MeshSearch:
    """A search over meshes for plans that fit, see ``fit.py``.

    Attributes:
        axes: whose sizes were tried.
        candidates: number of meshes of these axes.
        skipped: by name, why a mesh was not planned: it is not possible, or cannot fit.
        refused: by name, why a mesh is not possible for this script.
        not_planned: those beyond the limit.
    """

    axes: list[str]
    candidates: int
    skipped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    not_planned: list[str] = field(default_factory=list)


def as_arguments(changes: Mapping[str, Any]) -> str:
    """Return changes by dotted key as Python text of the runner's arguments: ``strategy=dict(wrap="blocks")``."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = tree
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return ", ".join(f"{key}={_text(value)}" for key, value in tree.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{key}={_text(each)}' for key, each in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
