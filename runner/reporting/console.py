"""The logger of a run: its handlers and the format of its lines."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from ...core.base.errors import ON_TERMINAL, ONLY_IN_FILE, TRACEBACK_IN_FILE, ConfigError, one_of, suggest

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# LogFile and EndFile: log files that do not end a run when their storage fails.


class LogFile(logging.FileHandler):
    """Writes records to a file. If its storage fails, one line on stderr says so until it works again.

    Args:
        path: the file.
        delay: create the file with the first record.
    """

    def __init__(self, path: Path, delay: bool = False) -> None:
        super().__init__(path, encoding="utf-8", delay=delay)
        self._fails = self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._failed = False
        try:
            super().emit(record)
        except OSError:  # opening the file again
            self.handleError(record)
        self._fails = self._failed

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Tell of storage that fails in one line, of other errors as logging does."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self._fails:
            sys.stderr.write(f"flextrain: {self.baseFilename}: log lines are lost, {error.strerror or error}\n")
        self._failed = True

    def close(self) -> None:
        """Close the file; what a full disk did not take is lost, as ``handleError`` has said."""
        try:
            super().close()
        except OSError as error:
            if not self._fails:
                sys.stderr.write(f"flextrain: {self.baseFilename}: log lines are lost, {error.strerror or error}\n")


class EndFile(LogFile):
    """Writes how this process ended, and nothing else.

    Args:
        path: the log file, which is created only then.
        level: the lowest level of a record to write.
    """

    def __init__(self, path: Path, level: int) -> None:
        super().__init__(path, delay=True)
        self.setLevel(level)
        self.addFilter(lambda record: getattr(record, TRACEBACK_IN_FILE, False))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one end."""
        try:
            Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
            super().emit(record)
        except OSError:  # making the folder, or opening the file
            self.handleError(record)


NAME = "flextrain"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # takes no type argument before Python 3.11


class LineFormatter(logging.Formatter):
    """Formats one line per record; the text is made once for all handlers, and the time once per second.

    Args:
        prefix: text before the message.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        self._second, self._stamp = -1, ""
        self._record: logging.LogRecord | None = None
        self._text = ""

    def format(self, record: logging.LogRecord) -> str:
        """Return ``11/21 10:33:15 - flextrain - INFO - message``, with the traceback of an exception below it."""
        if record is not self._record:
            second = int(record.created)
            if second != self._second:
                self._second, self._stamp = second, time.strftime("%m/%d %H:%M:%S", time.localtime(second))
            self._text = f"{self._stamp} - {NAME} - {record.levelname} - {self._prefix}{super().format(record)}"
            self._record = record
        return self._text


class ConsoleHandler(_StreamHandler):
    """Writes to the current ``sys.stdout``, and above the progress bar while one is shown."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.live: Console | None = None
        self._folds = not is_passed_on()
        self.addFilter(lambda record: not getattr(record, ONLY_IN_FILE, False))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback that belongs only in the file; for a terminal short, and folded."""
        text = super().format(record)
        text = text.partition("\n")[0] if getattr(record, TRACEBACK_IN_FILE, False) else text
        if not self._draws():
            return text
        stamp, named, rest = text.partition(f" - {NAME} - ")
        text = f"{stamp} {rest.removeprefix('INFO - ')}" if named else text
        return folded(text, shutil.get_terminal_size().columns if self.live is None else self.live.width)

    def _draws(self) -> bool:
        """Whether somebody sees the console, whose width then counts."""
        is_terminal = getattr(sys.stdout, "isatty", bool)  # a program may have put an object with only write() there
        return self._folds and (self.live is not None or is_terminal())

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or a table."""
        table = getattr(record, ON_TERMINAL, None)
        if table is not None and self._draws():
            try:
                console = Console(file=sys.stdout, markup=False, emoji=False) if self.live is None else self.live
                console.print(table.drawn())
            except Exception:  # see below
                self.handleError(record)
            return
        if self.live is None:
            self.stream = sys.stdout
            super().emit(record)
            return
        try:
            # Lines are folded already; what is longer is a path or the like, to be copied as a whole.
            self.live.print(self.format(record), soft_wrap=True, markup=False, highlight=False, emoji=False)
        except Exception:  # by logging's contract a handler reports its own failure and never raises
            self.handleError(record)


_INDENT = "    "


def folded(text: str, width: int) -> str:
    """Return text whose lines fit a terminal: broken between fields, else between words, never in a word."""
    lines = []
    for line in text.split("\n"):
        while len(line) > width:
            at = line.rfind("  ", len(_INDENT) + 1, width + 2)  # two spaces separate the fields of a log line
            if at < width // 2:
                at = line.rfind(" ", len(_INDENT) + 1, width + 1)
            if at == -1:
                at = line.find(" ", width)
            if at == -1:
                break
            lines.append(line[:at].rstrip())
            line = _INDENT + line[at:].lstrip()
        lines.append(line)
    return "\n".join(lines)


