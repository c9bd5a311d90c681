"""KeptCheckpoints: the numbers of a run's checkpoints, and which of them are deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.checkpoint import find_latest, is_marked, remove_checkpoint
from ...core.comm.collectives import broadcast_object
from ...core.errors import CheckpointError, ConfigError, StorageError

if TYPE_CHECKING:
    from ..run import Run


class KeptCheckpoints:
    """The checkpoints of a run by their numbers: the good ones, and those marked for NaN or infinity.

    Args:
        template: name of a checkpoint with one ``{}`` for its number.
        max_keep_ckpts, keep_every: see CheckpointHook.
        where: the configuration key, for messages.
    """

    def __init__(self, template: str, max_keep_ckpts: int, keep_every: int, where: str) -> None:
        if max_keep_ckpts < 1 and max_keep_ckpts != -1:
            raise ConfigError(f"{where}.max_keep_ckpts: {max_keep_ckpts} is not allowed, give 1 or more, or -1 for all")
        if keep_every < 1 and keep_every != -1:
            raise ConfigError(f"{where}.keep_every: {keep_every} is not allowed, give 1 or more, or -1 for none")
        if keep_every != -1 and max_keep_ckpts == -1:
            raise ConfigError(f"{where}.keep_every: has no meaning without max_keep_ckpts, all are kept")
        self._template, self._max_keep, self._keep_every = template, max_keep_ckpts, keep_every
        self._kept: list[int] = []
        self._marked: list[int] = []  # with NaN or infinity, not counted among the kept ones
        self.others: list[str] = []  # names of those of another run, which the first good one replaces
        self._between: list[str] = []  # names of those that were saved in the middle of an epoch

    def add(self, number: int) -> Callable[[], None]:
        """Count a checkpoint that is about to be saved; return what undoes this, for a save that fails."""
        before = list(self._kept), list(self._marked)

        def undo() -> None:
            self._kept, self._marked = before

        # A checkpoint that is saved twice must not count as two, or the older of them would be deleted.
        self._marked = [marked for marked in self._marked if marked != number]
        self._kept = [*(kept for kept in self._kept if kept != number), number]
        return undo

    def add_between(self, name: str) -> Callable[[], None]:
        """Count a checkpoint in the middle of an epoch, which the next good one replaces; return what undoes this."""
        before = self._between

        def undo() -> None:
            self._between = before

        self._between = [*(known for known in before if known != name), name]
        return undo

    def prune_between(self, runner: Run, folder: Path, complete: str) -> None:
        """Delete the checkpoints in the middle of epochs that a good one, the complete one of this name, has replaced."""
        if self._max_keep < 1 or runner.was_marked(folder / complete):
            return
        self._between = [name for name in self._between if name == complete or not remove(runner, folder / name)]

    def remove_others(self, runner: Run, folder: Path, complete: str) -> None:
        """Delete the checkpoints of another run that a good one of this run, the complete one of this name, replaces."""
        if self.others and not runner.was_marked(folder / complete):
            others = [name for name in self.others if not runner.has_saved(folder / name)]
            self.others = [name for name in others if not remove(runner, folder / name)]

    def go_on(self, runner: Run, folder: Path) -> None:
        """Continue with the checkpoints that a resumed run had kept; a collective."""
        if self._kept:
            # A checkpoint is marked only after it is written, too late for this hook's state in it.
            is_bad: bool = broadcast_object(runner.rank == 0 and is_marked(self.path(folder, self._kept[-1])))
            self._marked += [self._kept.pop()] if is_bad else []
        self._prune(runner, folder)

    def sort_in(self, runner: Run, folder: Path, number: int) -> None:
        """Count a completed checkpoint among the good or the marked ones, then delete old ones."""
        if number in self._kept and runner.was_marked(self.path(folder, number)):
            self._kept.remove(number)
            self._marked.append(number)
        self._prune(runner, folder)
        self.prune_between(runner, folder, self.path(folder, number).name)
        self.remove_others(runner, folder, self.path(folder, number).name)

    def path(self, folder: Path, number: int) -> Path:
        """The path of the checkpoint with this number."""
        return folder / self._template.format(number)

    def _prune(self, runner: Run, folder: Path) -> None:
        """Delete the oldest checkpoints of this run beyond ``max_keep_ckpts``, and all marked ones but the newest."""
        if self._max_keep < 1:
            return
        for numbers, count in ((self._kept, self._max_keep), (self._marked, 1)):
            for number in numbers[:-count]:
                if self._keep_every > 0 and number % self._keep_every == 0:
                    continue
                if remove(runner, self.path(folder, number)):
                    numbers.remove(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the good and the marked checkpoints, and the names of those in the middle of epochs."""
        return {"kept": list(self._kept), "marked": list(self._marked), "between": list(self._between)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._kept, self._marked = list(state["kept"]), list(state.get("marked", ()))
        self._between = list(state.get("between", ()))


def remove(runner: Run, path: Path) -> bool:
    """Delete a checkpoint on rank 0, unless ``latest`` names it; return False if it stays."""
    # No collective is needed: all processes have left the last save, so they read the same ``latest``.
    try:
        if _is_latest(path):
            return False
        if runner.rank == 0 and path.exists():  # it has no manifest if a process was killed while deleting it
            remove_checkpoint(path)
    except (OSError, StorageError) as error:  # tried again after the next save
        runner.logger.warning("Checkpoint %s could not be deleted: %s", path, error)
        return False
    return True


def _is_latest(path: Path) -> bool:
    try:
        latest = find_latest(path.parent)
    except StorageError:  # it may be the latest
        raise
    except CheckpointError:
        return False
    return latest is not None and latest.name == path.name
