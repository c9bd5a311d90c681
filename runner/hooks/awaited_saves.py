"""AwaitedSaves: saves checkpoints, and does what depends on them when they are complete or have failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import CheckpointError

if TYPE_CHECKING:
    from ..run import Run


@dataclass(frozen=True)
class _Awaited:
    path: Path
    if_complete: Callable[[], None]
    if_failed: Callable[[], None]


class AwaitedSaves:
    """The saves of a hook, at most one of which is in progress in the background.

    Args:
        async_save: write in the background.
        on_error: "raise" or "continue", see CheckpointHook.
    """

    def __init__(self, async_save: bool, on_error: str) -> None:
        self._async_save, self._on_error = async_save, on_error
        self._awaited: list[_Awaited] = []

    def save(
        self,
        runner: Run,
        path: Path,
        if_complete: Callable[[], None],
        if_failed: Callable[[], None],
        **options: Any,
    ) -> None:
        """Save the checkpoint ``path``; a collective.

        Args:
            runner: the run.
            path: where to.
            if_complete: called when the checkpoint is complete, now or in a later call.
            if_failed: called if it could not be saved.
            options: those of ``runner.save_checkpoint``.
        """
        self.settle(runner)
        awaited = _Awaited(path, if_complete, if_failed)
        self._awaited.append(awaited)
        if self._on_error != "raise":  # a runner's own save_checkpoint need not know it
            options["on_error"] = self._on_error
        try:
            runner.save_checkpoint(path.parent, path.name, async_save=self._async_save, **options)
        except BaseException:  # also Ctrl-C, after which training may go on
            self._awaited.remove(awaited)
            if_failed()
            raise
        if not self._async_save:
            self._conclude(runner)

    def settle(self, runner: Run, wait: bool = True) -> None:
        """Do what waits for the save in progress, if that is over.

        Raises:
            CheckpointError: the save failed, and ``on_error`` is "raise".
        """
        try:
            is_over = runner.finish_saving(wait)
        except CheckpointError:
            self._conclude(runner)
            raise
        if is_over:
            self._conclude(runner)

    def _conclude(self, runner: Run) -> None:
        awaited, self._awaited = self._awaited, []
        for one in awaited:
            (one.if_failed if runner.save_failed(one.path) else one.if_complete)()
