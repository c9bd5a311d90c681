"""What a backend says of a run: why it cannot train on a window, what follows from an error, what it chose, what a plan has to know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch

from ...core.base.errors import StrategyError
from ...core.model.module_state import keepers
from ...optim.amp import AmpOptimWrapper
from ...optim.canonical import OWN
from ..base import Strategy, TrainStep


@singledispatch
def explain(strategy: Strategy, error: BaseException) -> str | None:
    """Return what to do about an error that follows from how the model is spread; None if it does not."""
    try:
        strategy.noted.check_unchanged()
    except StrategyError as changed:
        return str(changed)
    return None


_DTYPES = re.compile(r"same dtype|scalar type|mixed dtype")


def explain_dtypes(error: BaseException, dtype: torch.dtype | None) -> str | None:
    """Return what to do about an error of dtypes where the model computes with parameters of ``dtype``; None if it is none."""
    if dtype not in (torch.bfloat16, torch.float16) or not _DTYPES.search(str(error)):
        return None
    return (
        f"the strategy gives forward parameters in {str(dtype).removeprefix('torch.')}: what computes in float32 casts its parameters too, as "
        'functional.layer_norm(x.float(), shape, self.weight.float(), self.bias.float()), or choose strategy="fsdp" or "ddp" with AmpOptimWrapper'
    )


# What only a first batch shows: whether a strategy trains the model as one device does.


@singledispatch
def check_window(strategy: Strategy, window: Sequence[Any], step: TrainStep) -> None:
    """Raise StrategyError for a model that this strategy would train wrongly; once, for the window of the first update.

    Called before the hooks of that update. Nothing of it remains: no gradient, no state, no random number.
    """


@singledispatch
def cannot_repeat(strategy: Strategy) -> str | None:
    """Return why forward and backward of a window cannot be run again before its update, after gradients were dropped; None: they can."""
    return None


@singledispatch
def cannot_switch(strategy: Strategy) -> str | None:
    """Return why an Engine cannot take a training out, and put another one in, see ``Engine.switch``; None: it can."""
    if own := next((key for key in strategy.state() if key.startswith(OWN)), None):
        return f"{type(strategy).__name__} keeps {own.removeprefix(OWN)}, which has no first value to begin another training with"
    if keeper := next(iter(keepers(strategy.module)), None):
        return f"{type(keeper[1]).__name__} (model.{keeper[0]}) has extra state (get_extra_state), of which there would be one for all trainings"
    for wrapper in strategy.optim.wrappers.values() if strategy.optim is not None else ():
        if wrapper.adapter.owns_gradients:
            kind = type(wrapper.optimizer).__name__
            return f"{kind} keeps parameters and gradients in memory of its own; choose one of torch's optimizers"
    return None


# What was chosen because the device is an accelerator, where the user has chosen nothing.


@singledispatch
def choices(strategy: Strategy) -> list[str]:
    """Return what was chosen for the accelerator, each with the setting that chooses otherwise; after ``setup``."""
    found = []
    for wrapper in strategy.optim.wrappers.values() if strategy.optim is not None else ():
        if isinstance(wrapper, AmpOptimWrapper) and wrapper.chose_dtype:
            dtype = str(wrapper.cast_dtype).removeprefix("torch.")
            found.append(f'{dtype} ({wrapper.where}.dtype="{"bfloat16" if dtype == "float16" else "float16"}")')
        if wrapper.chose_fused:
            found.append(
                f"one kernel per {type(wrapper.optimizer).__name__} update ({wrapper.where}.optimizer.fused=False)"
            )
    return found


# What a plan has to know of a strategy, where all processes of a job are pretended.


@singledispatch
def rehearsed(strategy: Strategy) -> Strategy | None:
    """Return the strategy that a plan executes in place of this one; None if a plan is not possible.

    By default itself, or None if ``needs.processes`` says that its ranks must be real processes. Such a strategy can
    register one with the same options that makes the tensors and calls the collectives of a rank by formula, as plain
    operations of torch, and that has a method ``tell(listen)``: ``listen(kind, tensors)`` is to be called with what the memory of tensors is
    for. Plans say that it is so.
    """
    return None if strategy.needs.processes else strategy


@singledispatch
def pipeline_of(strategy: Strategy) -> tuple[str, int] | None:
    """Return the schedule of a pipeline, by its name, and the number of stages of each process; None without a pipeline."""
    return None
