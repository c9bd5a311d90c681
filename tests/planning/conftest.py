"""A worker for plans: torch starts threads for what it computes on tensors without values, so no test may fork from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version

from flextrain.plan.rehearsing_private import CHECKED
from flextrain.testing import WorkerGroup

from ..conftest import IMPORTS

# For tests that plan, beside those of what was planned before.
PLANS = pytest.mark.skipif(
    "{0.major}.{0.minor}".format(Version(torch.__version__)) not in CHECKED,
    reason=f"plans are made with torch {', '.join(CHECKED)} only",
)


@pytest.fixture(scope="session")
def workers1() -> Iterator[WorkerGroup]:
    group = WorkerGroup(1, imports=IMPORTS)
    yield group
    group.close()