def is_passed_on() -> bool:
    """True if a launcher, Open MPI or PRRTE, gives every process a pseudo-terminal of its own.

    What it passes on from there may go to a file, which no process can find out.
    """
    return "OMPI_COMM_WORLD_RANK" in os.environ or "PMIX_RANK" in os.environ


def is_interactive(console: Console | None = None) -> bool:
    """True if standard output is a terminal on which a line can be redrawn.

    Under ``mpirun`` it is taken for none, because what mpirun passes on may go to a file.
    ``LoggerHook(progress_bar=True)`` shows a bar there too.
    """
    console = console or Console(markup=False, emoji=False)
    if is_passed_on():
        return False
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter


def setup_logger(log_level: int | str = "INFO", log_file: str | Path | None = None, rank: int = 0) -> logging.Logger:
    """Configure and return the logger ``flextrain`` of this process.

    Rank 0 writes lines of ``log_level`` and above to the console and to ``log_file``. Other ranks write errors to the
    console. How such a rank ended, by a failure, a signal or sys.exit, is written to a file of its own beside it
    (``<name>_rank3.log``), a failure to ``log_file`` too; on another machine, to the same paths there. Handlers of an
    earlier run in the same process are replaced, and lines are not passed on to the root logger.
    """
    level = check_log_level(log_level)
    logger = logging.getLogger(NAME)
    close_logger()
    logger.setLevel(level if rank == 0 else logging.ERROR)
    logger.propagate = False
    handlers: list[logging.Handler] = [ConsoleHandler()]
    if log_file is not None and rank == 0:
        path = Path(log_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(LogFile(path))
    elif log_file is not None:
        path = Path(log_file)
        handlers[0].setLevel(logging.ERROR)  # a record of an end goes past the logger's level
        handlers.append(EndFile(path, logging.ERROR))
        handlers.append(EndFile(path.with_name(f"{path.stem}_rank{rank}{path.suffix}"), logging.DEBUG))
    formatter = LineFormatter("" if rank == 0 else f"rank {rank} - ")
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.set_name(NAME)
        logger.addHandler(handler)
    return logger


def close_logger(folder: str | Path | None = None) -> None:
    """Remove and close the handlers that ``setup_logger`` added; other handlers stay.

    Args:
        folder: only those of the run whose log is in this folder; nothing happens if a later run has replaced them.
    """
    logger = logging.getLogger(NAME)
    own = [handler for handler in logger.handlers if handler.get_name() == NAME]
    files = [Path(handler.baseFilename) for handler in own if isinstance(handler, logging.FileHandler)]
    if folder is not None and files and Path(folder).absolute() not in {file.parent for file in files}:
        return
    for handler in own:
        logger.removeHandler(handler)
        handler.close()


def console_handler() -> ConsoleHandler | None:
    """Return the handler that writes to the console; None before ``setup_logger``."""
    return next((h for h in logging.getLogger(NAME).handlers if isinstance(h, ConsoleHandler)), None)


def check_log_level(level: int | str) -> int:
    """Return the number of a log level.

    Raises:
        ConfigError: the level does not exist.
    """
    if isinstance(level, str):
        if level.upper() not in _LEVELS:
            raise ConfigError(f'log_level: "{level}" is not allowed, choose {one_of(_LEVELS)}{suggest(level, _LEVELS)}')
        return int(getattr(logging, level.upper()))
    if isinstance(level, bool) or not isinstance(level, int):
        raise ConfigError(f"log_level: {level!r} is not allowed, choose {one_of(_LEVELS)}")
    return level


# Tables in the log: drawn on a terminal, plain lines in files and pipes.


@dataclass(frozen=True)
class Table:
    """A table for the log.

    Attributes:
        title: its first line.
        columns: headings; empty ones are not shown.
        rows: the cells.
        right: indices of the columns of numbers.
        last_is_sum: whether a rule separates the last row from the others.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    last_is_sum: bool = False

    def as_lines(self) -> str:
        """Return the title and a line for each row."""
        rows = [self.columns, *self.rows] if any(self.columns) else list(self.rows)
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        lines = [f"{self.title}:"]
        for row in rows:
            cells = (
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append(f"  {'  '.join(cells)}".rstrip())
        return "\n".join(lines)

    def drawn(self) -> RichTable:
        """Return the table for a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title, style="bold"),
            title_justify="left",
            box=SIMPLE_HEAD,
            show_header=any(self.columns),
            pad_edge=False,
        )
        for i, column in enumerate(self.columns):
            is_label = not any(self.columns) and i == 0
            table.add_column(
                Text(column),
                justify="right" if i in self.right else "left",
                style="dim" if is_label else None,
                no_wrap=i in self.right or is_label,
                overflow="fold",
            )
        for i, row in enumerate(self.rows):
            table.add_row(*map(Text, row), end_section=self.last_is_sum and i == len(self.rows) - 2)
        return table


def log_table(logger: logging.Logger, table: Table) -> None:
    """Log a table: drawn where the console is a terminal, elsewhere as lines."""
    logger.info(table.as_lines(), extra={ON_TERMINAL: table})
