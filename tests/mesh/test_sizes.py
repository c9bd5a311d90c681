"""Sizes of a mesh: what is accepted, and one line for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from flextrain import MeshStrategy
from flextrain.core.errors import FlexTrainError
from flextrain.strategies.mesh.sizes import resolved
from flextrain.strategies.mesh.tensor.rules import match_rules

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


@pytest.mark.parametrize(
    "given, world_size, message",
    [
        (dict(tp=2), 4, "strategy: tp=2 is 2, but there are 4 processes; start 2, or give dp_shard=-1"),
        (dict(tp=4), 2, "strategy: tp=4 is 4, but there are 2 processes; start 4, or give dp_shard=-1"),
        (
            dict(dp_shard=-1, tp=3),
            4,
            "strategy.dp_shard: nothing whole is left for it, tp=3 is 3 and does not divide the 4 processes",
        ),
    ],
)
def test_product_is_not_the_number_of_processes(given: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        resolved({**ONES, **given}, world_size)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tp=0), "strategy.tp: 0 is not allowed, give a positive number, or -1 for the processes that are left"),
        (
            dict(tp=-1, dp_shard=-1),
            "strategy.dp_shard: -1 is given for strategy.tp too, one axis takes what is left; give the others",
        ),
        (dict(tp="2"), 'strategy.tp: "2" is not allowed, give an integer'),
        (dict(tensor=2), "strategy.tensor: unknown key"),
        (dict(replicate_size=2), "strategy.replicate_size: is FSDPStrategy's, give dp_replicate"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        MeshStrategy(**options)
    assert str(caught.value).startswith(message)


NAMES = ("embed", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
STYLES = ("colwise", "rowwise")


def test_rules_name_modules() -> None:
    found = match_rules({"layers.*.up": "colwise", "layers.0.down": "rowwise"}, NAMES, STYLES)
    assert found == {"layers.0.up": "colwise", "layers.1.up": "colwise", "layers.0.down": "rowwise"}


@pytest.mark.parametrize(
    "plan, message",
    [
        (
            {"layers.*.up": "colwize"},
            'strategy.plan["layers.*.up"]: "colwize" is not allowed, choose colwise or rowwise, did you mean "colwise"?',
        ),
        (
            {"layers.2.up": "colwise"},
            'strategy.plan["layers.2.up"]: names no module of the model, did you mean "layers.',
        ),
        (
            {"layers.*.up": "colwise", "layers.1.*": "rowwise"},
            'strategy.plan["layers.1.*"]: "rowwise" for layers.1.up, for which "layers.*.up" says "colwise"; give one of them',
        ),
    ],
)
def test_refused_plans(plan: dict[str, str], message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        match_rules(plan, NAMES, STYLES)
    assert str(caught.value).startswith(message)
