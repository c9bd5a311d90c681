"""Something goes wrong on one rank, and every rank that can says which, where and why."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flextrain.core.base.events import read_events
from flextrain.testing import WorkerGroup

from .faults import Outcome, scenario

pytestmark = pytest.mark.processes

ITS_OWN = "a fault of its own"


def outcomes(folder: Path, workers1: WorkerGroup, fault: str, size: int = 2) -> list[Outcome]:
    """The outcomes of a scenario, in processes forked from a worker, which has imported everything."""
    found: list[Outcome] = workers1.run(scenario, str(folder), fault, size)[0]
    return found


def line(outcome: Outcome, begins: str) -> str:
    """The line of the log that begins so, behind time, level and rank."""
    lines = [line for line in outcome.output.splitlines() if " - ERROR - " in line]
    found = [line for line in lines if line.partition(" - ERROR - ")[2].removeprefix("rank 1 - ").startswith(begins)]
    assert found, outcome.output
    return found[0]


def test_a_hang_in_the_dataset_is_named_by_all(tmp_path: Path, workers1: WorkerGroup) -> None:
    for rank, outcome in enumerate(outcomes(tmp_path, workers1, "dataset")):
        assert outcome.status == 75, outcome.output
        found = line(outcome, "The run stands still for")
        assert "rank 1 waits for nobody in iteration 5, in train_dataloader.dataset (Data.__getitem__)" in found
        assert "faults.py:" in found
        assert f"rank {rank} waits for" in outcome.output
    stalled = [event for event in read_events(tmp_path) if event["event"] == "stalled"]
    assert [(event["iter"], "rank 1 waits for nobody" in event["reason"]) for event in stalled] == [(4, True)]
    logs = [path.read_text() for path in sorted(tmp_path.rglob("*.log"))]
    assert any("time.sleep(10000)  # stuck in the dataset" in log for log in logs)
    assert any("loss.backward(" in log for log in logs)


def test_an_error_of_one_rank_is_the_reason_of_the_others(tmp_path: Path, workers1: WorkerGroup) -> None:
    first, second = outcomes(tmp_path, workers1, "raise")
    assert (first.status, second.status) == (1, 1)
    because = line(first, "Failed because rank 1 failed: ValueError: a fault of its own (in custom_hooks (Fault.")
    assert "iteration 4" in because
    assert "Failed after" in line(second, "Failed")
    assert [event["rank"] for event in read_events(tmp_path) if event["event"] == "failed"] == [1]


@pytest.mark.full
def test_a_store_that_is_stopped_is_named(tmp_path: Path, workers1: WorkerGroup) -> None:
    """The store is in a process of its own, as under torchrun."""
    for rank, outcome in enumerate(outcomes(tmp_path, workers1, "store_stops")):
        assert outcome.status == 75, outcome.output
        found = line(outcome, "The run stands still for 2 s: torchrun or its machine, which keep the job's store, have")
        assert f"rank {rank} is in iteration " in found
        assert "in custom_hooks (StoreEnds.before_train_iter), " in found
        assert "faults.py:" in found


@pytest.mark.full
def test_a_store_that_has_ended_is_named(tmp_path: Path, workers1: WorkerGroup) -> None:
    for outcome in outcomes(tmp_path, workers1, "store_ends"):
        assert outcome.status == 1, outcome.output
        found = line(outcome, "Failed because torchrun or its machine, which keep the job's store, can no longer be")
        assert ", iteration " in found
        assert "in custom_hooks (StoreEnds.before_train_iter), " in found
        assert "faults.py:" in found


@pytest.mark.full
def test_a_hang_in_a_worker_of_the_dataloader_is_named(tmp_path: Path) -> None:
    """In processes forked from a new one: workers forked from a fork of one whose threads have run may hang by themselves."""
    code = f"from tests.runner.faults import scenario; print(repr(scenario({str(tmp_path)!r}, 'worker')))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for outcome in eval(done.stdout, {"Outcome": Outcome}):
        assert outcome.status == 75, outcome.output
        found = line(outcome, "The run stands still for")
        assert "rank 1 waits for nobody in iteration 5, in train_dataloader (worker 0, __getitem__, " in found
        assert "faults.py:" in found
    logs = [path.read_text() for path in sorted(tmp_path.rglob("*_rank1.log"))]
    assert any("Worker 0, innermost first:" in log for log in logs)
    if sys.platform == "linux":  # no worker is left, stuck as it is
        deadline = time.monotonic() + 10
        while (left := _processes_of(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left


def _processes_of(folder: Path) -> list[str]:
    """The processes whose command names the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder) in (command := file.read_text()):
                found.append(f"{file.parent.name}: {command}")
    return found


