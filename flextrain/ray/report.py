"""RayReportHook: reports metrics and finished checkpoints to Ray Train."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.base.errors import CheckpointError, ConfigError
from ..core.checkpoint import is_checkpoint, is_local
from ..core.checkpoint.manifest import MANIFEST, VALUES
from ..core.comm.collectives import side_group, start_reduce
from ..runner.hooks import CheckpointHook, Hook, LoggerHook
from ..runner.reporting.reporter import Reporter, import_extra, numbers
from ..runner.run import Run

# What Ray tells a worker of its run: the storage, and what Ray can report.


def ray_train(needed_by: str) -> ModuleType:
    """Return the module ``ray.train``.

    Raises:
        ConfigError: Ray is not installed, or its version or setting has no ``report`` that takes checkpoints of any folder.
    """
    module = import_extra("ray.train", "ray", needed_by)
    if "checkpoint_upload_fn" not in inspect.signature(module.report).parameters:
        raise ConfigError(
            f"{needed_by}: needs Ray Train V2, which is in ray 2.51 or later unless RAY_TRAIN_V2_ENABLED=0 is set; "
            "pip install flextrain[ray]"
        )
    return module


class RayRun:
    """The run of Ray Train that this process is a worker of.

    Args:
        needed_by: begins the messages.

    Raises:
        ConfigError: this process is no worker of Ray Train.
    """

    def __init__(self, needed_by: str) -> None:
        self.train = ray_train(needed_by)
        try:
            context = self.train.get_context()
            self.name: str = context.get_experiment_name()
        except RuntimeError:
            raise ConfigError(
                f"{needed_by}: this process is no worker of Ray Train, use it in the function that TorchTrainer gets"
            ) from None
        try:
            self._storage: Any = context.get_storage()
        except NotImplementedError:  # ScalingConfig(num_workers=0) trains in the program itself
            self._storage = None

    @property
    def checkpoint(self) -> Any:
        """The checkpoint that was reported last, of earlier starts too; None if there is none. Equal on every process."""
        return self.train.get_checkpoint()

    def reported_iteration(self) -> int:
        """Updates after which the checkpoint was saved that was reported last; -1 if there is none that can be read."""
        if (found := self.checkpoint) is None:
            return -1
        try:  # without fetching the rest of it, which may be large and far away
            with found.filesystem.open_input_stream(f"{found.path}/{VALUES}") as file:
                return int(json.loads(file.read())["loop"]["iter"])
        except (OSError, KeyError, TypeError, ValueError):
            return -1

    @property
    def has_storage(self) -> bool:
        """False if the program itself trains, without a storage."""
        return self._storage is not None

    @property
    def folder(self) -> Path | None:
        """The run's folder in the storage; None if the storage is no file system of this machine."""
        if self._storage is None or self._storage.storage_filesystem.type_name != "local":
            return None
        return Path(self._storage.experiment_fs_path)

    @property
    def storage(self) -> str:
        """The storage in words."""
        if self._storage is None:
            return "none, as num_workers=0 trains without one"
        return f"{self._storage.storage_filesystem.type_name}, {self._storage.experiment_fs_path}"

    @property
    def own_folder(self) -> Path | None:
        """Ray's folder on this machine, in which its workers start; it is not shared, and goes with the machine."""
        return None if self._storage is None else Path(self._storage.local_working_directory)


REPORTED = "reported"
"""Folder in a run's storage for the checkpoints that Ray knows; Ray's ``CheckpointConfig`` decides which are kept."""


