"""Saver: saves the checkpoints of a run, one at a time, and knows which of them are marked."""

from __future__ import annotations

import logging
import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.base.errors import CheckpointError, ConfigError, StorageError, counted, suggest
from ...core.base.events import append_event
from ...core.base.tensors import check_tensor, is_quantised, size_text
from ...core.checkpoint import PendingSave, Staging, is_local, remove_checkpoint, what_is_not_finite
from ...core.checkpoint.directory import check_no_other_files, finite, temporary, to_json
from ...core.checkpoint.load import Checkpoint
from ...core.checkpoint.untrusted import one_line
from ...core.comm.agreement import raising_together, told_by_rank_0
from . import run_state
from .resumed_schedules import scheduler_states
from .run_state import hook_state, named_hooks
from .weights import ADAPTERS

if TYPE_CHECKING:
    from ..run import Run

# FailedSaves: the saves of a run that failed in storage, and whether the last one of each kind did.


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


class Saver:
    """Saves the checkpoints of a run; at most one save is in progress in the background.

    Args:
        run: the runner.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
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

    def save(self, path: Path, *, in_background: bool, on_error: str = "raise", **options: Any) -> None:
        """Write a checkpoint after the previous save is complete; ``options`` are those of ``run_state.save``.

        Raises:
            CheckpointError: this save failed, or the previous one failed in the background. A StorageError only if
                ``on_error`` of that save is "raise".
        """
        self.finish()
        began = time.monotonic()
        self._at = self._run.train_loop.state_dict()["iter"] or 0
        self._goes_on = on_error == "continue"
        is_whole = options.get("save_optimizer", True) and options.get("save_param_scheduler", True)
        is_whole = is_whole and path.parent != self._run.fast_checkpoint_dir  # the run may come back on another machine
        self._begun = (path, self._run.train_loop.state_dict()) if is_whole else None
        options["logs_failure"] = not self._goes_on  # the warning says it
        try:
            self._pending = run_state.save(
                self._run, path, in_background=in_background, staging=self._staging, **options
            )
        except CheckpointError as error:
            self._note_failed(path, error)
        else:
            if not in_background:
                self._note_saved(path)
        finally:
            self.seconds += time.monotonic() - began

    def finish(self, wait: bool = True) -> bool:
        """Return True if no save is in progress; with ``wait``, wait for it first.

        Raises:
            CheckpointError: the save in progress failed, and training is not to go on without it.
        """
        pending, began = self._pending, time.monotonic()
        if pending is None or not (wait or pending.is_done()):
            return pending is None
        try:
            pending.join()  # if this is interrupted, the save stays in progress
            self._pending = None
            pending.wait()
        except CheckpointError as error:
            self._note_failed(pending.path, error)
            return True
        finally:
            self.seconds += time.monotonic() - began
        self._note_saved(pending.path)
        self._run.logger.info(f"Checkpoint {pending.path.name} is complete, written in {pending.seconds:.1f} s")
        return True

    def was_marked(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path`` with NaN or infinity where values must be finite."""
        return str(path) in self._marked

    def has_saved(self, path: str | Path) -> bool:
        """True if this run saved the checkpoint ``path``."""
        return str(path) in self._saved

    def saved_here(self) -> Path | None:
        """The complete checkpoint of the present position in training, if this run saved one to go on from."""
        if self._resumable is None or self._resumable[1] != self._run.train_loop.state_dict():
            return None
        return self._resumable[0]

    def _note_failed(self, path: Path, error: CheckpointError) -> None:
        """Raise the error of a save, unless training goes on without the checkpoint."""
        if path.parent == self._run.fast_checkpoint_dir and isinstance(error, StorageError):
            error = StorageError(f"Fast tier: {error}")
        if not self._goes_on or not isinstance(error, StorageError):
            self.failed.add(path)
            raise error
        self.failed.go_on(self._run, path, error)

    def _note_saved(self, path: Path) -> None:
        """Record whether the checkpoint that is now complete is marked; every process knows the result."""
        self._saved.add(str(path))
        self._resumable = self._begun or self._resumable
        if self._run.rank == 0 and path.parent != self._run.fast_checkpoint_dir:
            append_event(self._run.work_dir, "saved", rank=0, iter=self._at, path=str(path))
        self.failed.saved(path)
        keys, was_good = self._staging.nonfinite, self._last_is_good
        self._last_is_good = not keys
        if not keys:
            self._marked.discard(str(path))
            return
        self._mark(path, keys, logging.WARNING if was_good else logging.INFO)  # one warning for several in a row

    def _mark(self, path: Path, keys: Sequence[str], level: int) -> None:
        self._marked.add(str(path))
        text = f"Checkpoint {path.name} holds NaN or infinity in {what_is_not_finite(keys)}: it is marked, resume=True skips it, and no "
        text += "older one is deleted for it"
        if (kept := finite(path)).exists():
            text += f"; that of this name is {kept.name} now"
        self._run.logger.log(level, text)


