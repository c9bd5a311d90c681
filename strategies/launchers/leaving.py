"""A process that fails before the process group exists says so to the others, where the launcher would let them wait."""

from __future__ import annotations

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
        _say(launcher, error)
        raise


def _say(launcher: str | None, error: FlexTrainError) -> None:
    try:
        launch = detect_launch(launcher)
    except FlexTrainError:  # then nobody knows where the others are
        return
    if launch.world_size > 1 and not launch.ends_together and not is_initialized():
        say_why_this_process_leaves(
            launch.init_method,
            rank=launch.rank,
            world_size=launch.world_size,
            why=f"{type(error).__name__}: {error}",
            timeout_s=_PATIENCE_S,
            job=launch.job,
        )
