"""Checkpoints: a directory of safetensors files and JSON that any strategy writes and any other reads."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .export import export_weights
from .flat_shard import FlatShard
from .layout import find_latest, is_checkpoint, mark_latest, remove_checkpoint
from .marked import is_marked, passed_over, what_is_not_finite
from .places import is_local, make_writable, place
from .saving import PendingSave, Staging, save_checkpoint, save_in_background
from .weights import MatchReport, match_weights, open_weights

__all__ = [
    "Checkpoint",
    "FlatShard",
    "MatchReport",
    "PendingSave",
    "Staging",
    "export_weights",
    "find_latest",
    "is_checkpoint",
    "is_local",
    "is_marked",
    "make_writable",
    "mark_latest",
    "match_weights",
    "open_weights",
    "passed_over",
    "place",
    "remove_checkpoint",
    "save_checkpoint",
    "save_in_background",
    "what_is_not_finite",
]
