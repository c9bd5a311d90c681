"""The device of these tests: the accelerator that torch finds, or what FLEXTRAIN_TEST_DEVICE names, such as "cpu"."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup

from .sharing import Sharing, way_to_share

HERE = Path(__file__).parent


def kind_of_device() -> str | None:
    """The type of the device that is tested; None: there is none."""
    asked = os.environ.get("FLEXTRAIN_TEST_DEVICE")
    if asked or not torch.accelerator.is_available():
        return asked
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "accelerator: the CPU will not do in its place")
    config.addinivalue_line("markers", "cuda: for CUDA only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kind = kind_of_device()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker("gpu")
        item.add_marker("processes")  # compilers, DataLoaders, groups
        if kind is None:
            item.add_marker(pytest.mark.skip(reason="no accelerator here (FLEXTRAIN_TEST_DEVICE=cpu takes the CPU)"))
        elif item.get_closest_marker("accelerator") and kind == "cpu":
            item.add_marker(pytest.mark.skip(reason="the CPU has nothing of the kind"))
        elif item.get_closest_marker("cuda") and kind != "cuda":
            item.add_marker(pytest.mark.skip(reason=f"only CUDA has it, this is {kind}"))


def tell(**event: Any) -> None:
    """Tell ``run.py``, which reads a file that grows."""
    if path := os.environ.get("FLEXTRAIN_TEST_EVENTS"):
        with Path(path).open("a") as file:
            file.write(json.dumps(event) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    tell(count=len(session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    tell(begins=nodeid)


def pytest_runtest_logfinish() -> None:
    tell(begins="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    said = report.longreprtext
    if report.skipped and isinstance(report.longrepr, tuple):
        said = report.longrepr[2].removeprefix("Skipped: ")
    elif report.passed:
        said = report.capstdout.strip()  # such as a device's properties, or figures
    tell(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=said[-6000:])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``processes``: one, and as many as there are devices; two on the CPU."""
    if "processes" in metafunc.fixturenames:
        kind = kind_of_device()
        several = 2 if kind == "cpu" else torch.accelerator.device_count() if kind else 1
        metafunc.parametrize("processes", sorted({1, several}))


@pytest.fixture(scope="session")
def kind() -> str:
    found = kind_of_device()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other folders read it in the processes that they run in."""
    monkeypatch.setenv("FLEXTRAIN_TEST_DEVICE", kind)


@pytest.fixture(scope="session")
def groups(kind: str) -> Iterator[Callable[[int], WorkerGroup]]:
    """``groups(n)`` is the session's group of n processes, each with a device of its own."""
    made: dict[int, WorkerGroup] = {}

    def group_of(size: int) -> WorkerGroup:
        return made.setdefault(size, WorkerGroup(size, timeout_s=100.0, accelerators=kind != "cpu"))

    yield group_of
    for group in made.values():
        group.close()


@pytest.fixture(scope="session")
def team(kind: str) -> Iterator[Callable[[int], Sharing]]:
    """``team(n)`` is the session's group of n processes that share devices where there are fewer."""
    made: dict[int, Sharing] = {}

    def team_of(size: int) -> Sharing:
        shares = kind == "cuda" and torch.cuda.device_count() < size
        if shares and way_to_share(kind) is None:
            pytest.skip(f"{size} processes cannot share {torch.cuda.device_count()} device(s)")
        return made.setdefault(size, Sharing(size, kind, way_to_share(kind) if shares else None))

    yield team_of
    for group in made.values():
        group.close()


@pytest.fixture
def group(groups: Callable[[int], WorkerGroup], processes: int) -> WorkerGroup:
    return groups(processes)
