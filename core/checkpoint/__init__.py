"""Checkpoints: a directory of safetensors files and JSON that every strategy can write and read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .chunks import FlatShard
from .directory import find_latest, is_checkpoint, mark_latest, remove_checkpoint
from .folders import as_path, is_local, make_writable
from .load import (
    Checkpoint,
    TensorReader,
    complete_ones,
    is_marked,
    iteration_of,
    newest_complete,
    passed_over,
    reading,
    what_is_not_finite,
)
from .save import PendingSave, Staging, save_checkpoint, save_in_background
from .weights import MatchReport, match_weights, open_weights, open_weights_together, without_prefix

if TYPE_CHECKING:
    from .export.dcp_folder import export_dcp
    from .export.hub import push_to_hub
    from .export.hugging_face import export_hugging_face
    from .export.weights import export_weights

_EXPORTS = {
    "export_dcp": "dcp_folder",
    "export_hugging_face": "hugging_face",
    "export_weights": "weights",
    "push_to_hub": "hub",
}

__all__ = [
    "Checkpoint",
    "FlatShard",
    "MatchReport",
    "PendingSave",
    "Staging",
    "TensorReader",
    "export_hugging_face",
    "export_dcp",
    "export_weights",
    "find_latest",
    "is_checkpoint",
    "is_local",
    "is_marked",
    "make_writable",
    "complete_ones",
    "iteration_of",
    "mark_latest",
    "newest_complete",
    "match_weights",
    "open_weights",
    "open_weights_together",
    "passed_over",
    "push_to_hub",
    "as_path",
    "reading",
    "remove_checkpoint",
    "save_checkpoint",
    "save_in_background",
    "what_is_not_finite",
    "without_prefix",
]


def __getattr__(name: str) -> object:  # no run needs an export to begin
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".export.{_EXPORTS[name]}", __name__), name)
