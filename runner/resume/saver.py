"""Saver: saves the checkpoints of a run, one at a time, and knows which of them are marked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import PendingSave, Staging, what_is_not_finite
from . import run_state

if TYPE_CHECKING:
    from ..run import Run


class Saver:
    """Saves the checkpoints of a run; at most one save is in progress in the background."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._staging = Staging()
        self._marked: set[str] = set()  # paths of checkpoints with NaN or infinity
        self._saved: set[str] = set()  # absolute paths or URLs
        self._last_is_good = True

    def save(self, run: Run, path: Path, *, in_background: bool, **options: Any) -> None:
        """Write a checkpoint after the previous save is complete; ``options`` are those of ``run_state.save``.

        Raises:
            CheckpointError: this save failed, or the previous one failed in the background.
        """
        self.finish(run)
        self._pending = run_state.save(run, path, in_background=in_background, staging=self._staging, **options)
        if not in_background:
            self._note_saved(run, path)

    def finish(self, run: Run, wait: bool = True) -> bool:
        """Return True if no save is in progress; with ``wait``, wait for it first.

        Raises:
            CheckpointError: the save in progress failed.
        """
        pending = self._pending
        if pending is None:
            return True
        if not wait and not pending.is_done():
            return False
        pending.join()  # if this is interrupted, the save stays in progress
        self._pending = None
        pending.wait()
        self._note_saved(run, pending.path)
        run.logger.info(f"Checkpoint {pending.path.name} is complete, written in {pending.seconds:.1f} s")
        return True

    def was_marked(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path`` with NaN or infinity where values must be finite."""
        return str(path) in self._marked

    def has_saved(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path``."""
        return str(path) in self._saved

    def _note_saved(self, run: Run, path: Path) -> None:
        """Record whether the checkpoint that is now complete is marked; every process knows the result."""
        self._saved.add(str(path))
        keys, was_good = self._staging.nonfinite, self._last_is_good
        self._last_is_good = not keys
        if not keys:
            self._marked.discard(str(path))
            return
        self._marked.add(str(path))
        run.logger.log(
            logging.WARNING if was_good else logging.INFO,  # one warning for several marked ones in a row
            f"Checkpoint {path.name} holds NaN or infinity in {what_is_not_finite(keys)}: it is marked, resume=True "
            "skips it, and no older one is deleted for it",
        )
