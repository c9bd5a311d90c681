"""RayReportHook: reports metrics and finished checkpoints to Ray Train."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.checkpoint import is_checkpoint, is_local
from ..core.checkpoint.manifest import MANIFEST
from ..core.comm.collectives import broadcast_object, side_group, start_reduce
from ..core.errors import ConfigError
from ..runner.hooks import CheckpointHook, Hook, LoggerHook
from ..runner.reporting.reporter import Reporter, numbers
from ..runner.run import Run
from .ray_run import RayRun

REPORTED = "reported"
"""Folder in a run's storage for the checkpoints that Ray knows; Ray's ``CheckpointConfig`` decides which are kept."""


class RayReportHook(Hook):
    """Reports to Ray Train: at log lines, after validations, and when a checkpoint was saved.

    Every worker calls ``ray.train.report`` equally often. Rank 0's metrics are those of the last log line and validation,
    as ``train/loss`` and ``val/accuracy``, with ``epoch`` and ``iter``; the other ranks report the validation only. A
    checkpoint is reported by rank 0, once it is complete, with the metrics of its own validation if one follows it. Those
    of ``save_best``, which have no optimizer, and those with NaN or infinity are not reported.

    Ray's copy of a checkpoint is made of hard links where the storage is the work directory's file system: it takes no space
    and no time, and ``CheckpointConfig(num_to_keep=...)`` and ``CheckpointHook.max_keep_ckpts`` do not disturb each other.
    Otherwise Ray copies it in the background.

    If Ray announces that machines will be taken away, a checkpoint is saved, once per announcement, and training goes on;
    Ray starts other workers when the machines are gone.

    Args:
        interval: iterations between two looks whether a report is due; default: that of the LoggerHook.
        interval_s: seconds between reports without a validation or checkpoint. Ray reads reports every 2 seconds, and
            more frequent ones would queue up.

    Raises:
        ConfigError: an argument is out of range; in ``before_train``: this process is no worker of Ray Train.
    """

    priority = "LOWEST"

    def __init__(self, interval: int | None = None, interval_s: float = 10.0) -> None:
        if interval is not None and interval < 1:
            raise ConfigError(f"RayReportHook.interval: {interval} is not allowed, give 1 or more")
        if interval_s < 0:
            raise ConfigError(f"RayReportHook.interval_s: {interval_s} is not allowed, give 0 or more")
        self.interval = interval
        self.interval_s = interval_s
        self._ray: RayRun | None = None
        self._every = 1
        self._lines = _LastLine()
        self._validation: dict[str, float] = {}
        self._is_training = False
        self._owed = 0  # reports to make at the next opportunity, equal on every process
        self._decision: Callable[[], int] | None = None  # whether a report is due, as rank 0 says
        self._reported_at = 0.0
        self._saved_as: Any = None  # the newest checkpoint whose saving has begun
        self._waiting: list[_Saved] = []  # checkpoints that are not reported yet
        self._announced: Any = None  # by Ray, and saved for
        self._saved_at = -1  # iteration

    def before_train(self, runner: Run) -> None:
        """Find the run of Ray, and begin to note the figures of log lines."""
        self._ray = RayRun("RayReportHook")
        loggers = [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
        self._every = self.interval or min(loggers, default=10)
        if self._lines not in runner.reporters:
            runner.visualizer.reporters.append(self._lines)
        self._is_training, self._owed, self._decision = True, 0, None
        self._saved_as = runner.message_hub.get_info("last_ckpt")
        self._report_again(runner, self._ray)
        self._reported_at = time.monotonic()
        if runner.rank == 0 and not is_local(runner.checkpoint_dir):
            runner.logger.warning(
                f"RayReportHook: checkpoints in {runner.checkpoint_dir} are not reported to Ray, only those in folders are; "
                "the run continues from them all the same"
            )

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Make the reports of the iteration before, which no validation followed."""
        if self._decision is not None:
            due, self._decision = self._decision(), None
            self._owed = max(self._owed, due)
        if self._owed:
            self._report(runner)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask rank 0 at log lines whether a report is due, and note that a checkpoint was saved."""
        if (runner.iter + 1) % self._every == 0:
            due = runner.rank == 0 and (
                self._is_ready(runner) or time.monotonic() - self._reported_at >= self.interval_s
            )
            self._decision = start_reduce(int(due), "max", side_group(purpose="ray"))
        self._note_saved(runner)

    def after_train_epoch(self, runner: Run) -> None:
        """Note that a checkpoint was saved."""
        self._note_saved(runner)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Report the metrics of a validation during training, and the checkpoint saved before it."""
        if not self._is_training:
            return
        self._validation = {
            f"val/{name.removeprefix('val/')}": value for name, value in _numbers(metrics or {}).items()
        }
        self._owed = max(self._owed, 1)
        self._report(runner)

    def after_train(self, runner: Run) -> None:
        """Report the last metrics and checkpoint."""
        self._note_saved(runner)
        runner.finish_saving()
        self._owed = max(self._owed, 1)
        self._report(runner, ends=True)
        self._is_training = False

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: the other processes may report no more."""
        self._is_training, self._decision, self._owed = False, None, 0

    # Saving and reporting

    def _report_again(self, runner: Run, ray: RayRun) -> None:
        """Owe a report of the checkpoint that the run continues from, if the failure came before Ray had read of it."""
        is_known = broadcast_object(runner.rank == 0 and ray.reported_iteration() >= runner.iter)
        if self._saved_as is None or is_known:
            return
        self._owed = 1
        self._waiting = []
        self._await(runner, _Saved(Path(self._saved_as), is_complete=True))

    def _note_saved(self, runner: Run) -> None:
        """Owe a report if saving has begun since the last call; every process sees it alike.

        A report gives Ray one checkpoint. When a save begins, the one before it is complete, so at most two wait.
        """
        newest = runner.message_hub.get_info("last_ckpt")
        if newest != self._saved_as:
            self._saved_as = newest
            self._owed += 1
            self._await(runner, _Saved(Path(newest)))

    def _await(self, runner: Run, saved: _Saved) -> None:
        if runner.rank == 0:  # which reports it
            self._waiting.append(saved)

    def _report(self, runner: Run, ends: bool = False) -> None:
        """Make the reports that are owed; a collective of Ray's."""
        assert self._ray is not None
        if not ends:
            self._save_for_announcement(runner, self._ray)
        while self._owed:
            self._owed -= 1
            metrics = self._metrics(runner)
            for saved in self._waiting:  # written in the background, it may be complete only after further iterations
                saved.metrics = saved.metrics or metrics
            taken = self._next_complete(runner) if runner.rank == 0 else None
            if taken is None:
                _give(self._ray, metrics, None, Path(runner.work_dir))
            else:
                _give(self._ray, taken.metrics, taken.path, Path(runner.work_dir))
        self._reported_at = time.monotonic()

    def _metrics(self, runner: Run) -> dict[str, float]:
        progress = {"epoch": runner.epoch, "iter": runner.train_loop.state_dict()["iter"] or 0}
        return {**self._lines.scalars, **self._validation, **progress}

    def _is_ready(self, runner: Run) -> bool:
        """True if a checkpoint that waits is complete; rank 0 alone is asked."""
        return any(saved.is_complete or runner.has_saved(saved.path) for saved in self._waiting)

    def _next_complete(self, runner: Run) -> _Saved | None:
        """Return the oldest checkpoint that is complete and waits; older ones have failed."""
        while self._is_ready(runner):
            saved = self._waiting.pop(0)
            is_complete = saved.is_complete or runner.has_saved(saved.path)
            if is_complete and is_local(saved.path) and is_checkpoint(saved.path) and not runner.was_marked(saved.path):
                return saved
        return None

    def _save_for_announcement(self, runner: Run, ray: RayRun) -> None:
        """Save a checkpoint if Ray has announced anew that machines will be taken away."""
        ask = getattr(ray.train, "get_preemption_info", None)  # since Ray 2.57
        announced = ask() if ask is not None else None  # of rank 0, on every process
        if announced is None or announced == self._announced:
            return
        self._announced = announced
        done = runner.iter
        runner.logger.warning(
            f"Ray will take away the machines of rank {', '.join(map(str, announced.preempted_ranks))}: saving at iteration "
            f"{done}; training goes on until then"
        )
        folder = next((h.out_dir(runner) for h in runner.hooks if isinstance(h, CheckpointHook)), Path(runner.work_dir))
        path = runner.save_checkpoint(folder, f"iter_{done}", meta={"epoch": runner.epoch, "iter": done})
        self._await(runner, _Saved(Path(path)))
        self._owed += 1


