"""Checkpoints in format 1, whose index lists the chunks of every tensor, out of those that are saved today."""

from __future__ import annotations

import json
from pathlib import Path

from flextrain.core.checkpoint import directory


def in_format_1(path: Path) -> Path:
    """Write the index of a checkpoint anew in format 1; its other files are the same in both."""
    manifest = directory.read_manifest(path)
    tensors = {
        key: {"dtype": t.dtype, "shape": t.shape, "chunks": [chunk.model_dump() for chunk in t.chunks]}
        for key, t in manifest.entries.items()
    }
    old = {**manifest.model_dump(exclude={"layouts", "tensors"}), "version": 1, "tensors": tensors}
    directory.seal(path, json.dumps(old).encode())
    return path