# Check before training that a checkpoint of the run could be written: otherwise the first save would end it.


def check_can_be_saved(run: Run) -> None:
    """Check the states of model, optimizer, schedules and hooks, and the free space of the folder; a collective.

    State that appears only during training is not known yet, and what hooks add in ``before_save_checkpoint``.

    Raises:
        CheckpointError: on every process, if a value cannot be saved on one of them, or there is too little space.
    """
    with raising_together():
        state: dict[str, Any] = dict(run.strategy.state())
        for name, hook in named_hooks(run):
            state.update(_state_of(run, name, hook))
        state.update(scheduler_states(run))
        for key, value in state.items():
            if isinstance(value, Tensor):
                if is_quantised(value):
                    raise CheckpointError(
                        f"{key}: is quantised ({type(value).__name__}), and checkpoints cannot hold quantised weights; leave them out, "
                        "strategy=dict(type=..., exclude_frozen_parameters=True)"
                    )
                check_tensor(key, value)
            else:
                to_json(value, key)
        folders = {
            "work_dir or CheckpointHook.out_dir": run.checkpoint_dir,
            "CheckpointHook.fast_dir": run.fast_checkpoint_dir,
        }
        for key, folder in folders.items():
            if run.rank == 0 and folder is not None and is_local(folder):
                _check_space(folder, key, [value for value in state.values() if isinstance(value, Tensor)])


def _state_of(run: Run, name: str, hook: Any) -> dict[str, Any]:
    try:
        return hook_state(name, hook)
    except CheckpointError:
        raise
    except Exception as error:  # it may exist only after the first update; a save will raise what is then wrong
        run.logger.warning(
            f"{type(hook).__name__}.state_dict: fails before training, {type(error).__name__}: {one_line(error)}; it is called "
            "there when a run is resumed, give the state its first value in __init__"
        )
        return {}


def _check_space(folder: Path, key: str, tensors: list[Tensor]) -> None:
    """Raise CheckpointError if the folder's file system has no room for the tensors that exist already."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    total, _, free = shutil.disk_usage(existing)
    needed = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)  # whole, also of a shard
    if total and free < needed:
        raise CheckpointError(
            f"{folder}: has {size_text(free)} free, and a checkpoint takes {size_text(needed)} or more; make room, or give "
            f"another folder as {key}"
        )


# Export the model of a run as it is now.


def export_model(run: Run, folder: Path, options: Mapping[str, Any]) -> list[Path]:
    """Write a folder that ``from_pretrained`` loads, by way of a checkpoint without an optimizer; a collective.

    Rank 0 holds the folder meanwhile, so that what another run has left beside it can be removed.

    Raises:
        CheckpointError: the model is none of transformers, or the folder holds one already.
    """
    if run.hugging_face is None:
        raise CheckpointError(
            f"{folder}: {type(run.strategy.module).__name__} is no model of transformers, nor does it have exactly one; "
            "save a checkpoint, and give flextrain checkpoint export"
        )
    weights = folder.with_name(f".{folder.name}.weights")
    with ExitStack() as stack:
        told_by_rank_0(lambda: _begin(stack, folder, weights, options))
        run_state.save(run, weights, save_optimizer=False, save_param_scheduler=False, is_export=True)
        return told_by_rank_0(lambda: _write(weights, folder, options))


def _begin(stack: ExitStack, folder: Path, weights: Path, options: Mapping[str, Any]) -> None:
    from ...core.checkpoint.export.files import claimed
    from ...core.checkpoint.export.hugging_face import check_target

    check_target(folder, **options)
    stack.enter_context(claimed(folder))
    check_no_other_files(weights)
    stack.callback(_remove, weights)


def _remove(weights: Path) -> None:
    """Remove the checkpoint beside the folder, also a part of one; it is in nobody's way if that fails."""
    with suppress(OSError):
        for path in (temporary(weights), weights):
            remove_checkpoint(path)


def _write(weights: Path, folder: Path, options: Mapping[str, Any]) -> list[Path]:
    from ...core.checkpoint.export.hugging_face import write_hugging_face
    from ...core.checkpoint.export.peft_adapters import merged

    source = Checkpoint.open(weights)
    with merged(source) if source.values.get(ADAPTERS) else nullcontext(source) as whole:
        return write_hugging_face(whole, folder, **options)
