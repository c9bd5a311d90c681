"""Sizes of a mesh: what is accepted, and one line for what is not."""

from __future__ import annotations

import pytest

from flextrain.strategies.mesh.config import resolved
from flextrain.strategies.mesh.tensor.tensor_parallel import match_rules

ONES = dict(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)


@pytest.mark.parametrize(
    "given, world_size, expected",
    [
        (dict(dp_shard=-1), 1, dict(dp_shard=1)),
        (dict(dp_shard=-1, tp=2), 8, dict(dp_shard=4, tp=2)),
        (dict(tp=-1, pp=2), 8, dict(tp=4, pp=2)),
        (dict(dp_replicate=2, dp_shard=2, tp=2), 8, dict(dp_replicate=2, dp_shard=2, tp=2)),
    ],
)
def test_resolved(given: dict[str, int], world_size: int, expected: dict[str, int]) -> None:
    assert resolved({**ONES, **given}, world_size) == {**ONES, **expected}


NAMES = ("embed", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
STYLES = ("colwise", "rowwise")


def test_rules_name_modules() -> None:
    found = match_rules({"layers.*.up": "colwise", "layers.0.down": "rowwise"}, NAMES, STYLES)
    assert found == {"layers.0.up": "colwise", "layers.1.up": "colwise", "layers.0.down": "rowwise"}
