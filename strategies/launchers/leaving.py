"""A process that fails before the process group exists says so to the others, where the launcher would let them wait."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.comm.collectives import is_initialized
from ...core.comm.rendezvous import say_why_this_process_leaves
from ...core.errors import FlexTrainError
from .detect import detect_launch

_PATIENCE_S = 10.0


@contextmanager
def saying_why_this_process_leaves(launcher: str | None = None) -> Iterator[None]:
    """A context before the process group exists; its FlexTrainError also ends the other processes, with its text.

    torchrun and mpirun end all processes when one fails. srun without --kill-on-bad-exit and scripts that start
    processes themselves do not, and the others would wait for ``timeout_s``. The error is raised after 10 s at the
    latest, if the others do not come to hear it.

    Args:
        launcher: as for ``detect_launch``.
    """
    try:
        yield
    except FlexTrainError as error:
        _say(launcher, f"{type(error).__name__}: {error}")
        raise


def say_that_the_end_was_asked(launcher: str | None, what: str) -> None:
    """Make the other processes raise EndAskedError if the process group does not exist yet; its text is ``what``, rank and host.

    Under torchrun and mpirun nothing is said, they end all processes. Returns after 10 s at the latest.

    Args:
        launcher: as for ``detect_launch``.
    """
    _say(launcher, what, was_asked=True)


def _say(launcher: str | None, why: str, was_asked: bool = False) -> None:
    try:
        launch = detect_launch(launcher)
    except FlexTrainError:  # then nobody knows where the others are
        return
    if launch.world_size > 1 and not launch.ends_together and not is_initialized():
        say_why_this_process_leaves(
            launch.init_method,
            rank=launch.rank,
            world_size=launch.world_size,
            why=f"{why}, which came to rank {launch.rank} on {platform.node()}" if was_asked else why,
            timeout_s=_PATIENCE_S,
            job=launch.job,
            was_asked=was_asked,
        )
