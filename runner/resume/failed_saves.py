"""FailedSaves: the saves of a run that failed in storage, and whether the last one of each kind did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, StorageError, counted, suggest
from ...core.events import append_event

if TYPE_CHECKING:
    from ..run import Run


ON_ERROR = ("raise", "continue")


def check_on_error(value: Any, where: str) -> None:
    """Raise ConfigError if ``value`` is no reaction to a save that fails."""
    if value not in ON_ERROR:
        hint = suggest(str(value), ON_ERROR)
        raise ConfigError(f'{where}: {value!r} is not allowed, choose "raise" or "continue"{hint}')


class FailedSaves:
    """Which checkpoints could not be saved although training went on, as ``on_error="continue"`` asks."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._in_a_row: dict[str, int] = {}  # by kind of checkpoint, since the last one that was saved
        self._last: dict[str, StorageError] = {}
        self._newest: Path | None = None

    def __contains__(self, path: str | Path) -> bool:
        return str(path) in self._failed

    def add(self, path: Path) -> None:
        """Record that the last save of ``path`` failed; an earlier checkpoint of this name is still there."""
        self._failed.add(str(path))

    def go_on(self, run: Run, path: Path, error: StorageError) -> None:
        """Warn of a failure that every process knows, and write it down in ``events.jsonl``."""
        self.add(path)
        kind = _kind(path)
        if path.parent != run.fast_checkpoint_dir:  # which nobody needs after the end
            self._last[kind] = error
        times = self._in_a_row[kind] = self._in_a_row.get(kind, 0) + 1
        found = f"the last one saved is {self._newest}" if self._newest else "none was saved yet in this run"
        more = f", {counted(times, 'failure')} in a row" if times > 1 else ""
        run.logger.warning(f'{error}; training goes on (on_error="continue"), {found}{more}')
        if run.rank == 0:
            done = run.train_loop.state_dict()["iter"]
            append_event(run.work_dir, "save_failed", rank=0, iter=done, path=str(path), reason=str(error))

    def saved(self, path: Path) -> None:
        """Record that ``path`` is complete."""
        self._failed.discard(str(path))
        self._in_a_row.pop(_kind(path), None)
        self._last.pop(_kind(path), None)
        self._newest = path

    def raise_last(self) -> None:
        """Raise StorageError if the last save of any kind failed, once; called when training has ended."""
        last, self._last = self._last, {}
        for error in last.values():
            raise StorageError(f"The last checkpoint is missing, training itself is done: {error}")


def _kind(path: Path) -> str:
    """The path without the numbers in its name: what ``iter_10`` and ``iter_20`` have in common."""
    return str(path.parent / re.sub(r"\d+", "", path.name))
