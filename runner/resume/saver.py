"""Saver: saves the checkpoints of a run, one at a time, and knows which of them are marked."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import PendingSave, Staging, what_is_not_finite
from ...core.errors import CheckpointError, StorageError
from ...core.events import append_event
from . import run_state
from .failed_saves import FailedSaves

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
        # The last save from which a run can go on, and where in training it was; first in progress, then complete.
        self._begun: tuple[Path, Any] | None = None
        self._resumable: tuple[Path, Any] | None = None
        self._at = 0  # updates done at the last save that has begun
        self.seconds = 0.0
        """Seconds that training has waited for saves."""
        self._goes_on = False  # after a failure of the save in progress
        self.failed = FailedSaves()

    def save(self, run: Run, path: Path, *, in_background: bool, on_error: str = "raise", **options: Any) -> None:
        """Write a checkpoint after the previous save is complete; ``options`` are those of ``run_state.save``.

        Raises:
            CheckpointError: this save failed, or the previous one failed in the background. A StorageError only if
                ``on_error`` of that save is "raise".
        """
        began = time.monotonic()
        try:
            self._save(run, path, in_background=in_background, on_error=on_error, **options)
        finally:
            self.seconds += time.monotonic() - began

    def _save(self, run: Run, path: Path, *, in_background: bool, on_error: str, **options: Any) -> None:
        self._finish(run)
        self._at = run.train_loop.state_dict()["iter"] or 0
        self._goes_on = on_error == "continue"
        is_whole = options.get("save_optimizer", True) and options.get("save_param_scheduler", True)
        is_whole = is_whole and path.parent != run.fast_checkpoint_dir  # the run may come back on another machine
        self._begun = (path, run.train_loop.state_dict()) if is_whole else None
        options["logs_failure"] = not self._goes_on  # the warning says it
        try:
            self._pending = run_state.save(run, path, in_background=in_background, staging=self._staging, **options)
        except CheckpointError as error:
            self._note_failed(run, path, error)
        else:
            if not in_background:
                self._note_saved(run, path)

    def finish(self, run: Run, wait: bool = True) -> bool:
        """Return True if no save is in progress; with ``wait``, wait for it first.

        Raises:
            CheckpointError: the save in progress failed, and training is not to go on without it.
        """
        if self._pending is None:
            return True
        began = time.monotonic()
        try:
            return self._finish(run, wait)
        finally:
            self.seconds += time.monotonic() - began

    def _finish(self, run: Run, wait: bool = True) -> bool:
        pending = self._pending
        if pending is None:
            return True
        if not wait and not pending.is_done():
            return False
        pending.join()  # if this is interrupted, the save stays in progress
        self._pending = None
        try:
            pending.wait()
        except CheckpointError as error:
            self._note_failed(run, pending.path, error)
            return True
        self._note_saved(run, pending.path)
        run.logger.info(f"Checkpoint {pending.path.name} is complete, written in {pending.seconds:.1f} s")
        return True

    def was_marked(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path`` with NaN or infinity where values must be finite."""
        return str(path) in self._marked

    def has_saved(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path``."""
        return str(path) in self._saved

    def saved_here(self, run: Run) -> Path | None:
        """The complete checkpoint of the present position in training, if this run saved one to go on from."""
        if self._resumable is None or self._resumable[1] != run.train_loop.state_dict():
            return None
        return self._resumable[0]

    def _note_failed(self, run: Run, path: Path, error: CheckpointError) -> None:
        """Raise the error of a save, unless training goes on without the checkpoint."""
        if path.parent == run.fast_checkpoint_dir and isinstance(error, StorageError):
            error = StorageError(f"Fast tier: {error}")
        if not self._goes_on or not isinstance(error, StorageError):
            self.failed.add(path)
            raise error
        self.failed.go_on(run, path, error)

    def _note_saved(self, run: Run, path: Path) -> None:
        """Record whether the checkpoint that is now complete is marked; every process knows the result."""
        self._saved.add(str(path))
        self._resumable = self._begun or self._resumable
        if run.rank == 0 and path.parent != run.fast_checkpoint_dir:
            append_event(run.work_dir, "saved", rank=0, iter=self._at, path=str(path))
        self.failed.saved(path)
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
