"""PendingSave: a save that a thread completes while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Protocol

_logger = logging.getLogger("flextrain")


class Save(Protocol):
    """A save whose state is copied."""

    path: Path

    def finish(self) -> None:
        """Write and complete it."""


class PendingSave:
    """A save that a thread completes in the background; the interpreter waits for it before it exits."""

    def __init__(self, save: Save, logs_failure: bool) -> None:
        self.path = save.path
        self.seconds = 0.0
        """Seconds that writing took; set when the save is done."""
        self._error: Exception | None = None
        self._logs_failure = logs_failure
        self._thread = threading.Thread(target=self._run, args=(save,), name="flextrain-save")
        self._thread.start()

    def _run(self, save: Save) -> None:
        # Release the GIL, for which start() waits: this thread would hold it for some milliseconds.
        time.sleep(0.001)
        begin = time.perf_counter()
        try:
            save.finish()
        except Exception as error:
            if self._logs_failure:  # a script may never call wait()
                _logger.error("%s", error)
            self._error = error
        self.seconds = time.perf_counter() - begin

    def is_done(self) -> bool:
        """Whether the save is done, successful or not; does not wait."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until the save is done, successful or not."""
        self._thread.join()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; return its path.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self.path
