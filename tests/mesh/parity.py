"""Train under a mesh and on one device, and compare losses, gradient norms and final weights.

In float32, sums in another order round differently. Under AdamW that does not stay small: the step of an element is lr * m /
(sqrt(v) + eps), and where its gradient is below the rounding error of the others, 1e-10 here, an eps of 1e-8 still gives it some
percent of a full step. One device differs from itself by 7e-5 of a tensor's largest element after 20 updates if the samples of
its batches come in another order, and from float64 by 5e-5; meshes differ from it by 4e-5. So no tolerance below that can tell
an error from rounding. With an eps of 1e-4, still below most gradients (1e-3), one device differs from itself by 4e-7, and 1e-5
can be asked for; ``test_parity.py`` holds both. SGD needs nothing of this (1e-7), float64 neither.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from flextrain import OptimWrapper, SingleDeviceStrategy, Strategy
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm import collectives as dist
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import Trace, alone, train, windows
from flextrain.testing.sessions import Session, whole_model

from ..device import DEVICE
from .models import build, sample

NEEDS_LAYOUTS = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"), reason="tensor parallelism needs torch 2.7"
)
"""For tests of DTensors without a strategy, which would refuse."""
UPDATES = 20
BATCH = 8  # samples of a global micro-batch
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
EPS = {torch.float64: 1e-8, torch.float32: 1e-4}
# Three micro-batches an epoch in windows of two: every second window is a part of one.
ACCUMULATED = 3


@dataclass(frozen=True)
class Recipe:
    """What an update is."""

    optimizer: str = "AdamW"
    lr: float = 3e-3
    accumulate: int = 1
    clip: float | None = 0.1  # a norm that is always exceeded
    largest: float | None = None  # clip by value, to this one
    frozen: bool = False  # every layer norm
    eps: float | None = None  # of AdamW; default: as said above

    def optim(self) -> OptimWrapper:
        clip = {} if self.clip is None else dict(clip_grad=dict(max_norm=self.clip))
        if self.largest is not None:
            clip = dict(clip_grad=dict(type="value", clip_value=self.largest))
        options: dict[str, Any] = dict(type=self.optimizer, lr=self.lr, weight_decay=0.05)
        if self.optimizer == "AdamW":
            options["eps"] = EPS[torch.get_default_dtype()] if self.eps is None else self.eps
        return OptimWrapper(options, accumulative_counts=self.accumulate, **clip)

    def model(self, name: str) -> nn.Module:
        model = build(name)
        if self.frozen:
            for part_name, parameter in model.named_parameters():
                parameter.requires_grad_("norm" not in part_name)
        return model


RECIPES = {
    "adamw-clip": Recipe(),
    "adamw": Recipe(clip=None),
    "accumulate-clip": Recipe(accumulate=2),
    "frozen": Recipe(frozen=True),
    "sgd": Recipe(optimizer="SGD", lr=0.03, accumulate=2, clip=None),
}


@contextlib.contextmanager
def dtype_of(dtype: torch.dtype) -> Iterator[None]:
    """A context in which new tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def data(name: str, recipe: Recipe, updates: int) -> list[list[dict[str, Tensor]]]:
    """The windows of a number of updates, epoch after epoch over the same samples."""
    epoch = [sample(name, BATCH, seed) for seed in range(ACCUMULATED if recipe.accumulate > 1 else 4)]
    one = windows(epoch, recipe.accumulate)
    return (one * (updates // len(one) + 1))[:updates]


@functools.cache
def reference(name: str, recipe: Recipe, updates: int, dtype: torch.dtype) -> tuple[Trace, dict[str, Tensor]]:
    """The training run of one device, once in each process."""
    with alone(), dtype_of(dtype):
        strategy = SingleDeviceStrategy(device=DEVICE)
        model, optim = strategy.setup(recipe.model(name), recipe.optim())
        given = data(name, recipe, updates)
        trace = train(strategy, model, optim, given)  # type: ignore[arg-type]
        weights = whole_model(strategy)
        strategy.leave()
    return trace, weights


@contextlib.contextmanager
def started(spec: Mapping[str, Any], name: str, recipe: Recipe, *, deferred: bool = False) -> Iterator[Session]:
    """A strategy with a model set up in this worker."""
    strategy: Strategy = STRATEGIES.build({"device": DEVICE, "timeout_s": 300, **spec}, "strategy")
    try:
        strategy.join()
        with strategy.building() if deferred else contextlib.nullcontext():
            given = recipe.model(name)
        model, optim = strategy.setup(given, recipe.optim())
        yield Session(strategy, model, optim)  # type: ignore[arg-type]
    finally:
        strategy.leave()
        dist.destroy_process_group()


def compare(
    spec: Mapping[str, Any],
    name: str,
    recipe: Recipe = RECIPES["accumulate-clip"],
    dtype: torch.dtype = torch.float64,
    updates: int = UPDATES,
    tolerance: float | None = None,
    deferred: bool = False,
) -> Trace:
    """In a worker: train under the strategy, and raise where its results are not those of one device."""
    torch.set_num_threads(1)
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    expected, weights = reference(name, recipe, updates, dtype)
    with dtype_of(dtype), started(spec, name, recipe, deferred=deferred) as session:
        found = train(session.strategy, session.model, session.optim, data(name, recipe, updates))
        found_weights = whole_model(session.strategy)
    same_numbers(found.losses, expected.losses, "the loss", tolerance)
    same_numbers(found.grad_norms, expected.grad_norms, "the gradient norm", tolerance)
    same_tensors(found_weights, weights, "final weights", tolerance)
    assert found_weights.keys() == weights.keys()
    return found
