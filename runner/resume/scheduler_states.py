"""Restore parameter schedulers, start them again, or move them to the same position in schedules that have changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...core.errors import CheckpointError, counted
from ...optim.schedulers.replay import GroupValues
from ...optim.schedulers.settings import settings
from .changed_schedules import Position, follow

if TYPE_CHECKING:
    from ..run import Run

SETTINGS = "schedules"
"""Key of a checkpoint: the settings of the parameter schedulers, by the optimizer's name."""


def scheduler_states(runner: Run) -> dict[str, Any]:
    """Return the checkpoint's entries of all schedulers: their states and their settings."""
    return {
        "scheduler": {name: [s.state_dict() for s in group] for name, group in runner.schedulers.items()},
        SETTINGS: {name: [settings(s) for s in group] for name, group in runner.schedulers.items()},
    }


def first_values(runner: Run) -> dict[str, GroupValues]:
    """Return the values in the groups of each optimizer; called before its state is loaded, when schedulers are at step 0."""
    optim = runner.optim_wrapper
    return {} if optim is None else {name: GroupValues(each.param_groups) for name, each in optim.wrappers.items()}


def load_schedulers(
    runner: Run, values: Mapping[str, Any], first: Mapping[str, GroupValues], *, resumes_optimizer: bool
) -> None:
    """Restore every scheduler. If the settings are others than in the checkpoint, go on at its position in the new schedules.

    Args:
        runner: the run; the state of its optimizer is loaded, or left out.
        values: the checkpoint's plain values.
        first: what `first_values` returned.
        resumes_optimizer: False: also set the saved learning rates and momenta, because the optimizer's state is left out.

    Raises:
        CheckpointError: the number of schedulers differs and the checkpoint is older than their settings, the changed
            schedules depend on metrics of the past, or a state does not fit.
    """
    saved, then = values.get("scheduler", {}), values.get(SETTINGS)
    for name, group in runner.schedulers.items():
        states = saved.get(name, [])
        if then is not None:
            position = Position(states, then.get(name, []), values["loop"], _epoch_lengths(runner, values))
            if follow(runner, name, first[name], position, resumes_optimizer):
                continue
        elif len(states) != len(group):
            kinds = ", ".join(type(scheduler).__name__ for scheduler in group)
            optimizer = f" for the optimizer {name}" if name else ""
            raise CheckpointError(
                f"has {counted(len(states), 'parameter scheduler')}{optimizer}, the configuration has {len(group)}"
                f"{f' ({kinds})' if kinds else ''}, and was written by an older version, without their settings; resume all "
                "of them or none"
            )
        for scheduler, state in zip(group, states, strict=True):
            scheduler.load_state_dict(state)
            if not resumes_optimizer:
                scheduler.set_values(state["values"], state["base_values"])
    if then is None and any(runner.schedulers.values()):
        runner.logger.info(
            "The checkpoint was written by an older version, without the settings of param_scheduler: schedules go on from its "
            "values; if their settings have changed, these are not the values of the new ones"
        )


def _epoch_lengths(runner: Run, values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    data = values.get("data")
    then = data.get("epoch_length") if isinstance(data, Mapping) else None
    loop = runner.train_loop
    return (
        then if loop.by_epoch else None,
        loop.data.epoch_length,
    )  # the position of other loops is a number of iterations


@contextmanager
def schedules_anew(runner: Run) -> Iterator[None]:
    """Keep the values set by schedulers while the optimizer's state is loaded, because schedules start again."""
    own = [(scheduler, scheduler.get_values()) for group in runner.schedulers.values() for scheduler in group]
    yield
    for scheduler, values in own:
        scheduler.set_values(values, scheduler.base_values)
