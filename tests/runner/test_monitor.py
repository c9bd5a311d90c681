"""Monitor: watchers are called again and again, and one that fails ends alone, with a word in the log."""

from __future__ import annotations

import logging
import threading

import pytest

from flextrain.runner.health.monitor import Monitor


def test_a_watcher_that_raises_is_called_no_more_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    calls, enough = [], threading.Event()

    def breaks() -> None:
        calls.append("breaks")
        raise ValueError("of its own")

    def goes_on() -> None:
        calls.append("goes on")
        if calls.count("goes on") == 3:
            enough.set()

    monitor = Monitor([breaks, goes_on], period_s=0.001)
    with caplog.at_level(logging.WARNING, "flextrain"):
        monitor.start()
        assert enough.wait(30)
    monitor.stop()
    assert calls.count("breaks") == 1
    assert "breaks ended by ValueError: of its own" in caplog.text


def test_silence_is_the_time_since_the_round_began() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(30)

    monitor = Monitor([hang], period_s=0.001)
    monitor.start()
    assert hangs.wait(30)
    threading.Event().wait(0.2)
    assert monitor.silent_s >= 0.15
    monitor.stop()
    goes_on.set()
