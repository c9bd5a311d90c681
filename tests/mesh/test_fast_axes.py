"""An axis that sends within every layer and spans nodes is told, with the size that fits."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any
from unittest import mock

import pytest

from flextrain.strategies.mesh.strategy import across_nodes
from flextrain.testing import WorkerGroup

from .parity import RECIPES, started

FAST = ("ep", "tp", "cp")
ONES = dict(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1)


def nodes(*counts: int) -> list[str]:
    return [f"node{number}" for number, count in enumerate(counts) for _ in range(count)]


def lines(sizes: dict[str, int], names: list[str], **overlays: int) -> list[str]:
    fast = [axis for axis in FAST if {**sizes, **overlays}.get(axis, 1) > 1]
    return across_nodes({**ONES, **sizes}, overlays, fast, names)


@pytest.mark.parametrize(
    "sizes, overlays",
    [
        (dict(dp_shard=2, tp=4), {}),
        (dict(dp_shard=2, cp=2, tp=2), {}),
        (dict(pp=2, dp_shard=4), {}),
        (dict(dp_shard=8), dict(ep=4)),
    ],
)
def test_axes_that_fit_a_node(sizes: dict[str, int], overlays: dict[str, int]) -> None:
    assert lines(sizes, nodes(4, 4), **overlays) == []


@pytest.mark.parametrize(
    "sizes, overlays, names, says",
    [
        (
            dict(tp=8),
            {},
            nodes(4, 4),
            "strategy.tp: its 8 processes, which send within every layer, are on 2 nodes, a node has 4 processes; give tp=4 and "
            "dp_shard=2",
        ),
        (
            dict(tp=16, dp_shard=2),
            {},
            nodes(*[4] * 8),
            "are on 4 nodes, a node has 4 processes; give tp=4 and dp_shard=8",
        ),
        (dict(tp=6, dp_shard=2), {}, nodes(4, 4, 4), "a node has 4 processes; give tp=2 and dp_shard=6"),
        (
            dict(cp=4, tp=2),
            {},
            nodes(4, 4),
            "strategy.cp: its 4 processes, which send within every layer, are on 2 nodes, a node has 4 processes, the nearest are "
            "for tp=2; give cp=2 and dp_shard=2",
        ),
        (dict(cp=2, tp=4), {}, nodes(4, 4), "the nearest are for tp=4; give cp=1 and dp_shard=2"),
        (
            dict(dp_shard=8),
            dict(ep=8),
            nodes(4, 4),
            "strategy.ep: its 8 processes, which send within every layer, are on 2 ",
        ),
        (dict(dp_shard=8), dict(ep=8), nodes(4, 4), "a node has 4 processes; give ep=4"),
        (dict(tp=2), {}, nodes(1, 1), "a node has 1 process; give tp=1 and dp_shard=2"),
        (dict(dp_shard=3, tp=2), {}, nodes(1, 5), "a node has 1 to 5; give tp=1 and dp_shard=6"),
        (
            dict(dp_shard=2, tp=2),
            {},
            ["a", "b", "a", "b"],
            "strategy.tp: its 2 processes, which send within every layer, are on 2 nodes, start the processes so that those of a "
            "node have consecutive ranks",
        ),
    ],
)
def test_axes_that_span_nodes(sizes: dict[str, int], overlays: dict[str, int], names: list[str], says: str) -> None:
    (line,) = lines(sizes, names, **overlays)
    assert says in line
    assert "\n" not in line


def test_every_axis_that_spans_nodes_is_named() -> None:
    found = lines(dict(cp=2, tp=8), nodes(4, 4, 4, 4))
    assert [line.partition(":")[0] for line in found] == ["strategy.tp", "strategy.cp"]


def warned(spec: dict[str, Any]) -> list[str]:
    """In a worker: the warnings while a strategy is set up, each process on a node of its own."""
    handler = mock.Mock(level=logging.WARNING)
    logger = logging.getLogger("flextrain")
    logger.addHandler(handler)
    own = mock.patch.object(socket, "gethostname", return_value=f"node{os.environ['RANK']}")
    try:
        with own, started(spec, "plain", RECIPES["adamw"]):
            return [call.args[0].getMessage() for call in handler.handle.call_args_list]
    finally:
        logger.removeHandler(handler)


@pytest.mark.distributed
@pytest.mark.parametrize("spec, count", [(dict(tp=2, plan={"layers.*.up": "colwise"}), 1), (dict(pp=2), 0)])
def test_it_is_in_the_log(workers2: WorkerGroup, spec: dict[str, Any], count: int) -> None:
    for found in workers2.run(warned, dict(type="MeshStrategy", **spec)):
        assert [line.partition(":")[0] for line in found if "nodes" in line] == ["strategy.tp"] * count
