"""A worker for plans: torch starts threads for what it computes on tensors without values, so no test may fork from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flextrain.testing import WorkerGroup

from ..conftest import IMPORTS


@pytest.fixture(scope="session")
def workers1() -> Iterator[WorkerGroup]:
    group = WorkerGroup(1, imports=IMPORTS)
    yield group
    group.close()
