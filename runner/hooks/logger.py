"""LoggerHook: writes log lines, the progress bar, and records for the reporters."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from ...core.events import append_event
from ...core.log_marks import ONLY_IN_FILE
from ...core.overriding import overridden
from ...core.registry import HOOKS
from ..reporting.line_queue import LineQueue
from ..reporting.log_processor import num_batches, units
from ..reporting.log_tables import log_table
from ..reporting.opening import environment, opening
from ..reporting.progress import ProgressBar, is_interactive
from ..reporting.reporter import plain_value
from ..reporting.run_record import RunRecord
from .closing_summary import ClosingSummary, how_it_ended
from .hook import Hook
from .unsupported import refuse

if TYPE_CHECKING:
    from ..run import Run


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
        if self._record is not None:
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
        """Write a line if it is due."""
        if (batch_idx + 1) % self.interval == 0:
            self._say(runner, runner.log_processor.get_log_after_iter(runner, batch_idx, "val")[1])
        if self._bar is not None:
            self._bar.evaluate("val", batch_idx + 1, num_batches(runner, "val"))

    def after_test_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """Write a line if it is due."""
        if (batch_idx + 1) % self.interval == 0:
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