class RayReportHook(Hook):
    """Reports to Ray Train, after validations and at log lines: every ``interval_s``, and when a checkpoint is complete.

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
        interval_s: seconds between reports without a validation or checkpoint (by rank 0's clock). Ray reads reports every 2 seconds, and
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
        self._decision: Callable[[], int] | None = None  # how many reports to make before the next iteration
        self._announced: Any = None  # by Ray, and saved for
        # Of rank 0, which decides for all:
        self._reported_at = 0.0
        self._newest: Path | None = None  # checkpoint whose saving began last
        self._taken: Path | None = None  # the one that was reported last
        self._waiting: list[_Saved] = []  # checkpoints that are not reported yet

    def before_train(self, runner: Run) -> None:
        """Find the run of Ray, and begin to note the figures of log lines."""
        self._ray = RayRun("RayReportHook")
        loggers = [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
        self._every = self.interval or min(loggers, default=10)
        self._is_training, self._decision = True, None
        if runner.rank != 0:
            return
        if self._lines not in runner.visualizer.reporters:
            runner.visualizer.reporters.append(self._lines)
        self._reported_at = time.monotonic()
        newest = runner.message_hub.get_info("last_ckpt")
        self._newest = newest and Path(newest)
        if self._newest is not None and self._ray.reported_iteration() < runner.iter:
            # The run continues from it, and failed before Ray had read of it.
            self._waiting = [_Saved(self._newest, *self._metrics(runner), is_complete=True)]
        if not is_local(runner.checkpoint_dir):
            runner.logger.warning(
                f"RayReportHook: checkpoints in {runner.checkpoint_dir} are not reported to Ray, only those in folders are; "
                "the run continues from them all the same"
            )

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Make the reports that rank 0 has decided on after the iteration before."""
        if self._decision is not None:
            decision, self._decision = self._decision, None
            if count := decision():
                self._report(runner, count)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Note that a checkpoint was saved, and have rank 0 decide at log lines how many reports are due."""
        if runner.rank == 0:
            self._note_saved(runner)
        if (runner.iter + 1) % self._every == 0:
            is_due = time.monotonic() - self._reported_at >= self.interval_s
            self._decision = self._decide(runner, at_least=int(is_due))

    def after_train_epoch(self, runner: Run) -> None:
        """Note that a checkpoint was saved."""
        if runner.rank == 0:
            self._note_saved(runner)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Report the metrics of a validation during training, and the checkpoint saved before it."""
        if not self._is_training:
            return
        self._validation = {
            f"val/{name.removeprefix('val/')}": value for name, value in _numbers(metrics or {}).items()
        }
        done, figures = self._metrics(runner)
        for saved in self._waiting:
            if saved.iteration == done:  # it was saved before its own validation
                saved.metrics = figures
        self._report_now(runner)

    def after_train(self, runner: Run) -> None:
        """Report the last metrics and checkpoint."""
        runner.finish_saving()
        if runner.rank == 0:
            self._note_saved(runner)
        self._is_training = False
        self._report_now(runner)

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: the other processes may report no more."""
        self._is_training, self._decision = False, None

    # Saving and reporting

    def _note_saved(self, runner: Run) -> None:
        """Let the checkpoint wait whose saving has begun since the last call."""
        newest = runner.message_hub.get_info("last_ckpt")
        if newest is None or (path := Path(newest)) == self._newest:
            return
        self._newest = path
        # After a save that failed the checkpoint before it is the newest again.
        if path != self._taken and not any(saved.path == path for saved in self._waiting):
            self._waiting.append(_Saved(path, *self._metrics(runner)))

    def _decide(self, runner: Run, at_least: int) -> Callable[[], int]:
        """Start to tell all processes how many reports rank 0 wants; return a function that returns the number."""
        count = max(at_least, self._num_ready(runner)) if runner.rank == 0 else 0
        return start_reduce(count, "max", side_group(purpose="ray"))

    def _report_now(self, runner: Run) -> None:
        self._decision = None
        self._report(runner, self._decide(runner, at_least=1)())

    def _report(self, runner: Run, count: int) -> None:
        """Report ``count`` times; a collective of Ray's."""
        assert self._ray is not None
        work_dir = Path(runner.work_dir)
        for _ in range(count):
            taken = self._next_complete(runner)  # None on ranks other than 0, on which nothing waits
            if taken is None:
                _give(self._ray, self._metrics(runner)[1], None, work_dir)
            else:
                _give(self._ray, taken.metrics, taken.path, work_dir)
        self._reported_at = time.monotonic()
        if self._is_training:
            self._save_for_announcement(runner, self._ray)

    def _metrics(self, runner: Run) -> tuple[int, dict[str, float]]:
        """Return the iteration, and the figures of the last log line and validation with it."""
        state = runner.train_loop.state_dict()
        epoch, done = state["epoch"] or 0, state["iter"] or 0
        return done, {**self._lines.scalars, **self._validation, "epoch": epoch, "iter": done}

    def _is_complete(self, runner: Run, saved: _Saved) -> bool:
        return saved.is_complete or runner.has_saved(saved.path)

    def _num_ready(self, runner: Run) -> int:
        return sum(self._is_complete(runner, saved) for saved in self._waiting)

    def _next_complete(self, runner: Run) -> _Saved | None:
        """Return the oldest checkpoint that is complete and waits; those before it have failed."""
        while self._num_ready(runner):
            saved = self._waiting.pop(0)
            if not self._is_complete(runner, saved):
                continue
            self._taken = saved.path
            if is_local(saved.path) and is_checkpoint(saved.path) and not runner.was_marked(saved.path):
                return saved
        return None

    def _save_for_announcement(self, runner: Run, ray: RayRun) -> None:
        """Save a checkpoint if Ray has announced anew that machines will be taken away."""
        ask = getattr(ray.train, "get_preemption_info", None)  # since Ray 2.57
        announced = ask() if ask is not None else None  # of rank 0, on every process
        if announced is None or announced == self._announced:
            return
        self._announced = announced
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        if not savers:
            return
        runner.logger.warning(
            f"Ray will take away the machines of rank {', '.join(map(str, announced.preempted_ranks))}: saving at iteration "
            f"{self._metrics(runner)[0]}; training goes on until then"
        )
        try:
            savers[0].save_now(runner)
        except CheckpointError as error:  # the same on all processes
            runner.logger.warning(f"The run may lose what it has trained since its last checkpoint: {error}")
            return
        if runner.rank == 0:
            self._note_saved(runner)
        self._report_now(runner)


@dataclass
class _Saved:
    """A checkpoint, the iteration after which it was saved, and the metrics then, with those of its own validation."""

    path: Path
    iteration: int
    metrics: dict[str, float]
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
