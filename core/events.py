"""``events.jsonl`` of a work directory: what happened to a run from its first start to its end, over all restarts."""

from __future__ import annotations

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
    none behind. Storage that fails is logged as a warning: an event never ends the run that it is about.

    Args:
        work_dir: the folder of ``events.jsonl``; it must exist.
        event: one word, such as "started", "preempted" or "save_failed".
        facts: plain values; anything else is written as its text.
    """
    path = Path(work_dir) / EVENTS
    line = json.dumps({"time": time.time(), "event": event, **facts}, default=str) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        _logger.warning('%s: the event "%s" cannot be written, %s', path, event, error.strerror or error)


def read_events(work_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a work directory in the order in which they were written; empty if there are none."""
    try:
        text = (Path(work_dir) / EVENTS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
