"""KeptCheckpoints: the numbers of a run's checkpoints, and which of them are deleted."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from ...core.base.errors import CheckpointError, ConfigError, StorageError, listed
from ...core.checkpoint import (
    as_path,
    complete_ones,
    find_latest,
    is_checkpoint,
    is_local,
    is_marked,
    make_writable,
    remove_checkpoint,
)
from ...core.checkpoint.directory import LATEST
from ...core.checkpoint.folders import reaching
from ...core.comm.agreement import raising_together
from ...core.comm.collectives import all_gather_object, broadcast_object, side_group
from ..resume.choose_checkpoint import NOTE, Note, new_note, read_note, write_note

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
        if not (self._kept or self._marked):
            return
        if self._kept:
            # A checkpoint is marked only after it is written, too late for this hook's state in it.
            is_bad: bool = broadcast_object(runner.rank == 0 and is_marked(self.path(folder, self._kept[-1])))
            self._marked += [self._kept.pop()] if is_bad else []
        self._prune(runner, folder)

    def sort_in(self, runner: Run, folder: Path, number: int) -> None:
        """Count a completed checkpoint among the good or the marked ones, then delete old ones."""
        path = self.path(folder, number)
        if number in self._kept and runner.was_marked(path):
            self._kept.remove(number)
            self._marked.append(number)
        if self._max_keep >= 1:
            self._prune(runner, folder)
            self.prune_between(runner, folder, path.name)
        if self.others:
            self.remove_others(runner, folder, path.name)

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


# Find checkpoints of other runs that a run would replace.


def keep_others(
    runner: Run, folder: Path, template: str, *, own: Sequence[Path], overwrite: bool
) -> tuple[list[str], list[str]]:
    """Return the names of another run's checkpoints, and of those that go with ``overwrite``; raise ConfigError without; a collective.

    Whatever their names are: ``latest`` would leave them, or lead back to them. If the folder cannot be listed, every process
    raises CheckpointError. A run with ``resume`` that found no checkpoint to start from continues with its own folder.

    Args:
        runner: the run, which is about to train, and to save.
        folder: where it saves.
        template: the names that it will use, with one ``{}`` for the number.
        own: folders with checkpoints of this run; resuming from one of them is no reason to ask.
        overwrite: the user has said that they may go.
    """
    goes_on = runner.iter > 0 and not comes_from_elsewhere(runner, *own)
    beyond = (
        {"epoch_{}": runner.epoch, "iter_{}": runner.iter} if goes_on else {template: 0, "epoch_{}": 0, "iter_{}": 0}
    )
    found: list[str] = []
    with raising_together():
        if runner.rank == 0:
            found = _listed(folder, beyond, best=not goes_on)
    found = broadcast_object(found)
    if not found:
        return [], []
    if goes_on:
        runner.logger.warning(
            f"{folder} holds {listed(found, 3)}, of which this run, going on at iteration {runner.iter}, knows nothing: a newer "
            "checkpoint of this run takes their place as the latest"
        )
        return found, []
    source = runner.options.load_from
    if overwrite:
        names = [name for name in found if source is None or (folder / name).resolve() != as_path(source).resolve()]
        if names:
            runner.logger.warning(
                f"{folder} holds checkpoints of another run: {', '.join(names)} will be replaced by the first one that this run saves"
            )
        return found, names
    if runner.options.resume_options is None or runner.iter > 0:
        raise ConfigError(
            f"work_dir: {folder} holds checkpoints of another run ({listed(found, 3)}), which this one would replace; resume=True "
            "continues that run, another work_dir keeps it, default_hooks=dict(checkpoint=dict(overwrite=True)) replaces it"
        )
    runner.logger.warning(f"{folder} holds checkpoints of another run ({listed(found, 3)}), which may be replaced")
    return found, []


def _listed(folder: Path, beyond: Mapping[str, int], best: bool) -> list[str]:
    """Return the checkpoints with the names of these templates and higher numbers, in their order; ``best``: and best ones.

    Raises:
        StorageError: the folder cannot be looked into.
    """
    numbers: dict[str, tuple[bool, int]] = {}
    try:
        with reaching(folder):
            for template, number in beyond.items():
                before, after = map(re.escape, template.split("{}"))
                for path in folder.glob(f"*{template.format('*')}"):
                    match = re.fullmatch(rf"(best_.+_)?{before}(\d+){after}", path.name)
                    if match and int(match[2]) > number and (best or not match[1]) and is_checkpoint(path):
                        numbers[path.name] = (match[1] is not None, int(match[2]))
    except OSError as error:
        raise StorageError(f"{folder}: cannot be looked into, {error.strerror or error}") from error
    return sorted(numbers, key=lambda name: numbers[name])


def comes_from_elsewhere(runner: Run, *folders: Path) -> bool:
    """Return True if the run resumed from a checkpoint outside ``folders``, so those in them are not its own."""
    source = runner.resumed_from
    return source is not None and source.parent.resolve() not in {folder.resolve() for folder in folders}


# AwaitedSaves: saves checkpoints, and does what depends on them when they are complete or have failed.


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


# FastTier: frequent checkpoints in memory or on a fast disk, of which only the newest is kept.


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
        own = read_note(ordinary)
        if own is not None and own.checkpoints != str(ordinary) and not Path(own.checkpoints).exists():
            moved = Note(own.run, str(ordinary))  # the work directory has another path now
            note, own = (moved if note == own else note), moved
            write_note(ordinary, own)
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
