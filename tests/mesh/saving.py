"""Train under a mesh from and to a checkpoint, for tests of resuming on another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import load, save, whole_model

from .parity import RECIPES, data, dtype_of, reference, started

HALF, ALL = 4, 8
RECIPE = RECIPES["accumulate-clip"]


def session(spec: Mapping[str, Any], name: str, *, resume: Path | None = None, path: Path | None = None) -> None:
    """In a worker: train to half from the start, or from ``resume`` to the end; save to ``path`` where one is given.

    What is found after the end has to be what one device finds that did not stop.
    """
    torch.set_num_threads(1)
    expected, weights = reference(name, RECIPE, ALL, torch.float64)
    updates = data(name, RECIPE, ALL)
    first = HALF if resume else 0
    last = ALL if resume else HALF
    with dtype_of(torch.float64), started(spec, name, RECIPE) as running:
        if resume:
            load(running, resume)
        found = train(running.strategy, running.model, running.optim, updates[first:last])  # type: ignore[arg-type]
        if path:
            save(running, path)
        if resume:
            same_tensors(whole_model(running.strategy), weights, "final weights", 1e-6)
    same_numbers(found.losses, expected.losses[first:last], "the loss", 1e-6)
    same_numbers(found.grad_norms, expected.grad_norms[first:last], "the gradient norm", 1e-6)


def on_one_device(name: str, *, resume: Path | None = None, path: Path | None = None) -> None:
    """``session`` in this process."""
    with alone():
        session(dict(type="SingleDeviceStrategy"), name, resume=resume, path=path)
