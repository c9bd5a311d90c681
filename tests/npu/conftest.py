"""Workers that find the simulated device in sim/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .simulated import NpuWorkers, built


@pytest.fixture(scope="session")
def simulated_npu() -> Path:
    """The folder to put on the path, with its library built; a test that uses it runs in processes of its own."""
    return built()


@pytest.fixture(scope="session")
def npu1(simulated_npu: Path) -> Iterator[NpuWorkers]:
    workers = NpuWorkers(1)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def npu2(simulated_npu: Path) -> Iterator[NpuWorkers]:
    workers = NpuWorkers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def npu4(simulated_npu: Path) -> Iterator[NpuWorkers]:
    workers = NpuWorkers(4)
    yield workers
    workers.close()
