"""The logger of a run: its handlers and the format of its lines."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from ...core.errors import ConfigError, one_of, suggest
from ...core.log_marks import ON_TERMINAL, ONLY_IN_FILE, TRACEBACK_IN_FILE
from .log_file import EndFile, LogFile

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
