"""Replay: move schedulers that were just built to a later position, and their values with them."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor

from .base import INF, ParamScheduler
from .schedules import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    OneCycleParamScheduler,
    PolyParamScheduler,
    ReduceOnPlateauParamScheduler,
    StepParamScheduler,
)
from .torch_adapter import TorchScheduler

# The settings of schedulers as plain values, so that a checkpoint can be compared with a configuration.


TYPE = "type"
"""Key of the settings: the name of the class."""
FUNCTION = "function "
"""What the text begins with that stands for a function, such as LambdaLR's."""

_NO_SETTINGS = frozenset({"self", "optimizer", "last_step", "verbose"})


def settings(scheduler: ParamScheduler) -> dict[str, Any]:
    """Return the class and the arguments of a scheduler, with defaults, as values that JSON keeps unchanged.

    A function is replaced by its name and a digest of its code, which may also differ between versions of Python.
    """
    if isinstance(scheduler, TorchScheduler):
        options = {name: getattr(scheduler, name) for name in ("begin", "end", "by_epoch", "param_name")}
        known = inspect.signature(scheduler.scheduler).parameters
        defaults = {name: p.default for name, p in known.items() if p.default is not p.empty and name != "last_epoch"}
        options |= {**defaults, **scheduler.options}
        name = f"torch.optim.lr_scheduler.{scheduler.scheduler.__name__}"
    else:
        window = ("param_name", "begin", "end", "by_epoch")
        names = dict.fromkeys((*inspect.signature(type(scheduler)).parameters, *window))
        options = {name: getattr(scheduler, name) for name in names if hasattr(scheduler, name)}
        name = type(scheduler).__name__
    return {TYPE: name, **{key: _as_json(value) for key, value in options.items() if key not in _NO_SETTINGS}}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, each with both values; only the class if that differs."""
    if then.get(TYPE) != now[TYPE]:
        return {TYPE: (then.get(TYPE), now[TYPE])}
    keys = [*now, *(key for key in then if key not in now)]
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def described(all_settings: Sequence[Mapping[str, Any]]) -> str:
    """Return schedulers as a reader knows them, such as ``LinearLR(end=2), CosineAnnealingLR(begin=2)``."""
    return ", ".join(f"{_short(s.get(TYPE))}({', '.join(_arguments(s))})" for s in all_settings) or "none"


def shown(value: Any) -> str:
    """Return a setting for a message."""
    if isinstance(value, str) and value.startswith(FUNCTION):
        return value.rpartition(" ")[0].removeprefix(FUNCTION)
    return "without end" if value == INF else repr(value)


def _arguments(one: Mapping[str, Any]) -> Iterator[str]:
    for key, value in one.items():
        is_usual = (
            value is None or (key, value) in (("begin", 0), ("end", INF)) or key in (TYPE, "param_name", "by_epoch")
        )
        if not is_usual:
            yield f"{key}={shown(value)}"


def _short(name: Any) -> str:
    return str(name).rpartition(".")[2]


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if callable(value):
        return _function(value)
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        if hasattr(value, "__float__"):  # of numpy, or a tensor
            return float(value)
        same = False
    return value if same else f"{FUNCTION}{type(value).__qualname__} -"


def _function(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    what = [_code(code) if code else "", str(getattr(function, "__defaults__", None))]
    what += [repr(c) for cell in cells if isinstance(c := _content(cell), (int, float, str, list, tuple, dict))]
    if code is None:
        what.append(repr(sorted((k, v) for k, v in vars(function).items() if isinstance(v, (int, float, str)))))
    return f"{FUNCTION}{name} {hashlib.sha256(' '.join(what).encode()).hexdigest()[:16]}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _code(code: CodeType) -> str:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names}"


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
    own_initial = any(sets_initial_values(settings(scheduler)) for scheduler in schedulers)
    for scheduler in schedulers:
        scheduler.optimizer, scheduler.verbose = values, False
        scheduler.expect_step()
        if isinstance(scheduler, TorchScheduler) or not own_initial:  # otherwise each has begun with another value
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


# Compare schedules with the length of a run: those that never finish in it, or that go on after they have finished.


def unlike_the_run(scheduler: ParamScheduler, steps: int) -> Iterator[str]:
    """Yield a sentence, ``key: value and what it does``, for each argument that does not fit a run of ``steps`` steps.

    The scheduler works as it is configured; the configuration may have been written for a longer run.
    """
    unit = "epochs" if scheduler.by_epoch else "iterations"
    name, run = scheduler.param_name, f"the {steps} {unit} of training"
    if scheduler.begin >= steps:
        yield f"begin: {scheduler.begin} is not within {run}, the schedule never acts; give less, or train longer"
        return
    # One step more is a last value that is reached after the last update.
    if steps + 1 < scheduler.end < INF and isinstance(scheduler, (LinearParamScheduler, PolyParamScheduler)):
        last = f"end_factor={scheduler.end_factor:g}" if isinstance(scheduler, LinearParamScheduler) else "eta_min"
        yield (
            f"end: {scheduler.end} is beyond {run}, {name} never reaches {last}; give at most {steps}, or train longer"
        )
    minimum = getattr(scheduler, "eta_min", None)
    if minimum and minimum >= max(scheduler.base_values):
        yield f"eta_min: {minimum:g} is not below {name}={max(scheduler.base_values):g}, {name} rises to it; give less"
    ratio = getattr(scheduler, "eta_min_ratio", None)
    if ratio is not None and ratio >= 1:
        yield f"eta_min_ratio: {ratio:g} is not below 1, {name} rises to {ratio:g} times its value; give less"
    if name == "momentum" and not any(scheduler.base_values):
        yield "type: changes nothing, because the optimizer's momentum is 0; give the optimizer a momentum"
    if scheduler.end - scheduler.begin == 1 and isinstance(scheduler, (PolyParamScheduler, ConstantParamScheduler)):
        yield f"end: {scheduler.end} makes a window of one step, in which the schedule changes nothing; give more"
    # The steps of training inside the window; periods and milestones count from its begin.
    inside = min(scheduler.end, steps) - scheduler.begin
    yield from _of_periods(scheduler, inside, f"{inside} {unit} that training has for it", unit)


def before_the_warm_up_ends(schedulers: Sequence[ParamScheduler]) -> Iterator[tuple[int, str]]:
    """Yield the index of each schedule that begins inside of a warm-up, with a sentence as `unlike_the_run` has them.

    Schedules that begin together are meant to act together, and so are those in steps of different units.
    """
    for i, scheduler in enumerate(schedulers):
        if not isinstance(scheduler, _FROM_ITS_VALUE):
            continue
        for j, first in enumerate(schedulers[:i]):
            alike = (first.param_name, first.by_epoch) == (scheduler.param_name, scheduler.by_epoch)
            rises = isinstance(first, LinearParamScheduler) and first.start_factor < first.end_factor
            if alike and rises and first.begin < scheduler.begin < first.end - 1 < INF - 1:
                yield (
                    i,
                    f"begin: {scheduler.begin} is before the warm-up in [{j}] has ended, both act from there to {first.end}; give "
                    f"{first.end}",
                )


_FROM_ITS_VALUE = (CosineAnnealingParamScheduler, PolyParamScheduler)


def _of_periods(scheduler: ParamScheduler, inside: int, run: str, unit: str) -> Iterator[str]:
    name, advice = scheduler.param_name, f"give {inside}, or leave it out"
    if isinstance(scheduler, CosineAnnealingParamScheduler):
        period = scheduler.T_max or inside
        if period > inside:
            yield f"T_max: {period} is more than the {run}, {name} never reaches its minimum; {advice}"
        elif period < inside - 1:  # the minimum at the last step is a period of one step less
            yield f"T_max: {period} is less than the {run}, {name} rises again after it; {advice}"
    elif isinstance(scheduler, CosineRestartParamScheduler):
        total = sum(scheduler.periods)
        if total != inside:
            what = "the last period does not end" if total > inside else f"{name} stays the same after the last one"
            yield f"periods: {scheduler.periods} have {total} {unit} instead of the {run}, {what}"
    elif isinstance(scheduler, OneCycleParamScheduler):
        total = scheduler.total_steps or inside
        if total > inside:
            yield f"total_steps: {total} is more than the {run}, the cycle does not end; {advice}"
        elif total < inside:
            yield f"total_steps: {total} is less than the {run}, {name} stays at its end value; {advice}"
    elif isinstance(scheduler, MultiStepParamScheduler):
        if beyond := [milestone for milestone in scheduler.milestones if milestone >= inside]:
            yield f"milestones: {beyond} are not within the {run}, {name} does not change there"
    elif isinstance(scheduler, StepParamScheduler) and scheduler.step_size >= inside:
        yield f"step_size: {scheduler.step_size} is not within the {run}, {name} never changes; give less"
    elif isinstance(scheduler, TorchScheduler):
        for key in ("step_size", "T_max", "total_iters", "total_steps"):
            value = scheduler.options.get(key)
            if isinstance(value, int) and value > inside:
                yield f"{key}: {value} is not within the {run}, the schedule does not end; {advice}"
    elif isinstance(scheduler, ReduceOnPlateauParamScheduler) and scheduler.patience >= inside:
        yield f"patience: {scheduler.patience} is not less than the {run}, {name} is never reduced; give less"
