"""``events.jsonl`` of a work directory: what happened to a run from its first start to its end, over all restarts."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"

_logger = logging.getLogger("flextrain")


def append_event(work_dir: str | os.PathLike[str], event: str, **facts: Any) -> None:
    """Append ``{"time": seconds since 1970, "event": ..., **facts}`` as one line; any process may do it at any time.

    A line is written at once and by one call, so that lines of several processes do not mix and a killed process leaves
    none behind. Storage that fails is logged as a warning: an event never ends the run that it is about. What a full
    disk has cut off stays a line of its own.

    Args:
        work_dir: the folder of ``events.jsonl``; it must exist.
        event: one word, such as "started", "preempted" or "save_failed".
        facts: plain values; anything else is written as its text.
    """
    path = Path(work_dir) / EVENTS
    line = (json.dumps({"time": time.time(), "event": event, **facts}, default=str) + "\n").encode()
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
    """The events of a work directory in the order in which they were written; lines that were cut off are left out."""
    try:
        text = (Path(work_dir) / EVENTS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # the disk was full, or the line is being written
            continue
        if isinstance(event, dict) and "event" in event and "time" in event:
            found.append(event)
    return found
