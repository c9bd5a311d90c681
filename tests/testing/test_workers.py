"""WorkerGroup: what the ranks see, and that no failure hangs or poisons the next call."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from flextrain.core.base.errors import ConfigError
from flextrain.core.comm import collectives
from flextrain.testing import WorkerError, WorkerGroup
from flextrain.testing import workers as workers_module

pytestmark = pytest.mark.distributed


def environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "FROM_CALLER")
    return {name: os.environ.get(name, "") for name in names}


def sum_of_ranks(groups: int = 1, leave: bool = False) -> list[float]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sums = []
    for index in range(groups):
        if index:
            collectives.destroy_process_group()
        collectives.init_process_group("gloo", rank=rank, world_size=world_size, init_method="env://", timeout_s=30)
        sums.append(collectives.all_reduce(torch.tensor(rank + 1.0)).item())
    if not leave:
        collectives.destroy_process_group()
    return sums


def sum_of_ranks_by_torch() -> float:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def visible_accelerators() -> tuple[str | None, bool]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.accelerator.is_available()


def pid() -> int:
    return os.getpid()


def parent() -> tuple[int, bool]:
    """The process that this one was forked from, and whether a module is there that nobody here has imported."""
    return os.getppid(), "this" in sys.modules


def is_clean() -> tuple[bool, bool, str, float, float, torch.dtype, int, int]:
    return (
        dist.is_initialized(),
        torch.is_grad_enabled(),
        os.environ.get("LEFT_BEHIND", ""),
        random.random(),
        torch.rand(()).item(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        logging.getLogger("flextrain").level,
    )


def make_a_mess(folder: str) -> None:
    os.environ["LEFT_BEHIND"] = "yes"
    os.environ.pop("RANK")
    os.chdir(folder)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    random.seed(5)
    torch.manual_seed(5)
    logging.getLogger("flextrain").setLevel(logging.ERROR)


def raise_on(rank: int, error: Exception) -> int:
    if int(os.environ["RANK"]) == rank:
        print("a clue from the failing rank")
        raise error
    return rank


def fail_inside_a_collective() -> None:
    dist.init_process_group("gloo")
    fail_inside_a_collective_of_a_group()


def leave_before_failing() -> None:
    dist.init_process_group("gloo")
    try:
        fail_inside_a_collective_of_a_group()
    finally:
        dist.destroy_process_group()
        time.sleep(0.2)


def fail_inside_a_collective_of_a_group() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one rank gave up")
    dist.all_reduce(torch.ones(1))


def hang() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        wait_in_a_collective_to_find()
    sleep_in_a_function_to_find()


def wait_in_a_collective_to_find() -> None:
    dist.all_reduce(torch.ones(1))


def sleep_in_a_function_to_find() -> None:
    time.sleep(300)


def die() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
    sleep_in_a_function_to_find()


def unpicklable_result() -> threading.Lock:
    return threading.Lock()


def read_with_loader_processes() -> list[int]:
    return [int(item) for batch in DataLoader(list(range(4)), batch_size=2, num_workers=1) for item in batch]


class NeedsTwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def test_ranks_see_the_variables_of_torchrun_and_those_of_the_caller(
    workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_CALLER", "here")
    first, second = workers2.run(environment)
    assert first == {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "FROM_CALLER": "here",
    }  # fmt: skip
    assert second == {**first, "RANK": "1", "LOCAL_RANK": "1"}


def test_ranks_do_not_see_accelerators(workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert workers2.run(visible_accelerators) == [("", False)] * 2


def test_collectives_work_call_after_call_in_the_same_processes(workers2: WorkerGroup) -> None:
    pids = workers2.run(pid)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert workers2.run(sum_of_ranks) == [[3.0], [3.0]]
    assert workers2.run(sum_of_ranks_by_torch) == [3.0, 3.0]
    assert workers2.run(sum_of_ranks, 3, leave=True) == [[3.0] * 3] * 2
    assert workers2.run(sum_of_ranks) == [[3.0], [3.0]]
    assert workers2.run(pid) == pids


def kept_groups(count: int) -> int:
    dist.init_process_group("gloo")
    for _ in range(count):
        dist.new_group()
    _KEPT.extend(dist.distributed_c10d._world.pg_map)  # as the code that torch has compiled does
    return os.getpid()


_KEPT: list[Any] = []


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.11", reason="the threads of gloo's have no names before")
def test_processes_with_many_forgotten_groups_are_replaced() -> None:
    with WorkerGroup(2) as group:
        first = group.run(kept_groups, 0)
        assert group.run(pid) == first  # a few do no harm
        group.run(kept_groups, 8)
        assert not set(group.run(pid)) & set(first)


def test_a_group_of_three(workers3: WorkerGroup) -> None:
    assert workers3.run(sum_of_ranks) == [[6.0]] * 3


def test_each_call_begins_clean(workers2: WorkerGroup, tmp_path: Path) -> None:
    before = workers2.run(is_clean)
    workers2.run(make_a_mess, str(tmp_path))
    workers2.run(sum_of_ranks, leave=True)
    after = workers2.run(is_clean)
    assert after == before
    assert after[0] == after[1]
    assert after[0][:3] == (False, True, "")
    assert after[0][5:] == (torch.float32, 1, logging.NOTSET)


def test_the_first_failing_rank_is_reported_with_its_traceback_and_cause(workers2: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"raise_on: rank 1 of 2 failed, .*ConfigError: lr: wrong") as caught:
        workers2.run(raise_on, 1, ConfigError("lr: wrong"))
    assert caught.value.rank == 1
    assert not caught.value.timed_out
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "in raise_on" in str(caught.value)
    assert "a clue from the failing rank" in str(caught.value).partition("rank 1 printed\n")[2]


def test_an_exception_that_cannot_be_pickled_is_still_told(workers2: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="NeedsTwoArguments: onetwo") as caught:
        workers2.run(raise_unpicklable)
    assert caught.value.__cause__ is None


def raise_unpicklable() -> None:
    raise NeedsTwoArguments("one", "two")


def leave_a_trace_and_fail() -> None:
    sys.left_behind = True  # type: ignore[attr-defined]
    raise_unpicklable()


def finds_a_trace() -> bool:
    return hasattr(sys, "left_behind")


def test_what_a_failed_call_has_left_is_not_there_for_the_next(workers2: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="NeedsTwoArguments"):
        workers2.run(leave_a_trace_and_fail)
    assert workers2.run(finds_a_trace) == [False, False]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long an answer would have been waited for, each time that one was."""
    found: list[float] = []

    def wait(ends: Sequence[Any], timeout: float) -> list[Any]:
        found.append(timeout)
        return really_wait(ends, timeout)

    really_wait = workers_module.wait
    monkeypatch.setattr(workers_module, "wait", wait)
    return found


