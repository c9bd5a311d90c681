"""The device of these tests: the accelerator that torch finds, or what FLEXTRAIN_TEST_DEVICE names, such as "cpu"."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flextrain.testing import WorkerGroup

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


@pytest.fixture(scope="session")
def groups(kind: str) -> Iterator[Callable[[int], WorkerGroup]]:
    """``groups(n)`` is the session's group of n processes, each with a device of its own."""
    made: dict[int, WorkerGroup] = {}

    def group_of(size: int) -> WorkerGroup:
        return made.setdefault(size, WorkerGroup(size, timeout_s=100.0, accelerators=kind != "cpu"))

    yield group_of
    for group in made.values():
        group.close()


@pytest.fixture
def group(groups: Callable[[int], WorkerGroup], processes: int) -> WorkerGroup:
    return groups(processes)
