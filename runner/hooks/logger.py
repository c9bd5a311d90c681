"""LoggerHook: writes log lines, the progress bar, and records for the reporters."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.base.errors import ONLY_IN_FILE, CheckpointError, ConfigError, counted, told
from ...core.base.events import EVENTS, append_event, read_events
from ...core.base.overriding import overridden
from ...core.base.registry import HOOKS
from ...core.checkpoint import find_latest, is_checkpoint
from ...core.checkpoint.untrusted import one_line
from ..data.user_loaders import length_of
from ..reporting.console import Table, is_interactive, log_table
from ..reporting.log_processor import num_batches, units
from ..reporting.opening import RunRecord, environment, opening, samples_per_iteration
from ..reporting.progress import ProgressBar
from ..reporting.reporter import plain_value
from ..resume.choose_checkpoint import way_on
from .checkpoint import CheckpointHook
from .early_stopping import infer_rule, is_better, worst
from .hook import Hook, refuse
from .runtime_info import IterTimerHook

if TYPE_CHECKING:
    from ..run import Run

# ClosingSummary: what LoggerHook writes at the end of training.


@dataclass
class _Best:
    name: str
    score: float
    at: str
    checkpoint: Path | None = None


class ClosingSummary:
    """The figures of a training from its start to its end in this process.

    Args:
        runner: the run, whose training begins now.
    """

    def __init__(self, runner: Run) -> None:
        self._runner = runner
        self._begun, self._iter, self._epoch = time.monotonic(), runner.iter, runner.epoch
        self._validated_s = self._validates_since = 0.0
        self._is_validating = False
        self._saved_s = getattr(runner, "saving_s", 0.0)  # of a training before this one
        self._best: _Best | None = None  # of the first metric that a validation gives

    def validation_begins(self) -> None:
        """Stop the clock of training."""
        self._validates_since = time.monotonic()
        self._is_validating = True

    def validation_ends(self, metrics: Mapping[str, Any] | None) -> None:
        """Start the clock again, and compare the first metric whose name says what is better."""
        self._validated_s += time.monotonic() - self._validates_since
        self._is_validating = False
        for name, value in (metrics or {}).items():
            try:
                rule = infer_rule(name, "")
                score = float(value)
            except (ConfigError, TypeError, ValueError):
                continue
            best = worst(rule) if self._best is None else self._best.score
            if is_better(rule, score, best) and (self._best is None or self._best.name == name):
                self._best = _Best(name, score, self._position())
            return

    @property
    def has_begun(self) -> bool:
        """Whether an update was made."""
        return bool(self._runner.iter > self._iter)

    def last_validation_s(self) -> float:
        """Seconds since the present validation began, or that the one took which has just ended."""
        return time.monotonic() - self._validates_since

    def table(self, ending: str = "") -> Table:
        """Return the table of a run that is over; ``ending`` is what has ended it early, empty: nothing has."""
        runner = self._runner
        rows = [("ended", ending or self._own_end())]
        rows += [("to go on", way_on(runner))] if ending else []
        rows += [("time", self._times())]
        rows += [("starts", text)] if (text := _starts(runner)) else []
        log = Path(runner.log_dir) / f"{runner.timestamp}.log"
        rows += [("log", str(log)), ("events", str(Path(runner.work_dir) / EVENTS))]
        rows += [("checkpoints", str(runner.checkpoint_dir))]
        rows += [("report", f"flextrain report {shlex.quote(runner.work_dir)}")]
        return Table("The run", ("", ""), rows)

    def times(self) -> dict[str, float]:
        """Return the seconds of the training by what they went into; the sum is ``all``."""
        whole = time.monotonic() - self._begun
        now = time.monotonic() - self._validates_since if self._is_validating else 0.0
        timers = [hook.waited_s for hook in self._runner.hooks if isinstance(hook, IterTimerHook)]
        parts = {"validation": self._validated_s + now, "saving": self._runner.saving_s - self._saved_s}
        parts |= {"waiting for data": timers[0]} if timers else {}
        return {"training": max(whole - sum(parts.values()), 0.0), **parts, "all": whole}

    def _own_end(self) -> str:
        """Return how a run ended that nothing has interrupted."""
        if not self._runner.train_loop.stop_training:
            return "as configured"
        return f"early{self._position()}, a hook has set train_loop.stop_training"

    def _times(self) -> str:
        times = self.times()
        whole = times.pop("all")
        text = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in times.items())
        return f"{_duration(whole)} in all: {text}"

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        runner = self._runner
        seconds = time.monotonic() - self._begun
        updates, epochs = runner.iter - self._iter, runner.epoch - self._epoch
        if updates:
            done = counted(updates, "iteration")
            done = f"{counted(epochs, 'epoch')} ({done})" if runner.train_loop.by_epoch else done
            yield f"Trained {done} in {_duration(seconds)}{self._speed(updates, seconds - self._validated_s)}"
        for best in self._bests():
            yield f"Best {best.name}: {best.score:.4f}{best.at}{_place(best)}"
        try:
            newest = find_latest(runner.checkpoint_dir)
        except (CheckpointError, OSError) as error:  # training is done, and the folder's storage must not undo it
            runner.logger.warning(f"The last checkpoint is not known: {one_line(error)}")
            return
        if newest is not None and runner.has_saved(newest):
            yield f"Last checkpoint: {newest}, resume=True continues from it"
        elif newest is not None:
            yield f"This run saved no checkpoint to resume from; {newest} was there before it"

    def _speed(self, updates: int, seconds: float) -> str:
        samples = self._samples_per_iteration()
        if seconds <= 0:
            return ""
        if samples is None:
            return f", {updates / seconds:.3g} iterations/s without validation"
        rate = samples * updates / seconds
        digits = max(0, 2 - math.floor(math.log10(rate))) if rate > 0 else 0
        return f", {rate:.{digits}f} samples/s without validation"  # three, without an exponent: 4210, 12.3, 0.123

    def _samples_per_iteration(self) -> float | None:
        """Return the mean over an epoch, whose last batch may be smaller; None if the data does not say."""
        whole = samples_per_iteration(self._runner)
        if whole is None:  # a list of batches: its length counts batches
            return None
        data = getattr(self._runner.train_loop, "data", None)  # a loop of one's own may have none
        if data is not None and data.num_samples and data.epoch_length and not data.drop_last:
            return float(data.num_samples / data.epoch_length)
        return whole

    def _bests(self) -> Iterator[_Best]:
        """Yield the best values that a CheckpointHook kept the weights of; if there are none, that of the first metric."""
        own = self._best
        kept = []
        for hook in self._runner.hooks:
            if isinstance(hook, CheckpointHook):
                for name, entry in hook.best_scores.items():
                    at = own.at if own is not None and (own.name, own.score) == (name, entry["score"]) else ""
                    kept.append(_Best(name, entry["score"], at, hook.out_dir(self._runner) / entry["checkpoint"]))
        yield from kept or ([own] if own is not None else [])

    def _position(self) -> str:
        runner = self._runner
        return f" at epoch {runner.epoch}" if runner.train_loop.by_epoch else f" at iteration {runner.iter}"


def how_it_ended(error: BaseException) -> str:
    """Return in a line what has ended a run early."""
    said = str(getattr(error, "what", "") or ("Ctrl-C" if isinstance(error, KeyboardInterrupt) else told(error) or ""))
    saved = str(getattr(error, "saved", ""))
    if not said:
        said = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
    return f"{said}{f'; {saved}' if saved else ''}"


def _duration(seconds: float) -> str:
    """``0:01:00``, below ten seconds ``1.23 s``."""
    return f"{seconds:.2f} s" if seconds < 10 else str(datetime.timedelta(seconds=round(seconds)))


def _starts(run: Run) -> str:
    """How often training has begun since its first update, if that is more than once."""
    begun = [event.get("iter") for event in read_events(run.work_dir) if event["event"] == "started"]
    first = len(begun) - 1 - begun[::-1].index(0) if 0 in begun else 0
    begun, before = begun[first:], f"{counted(first, 'earlier one')}, after which training began anew" if first else ""
    if len(begun) < 2:
        return f"1; {before}" if before else ""
    shown = ["..."] * (len(begun) > 6) + [str(each) for each in begun[1:][-5:]]
    resumed = f"{len(begun)}, resumed after iteration {', '.join(shown)}"
    return f"{resumed}; {before}" if before else resumed


def _place(best: _Best) -> str:
    if best.checkpoint is None:
        return f', save_best="{best.name}" of CheckpointHook would keep its weights'
    return f", load_from={str(best.checkpoint)!r}" if is_checkpoint(best.checkpoint) else ""


# LineQueue: writes the log lines of a fast loop several at a time.


HOLD_S = 0.05


class LineQueue(logging.Filter):
    """Delays writes that come less than HOLD_S seconds after the last one, and makes them in order.

    A loop of 0.1 ms per iteration makes hundreds of lines per second. Written one by one they cost more than the
    iterations between them, mostly because the model's work has replaced the logger's data in the processor's caches.
    Delayed lines are written together with the first line that comes HOLD_S seconds after the last write, and at the
    latest at the end of an epoch or of the run. Lines further apart than that are not delayed, so a loop that hangs has
    shown all; a faster one has kept back what it would have said in the last HOLD_S seconds.

    It is also a filter of the logger: it writes the pending lines before any other record, which keeps the order. Records of
    other threads and of forked processes, such as a dataloader's workers, leave them to the thread that trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logger: logging.Logger | None = None
        self._owner = _here()
        self._waiting: list[Callable[[], None]] = []
        self._written = 0.0

    def open(self, logger: logging.Logger) -> None:
        """Start to watch ``logger``; before this no line is delayed."""
        self.close()
        self._logger, self._owner = logger, _here()
        logger.addFilter(self)

    def close(self) -> None:
        """Write the pending lines and stop watching; may be called again."""
        try:
            self.flush()
        finally:
            if self._logger is not None:
                self._logger.removeFilter(self)
                self._logger = None

    def put(self, write: Callable[[], None]) -> None:
        """Call ``write`` now, or together with later ones."""
        self._waiting.append(write)
        if self._logger is None or time.monotonic() - self._written > HOLD_S:
            self.flush()

    def flush(self) -> None:
        """Write the pending lines."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for write in waiting:
                write()
            self._written = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, after the pending lines have been written; an error in them does not stop it."""
        if not self._waiting or _here() != self._owner:
            return True
        try:
            self.flush()
        except RuntimeError as error:  # reading scalars from a device that has failed
            assert self._logger is not None, "it is this filter that was asked"
            self._logger.error(f"Pending log lines could not be written: {error}")
        return True


