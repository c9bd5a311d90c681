"""Two processes on one device: what they can send to each other, and what strategies make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flextrain.testing import WorkerError, check_strategy

from .sharing import EXCHANGED, WAYS, Sharing, exchange
from .test_strategies import TOLERANCE, name_of

STRATEGIES: list[tuple[int, dict[str, Any]]] = [
    (2, dict(type="DDPStrategy")),
    (2, dict(type="FSDPStrategy", wrap="blocks")),
    (4, dict(type="FSDPStrategy", wrap="blocks", replicate_size=2)),
]


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, kind: str) -> Any:
    if kind != "cuda" and request.param != "gloo":
        pytest.skip(f"only CUDA has it, this is {kind}")
    with Sharing(2, kind, request.param, timeout_s=40.0) as group:
        yield group


@pytest.mark.parametrize("operation", EXCHANGED)
def test_messages(pair: Sharing, kind: str, operation: str) -> None:
    if kind != "cpu" and operation == "send_and_receive" and pair.options.get("backend") == "gloo":
        pytest.skip("gloo sends CPU tensors alone from one process to another, which check_pairs refuses")
    try:
        found = pair.run(exchange, operation, kind, pair.options)
    except WorkerError as error:
        refused = ("Duplicate GPU", "NCCL_MULTI_RANK_GPU_ENABLE")
        if any(words in str(error) for words in refused):
            pytest.skip("this NCCL refuses two processes on one device in this way")
        raise
    assert found == EXCHANGED[operation]


@pytest.mark.parametrize(
    "size, strategy", STRATEGIES, ids=lambda each: name_of(each) if isinstance(each, dict) else str(each)
)
def test_conformance(team: Callable[[int], Sharing], kind: str, size: int, strategy: dict[str, Any]) -> None:
    group = team(size)
    print(
        check_strategy(
            {**strategy, **group.options, "device": kind}, world_size=size, workers=group, tolerance=TOLERANCE
        )
    )
