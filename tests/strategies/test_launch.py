"""Starting several processes from Python."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.base.errors import ConfigError, LaunchError
from flextrain.strategies import launch

JOB = """
import os
import torch
from flextrain import DDPStrategy

def train(start, *, step):
    strategy = DDPStrategy(device="cpu")
    strategy.join()
    total = torch.tensor([start + step * strategy.topology.rank])
    torch.distributed.all_reduce(total)
    facts = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    strategy.leave()
    return total.item(), strategy.launch.launcher, torch.get_num_threads(), facts

def fail():
    if os.environ["RANK"] == "1":
        raise KeyError("what went wrong")
    torch.distributed.init_process_group("gloo")  # waits for the other
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that other processes can import."""
    (tmp_path / "job_for_launch.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    import job_for_launch

    return job_for_launch


@pytest.mark.distributed
def test_processes_meet_and_rank_0_answers(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    total, launcher, num_threads, facts = launch(job.train, 2, 5, step=10)
    assert (total, launcher) == (20, "pytorch")
    assert num_threads == max(1, (os.cpu_count() or 1) // 2)
    assert facts == dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert "RANK" not in os.environ


@pytest.mark.distributed
def test_a_failing_process_is_named_with_its_traceback(job: Any) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(job.fail, 2, start_method="fork")
    assert str(caught.value).startswith("process 1 of 2 failed: ")
    assert "in fail" in str(caught.value)
    assert "KeyError: 'what went wrong'" in str(caught.value)


@pytest.mark.distributed
def test_fork_takes_functions_that_cannot_be_imported() -> None:
    threads = torch.get_num_threads()
    assert launch(lambda text: text + os.environ["RANK"], 2, "rank ", start_method="fork") == "rank 0"
    assert torch.get_num_threads() == threads
    with pytest.raises(LaunchError, match=r"process \d of 2 failed: .*exit code 3"):
        launch(lambda: os._exit(3), 2, start_method="fork")


@pytest.mark.distributed
def test_a_forked_process_ends_at_once_when_it_is_asked_to() -> None:
    """With a handler of Python's, such as that of a runner made before, SIGTERM waits for torch's waiting to return."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert launch(lambda: signal.getsignal(signal.SIGTERM), 1, start_method="fork") == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_spawn_says_what_it_needs() -> None:
    with pytest.raises(LaunchError, match='^fn: cannot be sent to another process, .*, or give start_method="fork"$'):
        launch(lambda: None, 2)


def test_at_least_one_process() -> None:
    with pytest.raises(ConfigError, match="^nprocs: 0 is not allowed, give 1 or more$"):
        launch(print, 0)
