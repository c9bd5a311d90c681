"""Compare schedules with the length of a run: those that never finish in it, or that go on after they have finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import INF, ParamScheduler
from .plateau import ReduceOnPlateauParamScheduler
from .schedules import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    OneCycleParamScheduler,
    PolyParamScheduler,
    StepParamScheduler,
)
from .torch_adapter import TorchScheduler


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
