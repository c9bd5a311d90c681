"""Pipeline parallelism: stages compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flextrain.strategies.mesh.pipeline.chain import balanced
from flextrain.strategies.mesh.pipeline.orders import SCHEDULES, orders_of
from flextrain.testing import WorkerGroup

from .parity import RECIPES, compare
from .saving import on_one_device, session

Workers = Callable[[int], WorkerGroup]
MESH = dict(type="MeshStrategy")
CASES: list[Any] = [
    pytest.param(2, dict(MESH, pp=2), "plain_tied", "accumulate-clip", id="pp2-plain_tied"),
    pytest.param(2, dict(MESH, pp=2, pp_schedule="zero_bubble"), "llama", "accumulate-clip", id="zero_bubble-llama"),
    pytest.param(4, dict(MESH, pp=2, wrap="blocks"), "fused", "frozen", id="pp2xdp2-fused"),
]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size, spec, model, recipe", CASES)
def test_parity(workers: Workers, world_size: int, spec: dict[str, Any], model: str, recipe: str) -> None:
    traces = workers(world_size).run(compare, spec, model, RECIPES[recipe])
    assert all(trace == traces[0] for trace in traces)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_process_waits_for_ever(name: str) -> None:
    allowed = SCHEDULES[name].stages_per_process
    for processes in (2, 3, 4):
        for each in (allowed[0], allowed[0] + 1) if len(allowed) > 1 else allowed:
            for size in (1, 2, 3, 4, 6, 8):
                orders = orders_of(name, processes, each, size)
                assert sorted({stage for order in orders for _, stage, _ in order}) == [*range(processes * each)]
                kinds = 3 if SCHEDULES[name].splits_backward else 2
                assert [len(order) for order in orders] == [kinds * each * size] * processes


def test_1f1b_holds_as_many_micro_batches_as_stages_follow() -> None:
    for rank, order in enumerate(orders_of("1f1b", 4, 1, 8)):
        held = most = 0
        for kind, _, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == 4 - rank


@pytest.mark.parametrize(
    "sizes, first, last, stages, expected",
    [
        ([1, 1, 1, 1], 0, 0, 2, [2, 2]),
        ([1, 1, 1, 1], 2, 0, 2, [1, 3]),
        ([1, 1, 1, 1, 1, 1], 2, 2, 3, [1, 3, 2]),
        ([5, 1, 1, 1], 0, 0, 2, [1, 3]),
        ([1, 1, 1], 100, 0, 3, [1, 1, 1]),
    ],
)
def test_stages_have_about_the_same_size(
    sizes: list[int], first: int, last: int, stages: int, expected: list[int]
) -> None:
    assert balanced(sizes, first, last, stages) == expected


LAYERS = ["layers.0", "layers.1", "norm", "head"]
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, dict(MESH, pp=2)),
    "zbv": (2, dict(MESH, pp=2, pp_schedule="zbv", pp_layers=LAYERS)),
    "pp4": (4, dict(MESH, pp=4, pp_layers=LAYERS)),
    "pp2xdp2": (4, dict(MESH, pp=2, dp_shard=2, wrap="blocks")),
    "fsdp": (2, dict(type="FSDPStrategy")),
    "ddp": (2, dict(type="DDPStrategy")),
    "one": (1, dict(type="SingleDeviceStrategy")),
}
PAIRS: list[Any] = [
    pytest.param("pp2", "one"),
    pytest.param("one", "pp2"),
    *(pytest.param("pp2", other, marks=pytest.mark.full) for other in ("pp4", "pp2xdp2", "fsdp", "ddp")),
    *(pytest.param(other, "pp2", marks=pytest.mark.full) for other in ("pp4", "pp2xdp2", "fsdp", "ddp")),
    pytest.param("pp4", "zbv", marks=pytest.mark.full),
    pytest.param("zbv", "pp2xdp2", marks=pytest.mark.full),
]


def part(workers: Workers, mesh: str, **paths: Path) -> None:
    world_size, spec = MESHES[mesh]
    if world_size == 1:
        on_one_device("plain_tied", **paths)
    else:
        workers(world_size).run(session, spec, "plain_tied", **paths)


@pytest.mark.distributed
@pytest.mark.parametrize("saved, resumed", PAIRS)
def test_checkpoints_fit_every_number_of_stages(workers: Workers, tmp_path: Path, saved: str, resumed: str) -> None:
    part(workers, saved, path=tmp_path / "half")
    part(workers, resumed, resume=tmp_path / "half")