@dataclass
class _Saved:
    """A checkpoint, and the metrics of the iteration after which it was saved, with those of the validation that followed."""

    path: Path
    metrics: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False
    """True if an earlier start of the run has saved it."""


class _LastLine(Reporter):
    """Keeps the figures of the last log line of training; only rank 0's is called."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars: dict[str, float] = {}

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        if mode == "train":
            named = {name.removeprefix("train/"): value for name, value in numbers(scalars).items()}
            self.scalars = {f"train/{name}": value for name, value in named.items() if name not in ("epoch", "iter")}


def _give(ray: RayRun, metrics: dict[str, Any], path: Path | None, work_dir: Path) -> None:
    """Report to Ray, and return without waiting until Ray has read it."""
    train = ray.train
    options: dict[str, Any] = {"checkpoint_upload_mode": train.CheckpointUploadMode.ASYNC}
    checkpoint = None
    if path is not None:
        if not ray.has_storage:
            staged = path
        elif ray.folder is None:  # Ray copies it in the background, when it may be too old for max_keep_ckpts
            staged = _linked(path, work_dir / f".{REPORTED}")
            options["delete_local_checkpoint_after_upload"] = True
        else:
            staged = _linked(path, ray.folder / REPORTED)
            options["delete_local_checkpoint_after_upload"] = False
            options["checkpoint_upload_fn"] = _as_it_is
        checkpoint = train.Checkpoint.from_directory(str(staged))
    train.report(metrics, checkpoint=checkpoint, **options)


def _as_it_is(checkpoint: Any, name: str) -> Any:
    """Stand for Ray's copying of a checkpoint that is in the storage already."""
    return checkpoint


def _linked(path: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint in ``folder``, of hard links where the file system has them."""
    target, number = folder / path.name, 1
    while target.exists():  # a run that went on from an older checkpoint comes to the same iteration again
        with contextlib.suppress(OSError):
            if (path / MANIFEST).samefile(target / MANIFEST):  # made before a failure, and not reported
                return target
        number += 1
        target = folder / f"{path.name}.{number}"
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.name == MANIFEST)
    for file in files:  # the manifest last: without it nothing is taken for a checkpoint
        copy = target / file.relative_to(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)
    return target


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are one number, tensors and arrays too, as Ray takes them."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # a matrix, a text
            continue
    return found
