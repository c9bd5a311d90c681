"""Options of a mesh that would have no effect are refused."""

from __future__ import annotations

from typing import Any

import pytest

from flextrain import MeshStrategy
from flextrain.core.base.errors import ConfigError

NO_SHARDS = dict(dp_shard=1, pp=2)
UNUSED: list[tuple[dict[str, Any], str]] = [
    (
        dict(tp=2, plan={"a": "colwise"}, plan_example={"x": 1}),
        "strategy.plan_example: has no effect beside strategy.plan, leave one of them out",
    ),
    (dict(plan_example={"x": 1}), "strategy.plan_example: has no effect with strategy.tp=1; give tp, or leave"),
    (
        dict(NO_SHARDS, wrap="blocks", prefetch=2),
        "strategy.prefetch: has no effect with dp_replicate=1, dp_shard=1, ep",
    ),
    (dict(NO_SHARDS, reshard_after_forward=False), "strategy.reshard_after_forward: has no effect with dp_replicate=1"),
    (
        dict(NO_SHARDS, reduce_every_micro_batch=True),
        "strategy.reduce_every_micro_batch: has no effect with dp_replicate=1, dp_shard=1, ep=1, cp=1, which shard no",
    ),
    (dict(prefetch=2), 'strategy.prefetch: has no effect on a model that is one unit, give strategy.wrap="blocks"'),
    (
        dict(pp=2, pp_schedule="zbv", reshard_after_forward=True),
        'strategy.reshard_after_forward: is not possible with pp_schedule="zbv", which computes gradients of weights later',
    ),
]


@pytest.mark.parametrize("options, message", UNUSED)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MeshStrategy(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        dict(tp=1, tp_kind="dtensor", sequence_parallel=False, plan="auto", prefetch=None),  # as if they were left out
        dict(plan={"a": "colwise"}),  # says what the model is like, for every size
        dict(pp=2, wrap="blocks", prefetch=2),  # the processes that are left may shard
        dict(NO_SHARDS, wrap="blocks", prefetch=2, mixed_precision=dict(param_dtype="bfloat16")),
        dict(dp_shard=1, tp=4, ep=2, wrap="blocks", prefetch=2),  # experts may be sharded
    ],
)
def test_taken(options: dict[str, Any]) -> None:
    MeshStrategy(**options)
