"""Real launchers on pretended machines. ``make test-cluster`` installs what these tests need; what is missing skips them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .machines import Machines, environment
from .machines import missing as no_machines
from .slurm_service import Slurm
from .slurm_service import missing as no_slurm

JOB = Path(__file__).parent / "job.py"
ITERATIONS = 40
"""Of a job that is interrupted; others have fewer."""

Losses = list[list[float]]
"""By rank and update."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")
            item.add_marker("processes")


@pytest.fixture(scope="session")
def all_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two pretended machines for the session; none of their processes and namespaces is left behind."""
    if (reason := no_machines()) is not None:
        pytest.skip(reason)
    machines = Machines(2, tmp_path_factory.mktemp("machines"))
    try:
        yield machines
    finally:
        left = machines.close()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def the_slurm(all_nodes: Machines) -> Iterator[Slurm]:
    if (reason := no_slurm()) is not None:
        pytest.skip(reason)
    service = Slurm(all_nodes, all_nodes.folder / "slurm")
    yield service
    service.close()


@pytest.fixture
def nodes(all_nodes: Machines, request: pytest.FixtureRequest) -> Iterator[Machines]:
    """Two pretended machines, of which a test leaves no process behind."""
    before = set(all_nodes.processes())
    yield all_nodes
    left = all_nodes.left(before)
    assert not left, f"processes left behind: {list(left.values())}"


@pytest.fixture
def slurm(the_slurm: Slurm, nodes: Machines) -> Iterator[Slurm]:
    """A Slurm on two pretended machines, of which a test leaves no job behind."""
    yield the_slurm
    the_slurm.end_jobs()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Losses]:
    """``reference("fsdp")``: the losses of the job under torchrun, with two processes on one machine."""
    found: dict[str, Losses] = {}

    def losses(strategy: str) -> Losses:
        if strategy not in found:
            folder = tmp_path_factory.mktemp(strategy)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            job = [JOB, "--work-dir", folder, "--strategy", strategy, "--iters", ITERATIONS]
            ended = subprocess.run(
                [sys.executable, *torchrun, *map(str, job)],
                env=environment(),
                timeout=180,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert ended.returncode == 0, ended.stdout[-4000:]
            found[strategy] = losses_in(folder)
            assert [len(of_rank) for of_rank in found[strategy]] == [ITERATIONS] * 2
        return found[strategy]

    return losses


def lines_in(folder: Path, rank: int) -> list[dict[str, float]]:
    """What a rank of the job has written about its updates, as far as it has."""
    file = folder / f"losses.{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses_in(folder: Path) -> Losses:
    """The losses of a job that was not interrupted; fails if an update is there twice or not at all."""
    by_rank = []
    for rank in range(2):
        lines = lines_in(folder, rank)
        assert [line["iter"] for line in lines] == list(range(1, len(lines) + 1))
        by_rank.append([line["loss"] for line in lines])
    return by_rank


def first(losses: Losses, count: int) -> Losses:
    return [of_rank[:count] for of_rank in losses]
