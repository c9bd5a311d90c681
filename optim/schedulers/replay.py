"""Replay: move schedulers that were just built to a later position, and their values with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .base import ParamScheduler
from .schedules import OneCycleParamScheduler
from .settings import TYPE
from .torch_adapter import TorchScheduler

_OWN_INITIAL = frozenset({"OneCycleLR", "OneCycleParamScheduler", "CyclicLR"})
_OF_TORCH = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


class GroupValues:
    """The numbers in an optimizer's groups; schedulers can act on it in place of the optimizer.

    Args:
        groups: an optimizer's parameter groups, which are not changed.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": [], **{key: _number(value) for key, value in group.items() if key != "params"}}
            for group in groups
        ]

    def start_from(self, name: str, initial: Sequence[float]) -> None:
        """Scale the values ``name`` of all groups, which are those at step 0, to other initial values."""
        key = f"initial_{name}"
        for group, value in zip(self.param_groups, initial, strict=True):
            before = group.get(key)
            if before and before != value:
                set_value(group, name, value_of(group, name) * value / before)
            group[key] = value


def sets_initial_values(settings: Mapping[str, Any]) -> bool:
    """Whether schedulers with these settings replace the initial values of the optimizer, as a cycle's peak does."""
    return str(settings.get(TYPE)).rpartition(".")[2] in _OWN_INITIAL


def value_of(group: Mapping[str, Any], name: str) -> float:
    """Return a value of a group; "momentum" stands for the first of ``betas`` where a group has no momentum."""
    return float(group["betas"][0] if _is_beta(group, name) else group[name])


def set_value(group: dict[str, Any], name: str, value: float) -> None:
    """Set a value of a group; a tensor is filled."""
    if _is_beta(group, name):
        group["betas"] = (value, *group["betas"][1:])
    elif isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def replay(
    schedulers: Sequence[ParamScheduler], values: GroupValues, *, iters: int, epochs: int, epoch_length: int | None
) -> None:
    """Make the steps of ``iters`` iterations and ``epochs`` epochs with schedulers that are at step 0.

    The values change in ``values`` and not in the optimizer. A million iterations take a few seconds.

    Args:
        schedulers: of one optimizer, in their order, none of which needs metrics.
        values: the values of the optimizer's groups at step 0; they are replaced by those at the position.
        iters, epochs: the steps to make; an epoch's comes after ``epoch_length`` iterations.
        epoch_length: iterations per epoch; None: epochs are alike.
    """
    own = [(scheduler, scheduler.optimizer, scheduler.verbose) for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.optimizer, scheduler.verbose = values, False
        scheduler.expect_step()
        scheduler.base_values = [float(group[f"initial_{scheduler.param_name}"]) for group in values.param_groups]
        if isinstance(scheduler, TorchScheduler):
            scheduler.start_from(scheduler.base_values)
    by_iter = [scheduler for scheduler in schedulers if not scheduler.by_epoch]
    by_epoch = [scheduler for scheduler in schedulers if scheduler.by_epoch]
    try:
        if by_iter and by_epoch:
            length = epoch_length or max(iters // epochs if epochs else iters, 1)
            done = 0
            for epoch in range(epochs):
                until = min((epoch + 1) * length, iters)
                _advance(by_iter, until - done, values)
                _advance(by_epoch, 1, values)
                done = until
            _advance(by_iter, iters - done, values)
        else:
            _advance(by_iter, iters, values)
            _advance(by_epoch, epochs, values)
    finally:
        for scheduler, optimizer, verbose in own:
            scheduler.note_values()
            scheduler.optimizer, scheduler.verbose = optimizer, verbose


def adopt(schedulers: Sequence[ParamScheduler], values: GroupValues, groups: Sequence[dict[str, Any]]) -> None:
    """Write what schedulers have set in ``values`` to the optimizer's groups."""
    names = {scheduler.param_name for scheduler in schedulers}
    for group, new in zip(groups, values.param_groups, strict=True):
        for name in names:
            set_value(group, name, value_of(new, name))
            group[f"initial_{name}"] = new[f"initial_{name}"]
        if any(isinstance(scheduler, TorchScheduler) for scheduler in schedulers):
            group.update({key: new[key] for key in _OF_TORCH if key in new})
            if "base_momentum" in new:
                set_value(group, "momentum", value_of(new, "momentum"))


def _advance(schedulers: Sequence[ParamScheduler], steps: int, values: GroupValues) -> None:
    """Make ``steps`` steps, with all of the schedulers at each; windows are entered and left between two parts."""
    while steps > 0 and schedulers:
        ahead = [s._global_step + 1 for s in schedulers]
        edges = [edge - at for s, at in zip(schedulers, ahead, strict=True) for edge in (s.begin, s.end) if edge > at]
        part = min([steps, *edges])
        active = [s for s, at in zip(schedulers, ahead, strict=True) if s.begin <= at < s.end]
        for scheduler in schedulers:
            if scheduler not in active:
                scheduler._global_step += part
        if active and all(map(_is_ours, active)):
            _compute(active, part, values)
        elif active:
            _step(active, part)
        steps -= part


def _compute(active: Sequence[ParamScheduler], steps: int, values: GroupValues) -> None:
    """Compute each distinct value once, because groups are many and their values few."""
    for name in dict.fromkeys(s.param_name for s in active):
        acting = [s for s in active if s.param_name == name]
        own = [s.base_values for s in acting]
        rows = list(zip(*([value_of(g, name) for g in values.param_groups], *own), strict=True))
        distinct = list(dict.fromkeys(rows))
        # numpy computes several in little more time than one, and rounds each as Python does.
        value, *bases = (
            distinct[0] if len(distinct) == 1 else [np.array(column) for column in zip(*distinct, strict=True)]
        )
        if isinstance(acting[-1], OneCycleParamScheduler):  # its value does not depend on the one before
            for scheduler in acting:
                scheduler.last_step += steps - 1
            value = _one_step(acting, value, bases)
        else:
            for _ in range(steps):
                value = _one_step(acting, value, bases)
        results = dict(zip(distinct, [value] if len(distinct) == 1 else value.tolist(), strict=True))
        for group, row in zip(values.param_groups, rows, strict=True):
            set_value(group, name, results[row])
        for scheduler in acting:
            scheduler._global_step += steps


def _one_step(acting: Sequence[ParamScheduler], value: Any, bases: Sequence[Any]) -> Any:
    for scheduler, base in zip(acting, bases, strict=True):
        scheduler.last_step += 1
        value = scheduler._next(value, base)
    return value


def _step(active: Sequence[ParamScheduler], steps: int) -> None:
    first = active[0]
    if len(active) == 1 and isinstance(first, TorchScheduler) and steps > 2:
        first.step()
        steps -= 1 + first.skip(steps - 2)
    for _ in range(steps):
        for scheduler in active:
            scheduler.step()


def _is_ours(scheduler: ParamScheduler) -> bool:
    """Whether a step is no more than a call of `_next`, which reads nothing but its arguments and ``last_step``."""
    kind = type(scheduler)
    package = ParamScheduler.__module__.rpartition(".")[0]
    return kind._next.__module__.startswith(package) and kind._get_value is ParamScheduler._get_value


def _is_beta(group: Mapping[str, Any], name: str) -> bool:
    return name == "momentum" and "momentum" not in group and "betas" in group


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