@pytest.mark.parametrize("fail", [fail_inside_a_collective, leave_before_failing])
def test_a_rank_left_alone_in_a_collective_does_not_hang(
    workers2: WorkerGroup, waits: list[float], fail: Callable[[], None]
) -> None:
    workers2.run(sum_of_ranks)  # which starts the workers, if that is to be done
    waits.clear()
    with pytest.raises(WorkerError, match="rank 1 of 2 failed, ValueError: one rank gave up"):
        workers2.run(fail)
    first, *later = waits  # one wait, if the other rank's answer came with the first
    assert first > workers_module.GRACE_S
    assert all(wait <= workers_module.GRACE_S for wait in later)
    assert workers2.run(sum_of_ranks) == [[3.0], [3.0]]


def test_deaths_and_hangs_end_in_time_and_the_next_call_works(waits: list[float]) -> None:
    with WorkerGroup(2) as group:
        with pytest.raises(WorkerError, match=r"rank 1 of 2 failed, the process ended with exit code -11") as caught:
            group.run(die)
        assert "Segmentation fault" in str(caught.value)
        assert re.search(r"rank 0 was at(.|\n)*in sleep_in_a_function_to_find", str(caught.value))
        assert group.run(sum_of_ranks) == [[3.0], [3.0]]

        pids = group.run(pid)
        group.timeout_s = 2
        waits.clear()
        with pytest.raises(WorkerError, match="no answer from rank 0, 1 of 2 within 2 s") as caught:
            group.run(hang)
        assert waits[0] <= 2
        assert len(waits) < 5  # those after the first are for what the processes waited for a processor
        assert caught.value.timed_out
        assert "in wait_in_a_collective_to_find" in str(caught.value)
        assert "in sleep_in_a_function_to_find" in str(caught.value)
        for number in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)


def compute(seconds: float) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how long processes wait for a processor")
def test_a_call_that_was_interrupted_answers_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerGroup(2) as group:
        assert group.run(os.getenv, "RANK") == ["0", "1"]
        with monkeypatch.context() as patch:
            patch.setattr(group, "_queued_s", interrupted)
            with pytest.raises(KeyboardInterrupt):
                group.run(os.getenv, "RANK")
        assert group.run(os.getenv, "WORLD_SIZE") == ["2", "2"]


def interrupted() -> dict[int, float]:
    raise KeyboardInterrupt


def test_a_busy_processor_is_no_hang() -> None:
    """Four processes with one processor: each computes for half of the limit, and ends after twice the limit."""
    with WorkerGroup(4) as group:
        group.run(pid)
        group.timeout_s = 2
        group.run(compute, 1.0)


def test_results_that_cannot_travel_are_an_error(workers2: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="cannot pickle"):
        workers2.run(unpicklable_result)


@pytest.mark.full
def test_processes_are_forked_from_one_unless_they_see_accelerators(workers2: WorkerGroup) -> None:
    with WorkerGroup(1, imports=["this"]) as group, WorkerGroup(1, accelerators=True) as with_accelerators:
        ((forked_from, imported),) = group.run(parent)
        assert [pid for pid, _ in workers2.run(parent)] == [forked_from] * 2
        assert imported
        assert forked_from != os.getpid()
        assert with_accelerators.run(parent) == [(os.getpid(), False)]


@pytest.mark.full
def test_data_loaders_may_start_processes(workers2: WorkerGroup) -> None:
    assert workers2.run(read_with_loader_processes) == [[0, 1, 2, 3]] * 2


def test_functions_of_modules_on_no_path(workers2: WorkerGroup, tmp_path: Path) -> None:
    import importlib.util

    file = tmp_path / "on_no_path.py"
    file.write_text("def answer(x):\n    return x * 2\n")
    spec = importlib.util.spec_from_file_location("on_no_path", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_no_path"] = module
    try:
        spec.loader.exec_module(module)
        assert workers2.run(module.answer, 4) == [8, 8]
    finally:
        del sys.modules["on_no_path"]


@pytest.mark.full
@pytest.mark.slow
def test_a_script_may_use_its_own_functions_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from flextrain.testing import WorkerGroup, run_distributed\n"
        "def where():\n    return int(os.environ['RANK']), os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    group = WorkerGroup(1)\n"
        "    print(*(pid for _, pid in group.run(where)))\n"
        "    print(*(pid for _, pid in run_distributed(where, 1, 60)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
    for number in done.stdout.split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)