def _here() -> tuple[int, int]:
    """Return the current process and thread."""
    return os.getpid(), threading.get_ident()


@HOOKS.register_module()
class LoggerHook(Hook):
    """Writes the scalars of the message hub as a log line, and as a record to every reporter.

    Scalars are copied from the device to the host only at these iterations.

    Args:
        interval: iterations between two log lines.
        ignore_last: write no line at the end of an epoch whose length is not a multiple of ``interval``, unless it
            would be the only line of the epoch.
        interval_exp_name: iterations between two more lines with the experiment's name; default: only one, at the start.
        out_dir: folder to copy the logs to at the end of the run, as ``<work directory's name>/<timestamp>``.
        out_suffix: endings of the files to copy.
        keep_local: keep the originals of copied files.
        log_metric_by_epoch: use the epoch as the step of validation records, if training has epochs.
        progress_bar: show a progress bar; None: only on an interactive terminal, and not under mpirun, whose output may go
            to a file.
        lines: write the lines of iterations to the console; None: only where there is no bar, which shows the same. The log
            file has them all.
        tables: write a table of the model and the training when it begins, and one of the run when it ends.
        file_client_args, backend_args: not supported.
    """

    priority = "BELOW_NORMAL"

    def __init__(
        self,
        interval: int = 10,
        ignore_last: bool = True,
        interval_exp_name: int | None = None,
        out_dir: str | Path | None = None,
        out_suffix: Sequence[str] | str = (".json", ".log", ".py", ".yaml"),
        keep_local: bool = True,
        file_client_args: dict[str, Any] | None = None,
        log_metric_by_epoch: bool = True,
        backend_args: dict[str, Any] | None = None,
        progress_bar: bool | None = None,
        lines: bool | None = None,
        tables: bool = True,
    ) -> None:
        refuse("LoggerHook", file_client_args=file_client_args, backend_args=backend_args)
        suffixes = (out_suffix,) if isinstance(out_suffix, str) else tuple(out_suffix)
        checks: list[tuple[str, Any, Callable[[Any], bool], str]] = [
            ("interval", interval, _is_count, "1 or more"),
            ("interval_exp_name", 1 if interval_exp_name is None else interval_exp_name, _is_count, "1 or more"),
            ("ignore_last", ignore_last, lambda given: isinstance(given, bool), "True or False"),
            ("lines", False if lines is None else lines, lambda given: isinstance(given, bool), "True, False or None"),
            ("tables", tables, lambda given: isinstance(given, bool), "True or False"),
            ("out_dir", out_dir or "", lambda given: isinstance(given, (str, Path)), "a folder"),
            ("out_suffix", suffixes, lambda given: all(isinstance(each, str) for each in given), "endings of names"),
        ]
        for name, value, fits, allowed in checks:
            if not fits(value):
                raise ConfigError(f"LoggerHook.{name}: {value!r} is not allowed, give {allowed}")
        if not keep_local and out_dir is None:
            raise ConfigError("LoggerHook.keep_local: False has no meaning without out_dir")
        self.interval = interval
        self.ignore_last = ignore_last
        self.interval_exp_name = interval_exp_name
        self.out_dir = None if out_dir is None else Path(out_dir)
        self.out_suffix = suffixes
        self.keep_local = keep_local
        self.log_metric_by_epoch = log_metric_by_epoch
        self.tables = tables
        self._wants_bar, self._wants_lines = progress_bar, lines
        self._record: RunRecord | None = None
        self._bar: ProgressBar | None = None
        self._summary: ClosingSummary | None = None
        self._lines = LineQueue()
        self._is_open = self._has_introduced = False
        self._length = 0
        self._by_epoch = True

    def _open(self, runner: Run) -> None:
        """Open the reporters, once per run, when there is something to report."""
        if self._is_open:
            return
        self._is_open = True
        if not self._has_introduced:  # a program may train, and then test
            self._has_introduced = True
            runner.logger.info("Exp name: %s", runner.experiment_name)
            if not overridden(runner.log_processor, "get_log_after_iter", "get_log_after_epoch"):
                has_lines = not self._shows_bar() if self._wants_lines is None else self._wants_lines
                runner.logger.info(units(runner), extra={ONLY_IN_FILE: not has_lines})
        self._lines.open(runner.logger)
        runner.visualizer.open()

    def _shows_bar(self) -> bool:
        return is_interactive() if self._wants_bar is None else self._wants_bar

    def before_train(self, runner: Run) -> None:
        """Open the reporters and show the progress bar."""
        self._open(runner)
        self._by_epoch = runner.train_loop.by_epoch
        self._summary, self._record = ClosingSummary(runner), RunRecord(runner)
        if runner.rank == 0 and (self.tables or self._record.is_kept):
            self._introduce(runner, self._record)
        if runner.rank == 0 and self._shows_bar():
            self._bar = ProgressBar(runner)
            self._bar.start()

    def _introduce(self, runner: Run, record: RunRecord) -> None:
        """Write what the training is, for readers of the log and for reports."""
        record.update(environment=environment(runner), first_iter=runner.iter)
        try:
            begins = opening(runner, runner.outline)
        except Exception as error:  # a strategy or an optimizer of somebody else's; a table must not end a training
            runner.logger.warning(f"No tables of the training: {type(error).__name__}: {error}")
            return
        record.update(start=begins.as_json())
        for table in begins.tables() if self.tables else ():
            log_table(runner.logger, table)

    def before_train_epoch(self, runner: Run) -> None:
        """Prepare the histories and read the epoch's length, which may differ after a resumed epoch."""
        loop = runner.train_loop
        runner.log_processor.prepare(runner, "train")
        self._length = loop.epoch_length if loop.by_epoch else loop.max_iters

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a line if it is due; every process decides alike, because the loss is averaged over the processes."""
        done = runner.iter + 1
        inner = batch_idx + 1 if self._by_epoch else done
        is_last = inner == self._length
        if self.interval_exp_name is not None and done % self.interval_exp_name == 0:
            runner.logger.info("Exp name: %s", runner.experiment_name)
        if inner % self.interval == 0 or (is_last and (not self.ignore_last or self._length <= self.interval)):
            index = batch_idx if self._by_epoch else runner.train_loop.inner - 1
            log = runner.log_processor.later_log_after_iter(runner, index, "train")
            self._lines.put(partial(self._write, runner, log, done))

    def _write(self, runner: Run, log: Callable[[], tuple[dict[str, Any], str]], step: int) -> None:
        record, line = log()
        self._say(runner, line)
        self._report(runner, record, step, "train")
        if self._record is not None and runner.rank > 0:  # the JSON lines are those of rank 0
            self._record.add_line(record)
        if self._bar is not None:
            self._bar.update(record)

    def _say(self, runner: Run, line: str) -> None:
        """Write the line of an iteration; beside a bar only to the file."""
        is_shown = self._bar is None if self._wants_lines is None else self._wants_lines
        runner.logger.info(line, extra={ONLY_IN_FILE: not is_shown})

    def after_train_epoch(self, runner: Run) -> None:
        """Write the pending lines, so that none waits during a validation or a save."""
        self._lines.flush()

    def before_val_epoch(self, runner: Run) -> None:
        """Write the pending lines and prepare the histories of validation."""
        self._open(runner)
        self._lines.flush()
        if self._summary is not None:
            self._summary.validation_begins()
        runner.log_processor.prepare(runner, "val")

    def before_test_epoch(self, runner: Run) -> None:
        """Prepare the histories of testing."""
        self._open(runner)
        runner.log_processor.prepare(runner, "test")

    def after_val_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """Write a line if it is due; the last batch's is that of the whole pass."""
        if (batch_idx + 1) % self.interval == 0 and not _is_last(runner.val_loop, batch_idx):
            self._say(runner, runner.log_processor.get_log_after_iter(runner, batch_idx, "val")[1])
        if self._bar is not None:
            self._bar.evaluate("val", batch_idx + 1, num_batches(runner, "val"))

    def after_test_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """Write a line if it is due; the last batch's is that of the whole pass."""
        if (batch_idx + 1) % self.interval == 0 and not _is_last(runner.test_loop, batch_idx):
            self._say(runner, runner.log_processor.get_log_after_iter(runner, batch_idx, "test")[1])

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Write a line with the metrics, and a record."""
        record, line = runner.log_processor.get_log_after_epoch(runner, num_batches(runner, "val"), "val")
        runner.logger.info(line)
        counts_epochs = self.log_metric_by_epoch and runner.log_processor.by_epoch
        self._report(runner, record, runner.epoch if counts_epochs else runner.iter, "val")
        if self._summary is not None:
            facts = dict(epoch=runner.epoch, iter=runner.iter, seconds=round(self._summary.last_validation_s(), 3))
            self._summary.validation_ends(metrics)
            if runner.rank == 0:
                append_event(runner.work_dir, "validated", **facts)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Write a line with the metrics, and write them to ``<timestamp>.json`` in the log folder."""
        processor = runner.log_processor
        record, line = processor.get_log_after_epoch(runner, num_batches(runner, "test"), "test", with_non_scalar=True)
        runner.logger.info(line)
        if runner.rank == 0:
            path = Path(runner.log_dir) / f"{runner.timestamp}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(plain_value(record)) + "\n", encoding="utf-8")

    def after_run(self, runner: Run) -> None:
        """Close the reporters and the bar, write the summary of a training, and copy the logs if ``out_dir`` is given."""
        summary, record = self._summary, self._record
        self._close(runner)
        if summary is not None and runner.rank == 0:
            self._conclude(runner, summary, record)
            for line in summary.lines():
                runner.logger.info(line)
        if self.out_dir is not None and runner.rank == 0:
            # The log folder's own name keeps the logs of a second run from replacing those of the first.
            self._copy(runner, self.out_dir / Path(runner.work_dir).name / Path(runner.log_dir).name)

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Restore the terminal, and write the pending lines and the table of the run."""
        summary, record = self._summary, self._record
        self._close(runner)
        if summary is not None and runner.rank == 0:
            self._conclude(runner, summary, record, how_it_ended(exception))

    def _conclude(self, runner: Run, summary: ClosingSummary, record: RunRecord | None, ending: str = "") -> None:
        """Write how training has ended, for readers of the log and for reports."""
        if record is not None:
            record.update(end={"ended": ending, "iter": runner.iter, "seconds": summary.times()})
        if self.tables:
            log_table(runner.logger, summary.table(ending))

    def _report(self, runner: Run, record: dict[str, Any], step: int, mode: str) -> None:
        if runner.rank == 0:
            runner.visualizer.report(record, step, mode)

    def _close(self, runner: Run) -> None:
        self._is_open, self._summary, record, self._record = False, None, self._record, None
        with contextlib.ExitStack() as parts:  # closes in reverse order, and all of them even if one raises
            parts.callback(runner.visualizer.close)
            if self._bar is not None:
                parts.callback(self._bar.stop)
                self._bar = None
            if record is not None:
                parts.callback(record.close)
            parts.callback(self._lines.close)

    def _copy(self, runner: Run, target: Path) -> None:
        source = Path(runner.log_dir)
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.name.endswith(self.out_suffix):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
                if not self.keep_local:
                    path.unlink()
        runner.logger.info("Logs were copied to %s", target)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _is_last(loop: Any, batch_idx: int) -> bool:
    """Whether a pass is known to end with this batch."""
    return length_of(getattr(loop, "dataloader", None)) == batch_idx + 1
