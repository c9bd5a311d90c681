"""``events.jsonl``: lines of several processes do not mix, and storage that fails ends nothing."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from flextrain.core.base.events import EVENTS, append_event, read_events

FORK = multiprocessing.get_context("fork")


def test_lines_come_in_order_with_their_facts(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    before = time.time()
    append_event(tmp_path, "started", rank=0, iter=3)
    append_event(tmp_path, "failed", reason='a "line"\nand another', path=tmp_path)
    first, second = read_events(tmp_path)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"event": "started", "rank": 0, "iter": 3}
    assert second == {"event": "failed", "reason": 'a "line"\nand another', "path": str(tmp_path)}


def append_many(folder: Path, rank: int) -> None:
    for number in range(50):
        append_event(folder, "tried", rank=rank, number=number, padding="-" * 1000)


@pytest.mark.processes
def test_processes_write_at_once(tmp_path: Path) -> None:
    processes = [FORK.Process(target=append_many, args=(tmp_path, rank)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    events = read_events(tmp_path)
    for rank in range(4):
        assert [event["number"] for event in events if event["rank"] == rank] == list(range(50))


def test_a_folder_that_is_gone_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flextrain"):
        append_event(tmp_path / "gone", "started")
    (record,) = caplog.records
    where = tmp_path / "gone" / EVENTS
    assert record.getMessage() == f'{where}: the event "started" cannot be written, No such file or directory'


def test_what_a_full_disk_cut_off_takes_no_other_event_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append_event(tmp_path, "started", iter=0)
    write = os.write
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "flextrain"):
        logging.getLogger("flextrain").addHandler(caplog.handler)
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))  # as the system does it
        append_event(tmp_path, "save_failed", iter=10)
        logging.getLogger("flextrain").removeHandler(caplog.handler)
    assert 'the event "save_failed" cannot be written, No space left on device' in caplog.text
    append_event(tmp_path, "failed", iter=12)
    append_event(tmp_path, "ended")
    assert [event["event"] for event in read_events(tmp_path)] == ["started", "failed", "ended"]
    assert len((tmp_path / EVENTS).read_text().splitlines()) == 4
