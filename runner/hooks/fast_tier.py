"""FastTier: frequent checkpoints in memory or on a fast disk, of which only the newest is kept."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from ...core.checkpoint import as_path, complete_ones, is_local, make_writable, remove_checkpoint
from ...core.checkpoint.directory import LATEST
from ...core.comm.collectives import all_gather_object, broadcast_object, side_group
from ...core.comm.joint_errors import raising_together
from ...core.errors import CheckpointError, ConfigError, StorageError
from ..resume.tier_notes import NOTE, new_note, read_note, write_note
from .awaited_saves import AwaitedSaves
from .kept_checkpoints import remove
from .other_runs import comes_from_elsewhere

if TYPE_CHECKING:
    from ..run import Run

_NAME = "iter_{}"


class FastTier:
    """The second tier of a CheckpointHook's checkpoints.

    Args:
        folder: the folder, for this run alone.
        interval: iterations between two checkpoints.
        where: the configuration key, for messages.
        saves: saves the checkpoints.
        skips: leave a checkpoint out while a save is still in progress in the background.
    """

    def __init__(self, folder: str | Path, interval: int, where: str, saves: AwaitedSaves, skips: bool) -> None:
        if interval < 1:
            raise ConfigError(f"{where}.fast_interval: {interval} is not allowed, give 1 or more iterations")
        if not str(folder) or "://" in str(folder):  # "" comes from a variable that is not set, and means no folder
            raise ConfigError(f'{where}.fast_dir: "{folder}" is not allowed, give a local or mounted folder')
        self.folder, self.interval = as_path(folder), interval
        self._key, self._saves, self._skips = f"{where}.fast_dir", saves, skips
        self._held: Path | None = None  # the newest complete one

    def check_shared(self, runner: Run) -> None:
        """Check that the folder is one for all processes; a collective.

        Raises:
            ConfigError: on every process, if one sees another folder than rank 0, or it cannot be written to.
        """
        for name, other in (("work_dir", Path(runner.work_dir)), ("out_dir", runner.checkpoint_dir)):
            if is_local(other) and self.folder.resolve() == other.resolve():
                raise ConfigError(f"{self._key}: {self.folder} is the {name} too, give a folder of its own")
        make_writable(self.folder, self._key)
        trial = self.folder / broadcast_object(f".{uuid.uuid4().hex}.tmp")
        with raising_together(), _its_errors(self.folder):
            if runner.rank == 0:
                trial.touch()
        machines = all_gather_object((gethostname(), trial.exists()))
        with raising_together(), _its_errors(self.folder):
            if runner.rank == 0:
                trial.unlink(missing_ok=True)
        apart = {rank: machine for rank, (machine, sees) in enumerate(machines) if not sees}
        if apart:
            ranks, others = ", ".join(map(str, apart)), ", ".join(dict.fromkeys(apart.values()))
            raise ConfigError(
                f"{self._key}: {self.folder} on {others} (rank {ranks}) is another folder than on {machines[0][0]} (rank 0); "
                "give storage that all machines share, such as a parallel file system; memory is for one machine"
            )

    def begin(self, runner: Run, *, overwrite: bool) -> None:
        """Take the folder for this run, and remove what it will not go on from; a collective.

        Raises:
            ConfigError: on every process, if it holds checkpoints of another run.
        """
        side_group(purpose=self._key)
        with raising_together(), _its_errors(self.folder):
            if runner.rank == 0:
                self._take(runner, overwrite)
        name = broadcast_object(None if self._held is None else self._held.name)
        self._held = None if name is None else self.folder / name

    def _take(self, runner: Run, overwrite: bool) -> None:
        ordinary, note = runner.checkpoint_dir, read_note(self.folder)
        held = complete_ones(self.folder)
        if held and (note is None or note.checkpoints != str(ordinary)):
            whose = "no fast tier of a run" if note is None else f"the run in {note.checkpoints}"
            raise ConfigError(
                f"{self._key}: {self.folder} holds checkpoints of {whose}; give every run a folder of its own, or delete it"
            )
        if held and runner.iter == 0 and runner.options.resume_options is None and not overwrite:
            raise ConfigError(
                f"{self._key}: {self.folder} holds {', '.join(path.name for path in held)} of an earlier start of this run, "
                "which failed; resume=True continues from there, overwrite=True replaces it"
            )
        own = read_note(ordinary)
        if own is None or runner.iter == 0 or comes_from_elsewhere(runner, ordinary, self.folder):
            own = new_note(ordinary)
            write_note(ordinary, own)
        # What comes after the iteration from which training goes on belongs to a future that was given up.
        usable = [path for path, done in held.items() if note == own and done <= runner.iter]
        self._held = usable[-1] if usable else None
        for path in held:
            if path != self._held:
                remove_checkpoint(path)
        if self._held is None:
            (self.folder / LATEST).unlink(missing_ok=True)
        write_note(self.folder, own)
        runner.logger.info(
            f"Every {self.interval} iterations a checkpoint will be saved to the fast tier {self.folder}"
        )

    def is_due(self, done: int) -> bool:
        """True if a checkpoint is due after so many updates."""
        return done % self.interval == 0

    def save(self, runner: Run, done: int, epoch: int) -> None:
        """Save a checkpoint after ``done`` updates, and then remove the one before; a collective."""
        if self._skips and self._is_busy(runner):
            return
        path = self.folder / _NAME.format(done)
        before = self._held

        def complete() -> None:
            if runner.was_marked(path):  # with NaN, so that nobody would resume it
                remove(runner, path)
                return
            self._held = path
            if before not in (None, path):
                assert before is not None
                remove(runner, before)

        self._saves.save(runner, path, complete, lambda: None, meta={"epoch": epoch, "iter": done})

    def _is_busy(self, runner: Run) -> bool:
        """Rank 0's answer whether a save is in progress: waiting for a slow disk would cost more than this one is worth."""
        is_busy = False
        if runner.rank == 0:
            with contextlib.suppress(CheckpointError):  # it is over; all raise when they wait for it
                is_busy = not runner.finish_saving(wait=False)
        return all_gather_object(is_busy, side_group(purpose=self._key))[0]

    def remove(self, runner: Run) -> None:
        """Remove all checkpoints of the tier, and the folder if nothing else is in it; for a run that ended well."""
        if runner.rank != 0:
            return
        with contextlib.suppress(OSError):
            for path in complete_ones(self.folder):
                remove_checkpoint(path)
            for path in self.folder.glob(f".{_NAME.format('*')}.*"):
                shutil.rmtree(path, ignore_errors=True)
            for name in (LATEST, NOTE):
                (self.folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _its_errors(folder: Path) -> Iterator[None]:
    """Context that raises StorageError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{error.filename or folder}: {error.strerror or error}") from error
