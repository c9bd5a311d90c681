"""What a run tells of its progress: heartbeats, ``events.jsonl``, and what `flextrain run` hears."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_count = 0


def heartbeat() -> None:
    """Tell the watchdog that this process is getting on; from any thread, as often as one likes.

    Iterations, validation batches and parts of checkpoints count by themselves. Call this in work of your own, such as a
    hook, that takes longer than ``stall_s`` (see ``env_cfg.watchdog``), each time that some of it is done.
    """
    global _count
    _count += 1  # two threads may lose one of two increments; the watchdog asks only whether the number changes


def heartbeats() -> int:
    """How often ``heartbeat`` was called in this process."""
    return _count


# What `flextrain run` and the processes that it starts tell each other: environment variables, and a progress file.


RESTARTS = "FLEXTRAIN_RESUME"
"""Number of restarts so far, not set before the first: training continues from the newest checkpoint of the job."""
JOB = "FLEXTRAIN_JOB"
"""Identifier of the job, from its first start to its end; its checkpoints name it."""
PROGRESS = "FLEXTRAIN_PROGRESS"
"""File of a machine's first process; not set without `flextrain run`."""

_LENGTH = 4096


@dataclass(frozen=True)
class Progress:
    """How far the processes of one start have come.

    Attributes:
        work_dir: the work directory; empty before training.
        began: the iteration at which they began; None before training.
        iter: the number of updates done since the beginning of training.
        beat: a text that changes while the main thread gets on in a training, as the watchdog sees it; empty outside of one.
    """

    work_dir: str = ""
    began: int | None = None
    iter: int = 0
    beat: str = ""


class ProgressFile:
    """Writes a Progress in place, where it can be read while and after the process is killed.

    Args:
        path: the file, which is made anew.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._last: Progress | None = None

    def write(self, progress: Progress) -> None:
        """Write it, unless it is what was written last."""
        if progress != self._last:
            # Of one length, so that nothing of an older one is left, and in one call.
            text = json.dumps(asdict(progress)).ljust(_LENGTH - 1) + "\n"
            os.pwrite(self._file.fileno(), text.encode(), 0)
            self._last = progress

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_progress(path: str | os.PathLike[str]) -> Progress:
    """What a ProgressFile has written; an empty Progress if it has written nothing yet."""
    try:
        return Progress(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError):  # not yet there, or being written: the next look finds it
        return Progress()


def restarts() -> int:
    """How often `flextrain run` has restarted this process's job; 0 without it."""
    given = os.environ.get(RESTARTS, "")
    return int(given) if given.isdigit() else 0


def job() -> str:
    """The identifier of this process's job; empty without `flextrain run`."""
    return os.environ.get(JOB, "")


# ``events.jsonl`` of a work directory: what happened to a run from its first start to its end, over all restarts.


EVENTS = "events.jsonl"

_logger = logging.getLogger("flextrain")


def append_event(work_dir: str | os.PathLike[str], event: str, **facts: Any) -> None:
    """Append ``{"time": seconds since 1970, "event": ..., **facts}`` as one line, with the ``job``; any process may do it at any time.

    A line is written at once and by one call, so that lines of several processes do not mix and a killed process leaves
    none behind. Storage that fails is logged as a warning: an event never ends the run that it is about. What a full
    disk has cut off stays a line of its own.

    Args:
        work_dir: the folder of ``events.jsonl``; it must exist.
        event: one word, such as "started", "preempted" or "save_failed".
        facts: plain values; anything else is written as its text.
    """
    path = Path(work_dir) / EVENTS
    of_job = {"job": job()} if job() else {}
    line = (json.dumps({"time": time.time(), "event": event, **of_job, **facts}, default=str) + "\n").encode()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        _logger.warning('%s: the event "%s" cannot be written, %s', path, event, error.strerror or error)


def read_events(work_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of a work directory in the order in which they were written; lines that were cut off are left out.

    Args:
        work_dir: the folder of ``events.jsonl``; without that file there are none.
    """
    path = Path(work_dir) / EVENTS
    found = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the disk was full, or the line is being written
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event and "time" in event:
                found.append(event)
    return found