@pytest.mark.full
def test_different_collectives_are_named(tmp_path: Path, workers1: WorkerGroup) -> None:
    for outcome in outcomes(tmp_path, workers1, "mismatch"):
        assert outcome.status == 75
        found = line(outcome, "The run stands still for")
        assert "rank 0 waits in iteration 5, in backward" in found
        assert "rank 1 waits in iteration 5, in custom_hooks (Fault.before_train_iter)" in found


@pytest.mark.full
def test_a_hang_in_validation_is_named(tmp_path: Path, workers1: WorkerGroup) -> None:
    for outcome in outcomes(tmp_path, workers1, "validation"):
        assert outcome.status == 75
        where = "rank 1 waits for nobody in iteration 6, in custom_hooks (InValidation.before_val_iter) in validation"
        assert where in line(outcome, "The run stands still for")


REASON = f"rank 1 failed: ValueError: {ITS_OWN}"
# (what goes wrong, how rank 0 and rank 1 end, how a line of the one that can still speak begins, what else it says)
ENDS = [
    ("kill", 1, -9, "Failed because rank 1 (process ", "has ended without a word: killed"),
    # Rank 0 keeps the store.
    ("kill0", -9, 1, "Failed because rank 0 (process ", "has ended without a word: killed"),
    ("stop", 75, None, "The run stands still for 2 s: rank 1 (process ", "is stopped (SIGSTOP)"),
    ("stop0", None, 75, "The run stands still", "rank 0 or its machine, which keep the job's store, have not answered"),
    # The launcher keeps the store: rank 0 gathers the signs of life, and another rank does it in its place.
    ("store_apart_stop0", None, 75, "The run stands still for ", "rank 0 (process "),
    ("raise0", 1, 1, f"Failed because rank 0 failed: ValueError: {ITS_OWN}", ""),
    ("validation_raises", 1, 1, f"Failed because {REASON}", ""),
    ("on_exception", 1, 1, f"Failed because {REASON}", ""),
    ("build", 1, 1, "Failed because rank 1 failed: ValueError: cannot be built here", ""),
    ("exit", 1, 3, "Failed because rank 1 ended by sys.exit(3)", ""),
    ("exit_well", 1, 0, "Failed because rank 1 ended by sys.exit(0)", ""),
    ("unnoticed", 1, 1, f"Failed because {REASON}", ""),
]


@pytest.mark.parametrize(
    ("fault", "first", "second", "begins", "says"),
    [pytest.param(*row, id=row[0], marks=() if row[0] == "kill" else pytest.mark.full) for row in ENDS],
)
def test_the_end_of_one_rank_is_named_by_the_other(
    fault: str, first: int | None, second: int | None, begins: str, says: str, tmp_path: Path, workers1: WorkerGroup
) -> None:
    found = outcomes(tmp_path, workers1, fault)
    assert (found[0].status, found[1].status) == (first, second), found[1].output
    said = line(found[1 if fault.endswith("0") else 0], begins)
    assert says in said
    assert fault != "store_apart_stop0" or "is stopped (SIGSTOP)" in said


@pytest.mark.full
@pytest.mark.deepspeed
def test_averages_leave_the_model_without_a_collective_if_one_rank_fails(tmp_path: Path, workers1: WorkerGroup) -> None:
    """EMAHook under ZeRO-3 in bfloat16: no rank waits for the time limit of collectives, which a scenario does not reach."""
    first, second = outcomes(tmp_path, workers1, "ema")
    assert (first.status, second.status) == (1, 1), first.output + second.output
    line(first, f"Failed because rank 1 failed: ValueError: {ITS_OWN}")
    assert "EMAHook.on_exception" not in first.output + second.output
