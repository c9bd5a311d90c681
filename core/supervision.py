"""What `flextrain run` and the processes that it starts tell each other: environment variables, and a progress file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

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
    """

    work_dir: str = ""
    began: int | None = None
    iter: int = 0


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
