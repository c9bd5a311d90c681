"""Saver: the checkpoints that a run writes, one after the other, and what became of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import PendingSave, Staging, what_is_not_finite
from . import checkpoint

if TYPE_CHECKING:
    from ..run import Run


class Saver:
    """Saves the checkpoints of a run; at most one is being written in the background."""

    def __init__(self) -> None:
        self._pending: PendingSave | None = None
        self._staging = Staging()
        self._marked: set[str] = set()  # paths of checkpoints with NaN or infinity
        self._last_is_good = True

    def save(self, run: Run, path: Path, *, in_background: bool, **options: Any) -> None:
        """Write a checkpoint when the one before is complete; ``options`` are those of ``checkpoint.save``.

        Raises:
            CheckpointError: it could not be saved, or the one before could not, in the background.
        """
        self.finish(run)
        self._pending = checkpoint.save(run, path, in_background=in_background, staging=self._staging, **options)
        if not in_background:
            self._note_saved(run, path)

    def finish(self, run: Run, wait: bool = True) -> bool:
        """Whether nothing is being written any more; with ``wait`` that is waited for.

        Raises:
            CheckpointError: what was being written could not be saved.
        """
        pending = self._pending
        if pending is None:
            return True
        if not wait and not pending.is_done():
            return False
        pending.join()  # if that is interrupted, it is still under way
        self._pending = None
        pending.wait()
        self._note_saved(run, pending.path)
        run.logger.info(f"Checkpoint {pending.path.name} is complete, written in {pending.seconds:.1f} s")
        return True

    def is_marked(self, path: str | Path) -> bool:
        """Whether the checkpoint that was saved to ``path`` holds NaN or infinity where it should not."""
        return str(path) in self._marked

    def _note_saved(self, run: Run, path: Path) -> None:
        """Remember whether the checkpoint that is complete now is marked; known on every process."""
        keys, was_good = self._staging.nonfinite, self._last_is_good
        self._last_is_good = not keys
        if not keys:
            self._marked.discard(str(path))
            return
        self._marked.add(str(path))
        run.logger.log(
            logging.WARNING if was_good else logging.INFO,  # once in a row is enough
            f"Checkpoint {path.name} holds NaN or infinity in {what_is_not_finite(keys)}: it is marked, resume=True "
            "passes it over, and no older one is deleted for it",
        )
