"""Read one piece of a checkpoint after the other; an error says how to resume without the piece."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import CheckpointError, ConfigError, FlexTrainError

if TYPE_CHECKING:
    from ..run import Run


_WITHOUT = {
    "optimizer": "the optimizer's state then starts afresh",
    "param_scheduler": "schedules then start afresh",
    "random": "random numbers then come from the run's own seed",
    "hooks": "hooks then start afresh",
    "logs": "smoothed figures then start afresh",
    "data": "the epoch under way then begins anew",
}


def advice(*names: str | None) -> str:
    """Return how to resume without some pieces; None stands for a piece that every run needs."""
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return "load_from takes its weights alone"
    options, it = ", ".join(f"{name}=False" for name in known), "it" if len(known) == 1 else "them"
    return f"resume=dict({options}) leaves {it} out, {', '.join(_WITHOUT[name] for name in known)}"


@contextmanager
def piece(path: Path, key: str, name: str | None = None) -> Iterator[None]:
    """Name the piece of a checkpoint in every error of the block, and the option that leaves the piece out.

    Raises:
        CheckpointError: on one line, in place of any error that a damaged piece causes.
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {key} is damaged, {error}; {advice(name)}") from error
    except FlexTrainError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise CheckpointError(f"{path}: {reason}; {advice(name)}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: {key} is damaged, {type(error).__name__}: {reason}; {advice(name)}") from error


# The loop and the data


def check_hooks(
    runner: Run, saved: Mapping[str, Sequence[str]], present: Container[str], own: Mapping[str, Any]
) -> None:
    """Check that the saved state of all hooks is complete, and log which hooks are new and which are gone.

    Args:
        runner: the run with the hooks.
        saved: keys of the saved state, by the hook's name.
        present: the keys of the checkpoint.
        own: current states, by the hook's name.

    Raises:
        CheckpointError: a key is missing.
    """
    for name, keys in saved.items():
        if lost := next((key for key in keys if key not in present), None):
            raise CheckpointError(f"has no {lost}")
        if name not in own:
            runner.logger.info(f"The state of {name} is left out: the run has no such hook")
    for name, state in own.items():
        if state and name not in saved:
            runner.logger.info(f"{name} starts afresh: the checkpoint has no state of it")
