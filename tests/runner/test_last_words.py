"""The last words of a process that a thread ends: a save may end first, and a log that is stuck keeps nobody."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.checkpoint import save as saving
from flextrain.core.checkpoint import save_in_background
from flextrain.runner.health import monitor as last_words

from ..waiting import wait_until


def test_a_save_in_the_background_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    goes_on, write = threading.Event(), saving.write_shard

    def write_late(*args: Any) -> Any:
        goes_on.wait()
        return write(*args)

    monkeypatch.setattr(saving, "write_shard", write_late)
    pending = save_in_background(tmp_path / "iter_1", {"a": torch.zeros(3)})
    leaving = threading.Thread(target=last_words.leave, args=(75,))
    leaving.start()
    leaving.join(1.2)
    assert statuses == [], "the save has not ended"
    goes_on.set()
    leaving.join()
    assert (statuses, pending.is_done()) == ([75], True)
    assert pending.wait().is_dir()


def test_a_log_that_is_stuck_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the main thread is killed while it writes: its lock is never released."""
    monkeypatch.setattr(last_words, "_LOGGING_S", 0.05)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger("flextrain"), "handlers", [handler])
    handler.acquire()
    leaving = threading.Thread(target=last_words.leave, args=(143,))
    leaving.start()
    wait_until(lambda: statuses)
    assert statuses == [143]
    handler.release()
    leaving.join()
