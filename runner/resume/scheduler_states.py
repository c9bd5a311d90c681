"""Restore parameter schedulers, or start them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...core.errors import CheckpointError, counted

if TYPE_CHECKING:
    from ..run import Run


def load_schedulers(runner: Run, saved: Mapping[str, Sequence[Any]], set_values: bool) -> None:
    """Restore every scheduler; the configuration must have the schedulers of the checkpoint, in the same order.

    Args:
        runner: the run.
        saved: the states, by the optimizer's name.
        set_values: also set the saved learning rates and momenta, for an optimizer whose own state is left out.

    Raises:
        CheckpointError: the number of schedulers differs, or a state does not fit.
    """
    for name, group in runner.schedulers.items():
        states = saved.get(name, [])
        if len(states) != len(group):
            kinds = ", ".join(type(scheduler).__name__ for scheduler in group)
            optimizer = f" for the optimizer {name}" if name else ""
            raise CheckpointError(
                f"has {counted(len(states), 'parameter scheduler')}{optimizer}, the configuration has {len(group)}"
                f"{f' ({kinds})' if kinds else ''}; resume all of them or none"
            )
        for scheduler, state in zip(group, states, strict=True):
            scheduler.load_state_dict(state)
            if set_values:
                scheduler.set_values(state["values"], state["base_values"])


@contextmanager
def schedules_anew(runner: Run) -> Iterator[None]:
    """Keep the values set by schedulers while the optimizer's state is loaded, because schedules start again."""
    own = [(scheduler, scheduler.get_values()) for group in runner.schedulers.values() for scheduler in group]
    yield
    for scheduler, values in own:
        scheduler.set_values(values, scheduler.base_values)
