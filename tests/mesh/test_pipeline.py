"""Pipeline parallelism: stages compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from flextrain import MeshStrategy, OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.torch_compat.backward_private import backward_of_input
from flextrain.optim import gradients
from flextrain.optim.gradients import ModelGroup
from flextrain.strategies.mesh.pipeline import pipeline_engine
from flextrain.strategies.mesh.pipeline.chain import balanced
from flextrain.strategies.mesh.pipeline.orders import (
    SCHEDULES,
    Action,
    Schedule,
    awaited,
    can_end,
    orders_of,
    route_of,
    sent,
)
from flextrain.strategies.mesh.pipeline.pipeline_parallel import Ties
from flextrain.strategies.mesh.pipeline.stages import StageRun
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers
from flextrain.testing.loop import Trace, alone, train

from ..device import DEVICE
from .models import VOCABULARY, Plain, sample
from .parity import RECIPES, compare, dtype_of, started
from .saving import on_one_device, session

Workers = Callable[[int], WorkerGroup]
MESH = dict(type="MeshStrategy")


def test_gradients_of_weights_apart_from_those_of_what_is_a_view() -> None:
    layer, leaf = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    layer(leaf).t().square().sum().backward()
    expected, leaf.grad, layer.weight.grad = (leaf.grad, layer.weight.grad), None, None
    output = layer(leaf).t()
    finish = backward_of_input(output, 2 * output.detach(), leaf, layer)
    assert layer.weight.grad is None
    finish()
    torch.testing.assert_close((leaf.grad, layer.weight.grad), expected)


class Shares(nn.Module):
    """Two terms have a weight in common, and each one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.both = (nn.Parameter(torch.rand(3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.one + self.both) + (self.two + self.both)


def test_gradients_of_weights_apart_that_share_one() -> None:
    model, leaf = Shares(), torch.rand(2, 3, requires_grad=True)
    backward_of_input(model(leaf), torch.ones(2, 3), leaf, model)()
    for parameter, expected in zip(model.parameters(), (2.0, 2.0, 4.0), strict=True):
        torch.testing.assert_close(parameter.grad, torch.full((3,), expected))


def is_head(module: nn.Module) -> bool:
    """Whether it is the last layer, which only the last stage has."""
    return isinstance(module, nn.Linear) and module.out_features == VOCABULARY


CASES: list[Any] = [
    pytest.param(2, dict(MESH, pp=2), "plain_tied", "accumulate-clip", id="pp2-plain_tied"),
    pytest.param(2, dict(MESH, pp=2), "turning", "adamw", id="pp2-complex activations"),
    pytest.param(2, dict(MESH, pp=2, pp_schedule="zero_bubble"), "llama", "accumulate-clip", id="zero_bubble-llama"),
    pytest.param(4, dict(MESH, pp=2, wrap="blocks"), "fused", "frozen", id="pp2xdp2-fused"),
    pytest.param(
        4, dict(MESH, pp=2, wrap=is_head), "fused", "adamw", id="pp2xdp2-units of one stage", marks=pytest.mark.full
    ),
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


def smallest(name: str, processes: int, size: int) -> tuple[list[int], Any]:
    """The process of each stage, and the orders of a window, with as few stages as a schedule allows."""
    schedule = SCHEDULES[name]
    each = schedule.stages_per_process[0]
    process_of = [schedule.process_of(stage, processes) for stage in range(processes * each)]
    return process_of, orders_of(name, processes, each, size)


def held_at_most(name: str, processes: int, size: int) -> list[int]:
    """For every process, the largest number of tensors that it has sent and does not know to have arrived."""
    process_of, orders = smallest(name, processes, size)
    found = []
    for own, order in enumerate(orders):
        route = route_of(orders, process_of, own)
        held: set[Any] = set()
        most = 0
        for action in order:
            held -= {*route.arrived.get(awaited(action, len(process_of)), ())}  # type: ignore[arg-type]
            message = sent(action, len(process_of))
            if message is not None and process_of[message[1]] != own:
                assert (own, message) not in held
                held.add(message)
            most = max(most, len(held))
        found.append(most)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_was_sent_is_not_held_longer_in_longer_windows(name: str) -> None:
    """A process lets go of it at the first message that its receiver has sent after it; Gloo does not say by itself."""
    of_8, of_32 = (held_at_most(name, 4, size) for size in (8, 32))
    if name == "gpipe":  # no gradient comes before all activations are sent, nothing comes after a gradient
        assert of_32 == [32] * 4
    else:
        assert of_32 == of_8
        assert max(of_8) < 12


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_said_to_have_arrived_has(name: str) -> None:
    process_of, orders = smallest(name, 3, 7)
    for own in range(3):
        route = route_of(orders, process_of, own)
        for later, messages in route.arrived.items():
            (source,) = {rank for rank, order in enumerate(orders) for a in order if sent(a, len(process_of)) == later}
            order = orders[source]
            end = next(n for n, action in enumerate(order) if sent(action, len(process_of)) == later)
            waited_for = [awaited(action, len(process_of)) for action in order[: end + 1]]
            assert all(message in waited_for for message in messages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_line_is_opened_and_no_other(name: str) -> None:
    """A line whose communicator is made at its first message, while its other end waits elsewhere, is a deadlock."""
    process_of, orders = smallest(name, 3, 7)
    used = {
        (message[0], source, process_of[message[1]])
        for source, order in enumerate(orders)
        for action in order
        if (message := sent(action, len(process_of)))
    }
    for own in range(3):
        lines = route_of(orders, process_of, own).lines
        assert list(lines) == sorted(line for line in used if line[1] != line[2])


@pytest.mark.parametrize("micro_batches", [4, 8, 32])
@pytest.mark.parametrize(
    "name, each, expected",
    [
        ("gpipe", 1, [None] * 4),  # all of them
        ("1f1b", 1, [4, 3, 2, 1]),  # as many as stages follow
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),
        ("interleaved_1f1b", 3, [15, 13, 11, 9]),
        ("zero_bubble", 1, [4] * 4),
        ("zero_bubble", 2, [8] * 4),
        ("zbv", 2, [8] * 4),
    ],
)
def test_as_many_micro_batches_are_held_as_the_schedule_promises(
    name: str, each: int, expected: list[int | None], micro_batches: int
) -> None:
    for order, allowed in zip(orders_of(name, 4, each, micro_batches), expected, strict=True):
        held = [0]
        for kind, _, _ in order:
            held.append(held[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[kind])
        most = micro_batches * each if allowed is None else min(allowed, micro_batches * each)
        assert max(held) == most


def test_an_order_that_cannot_end_is_refused() -> None:
    with pytest.raises(StrategyError, match="interleaved_1f1b has no order for 5 micro-batches over 12 stages"):
        orders_of("interleaved_1f1b", 4, 3, 5)
    first = [Action("F", 0, 0), Action("F", 2, 0), Action("B", 2, 0), Action("B", 0, 0)]
    last = [Action("F", 1, 0), Action("F", 3, 0), Action("B", 3, 0), Action("B", 1, 0)]
    assert can_end([first, last], 4)
    # The backward of stage 1 waits for stage 3, by way of stage 2, and stage 3 begins after it.
    assert not can_end([first, [last[0], last[3], *last[1:3]]], 4)
    with (
        patch.dict(SCHEDULES, own=Schedule((2,), False, False, lambda *_: [first, [last[0], last[3], *last[1:3]]])),
        pytest.raises(StrategyError, match="own has no order for 1 micro-batches over 4 stages"),
    ):
        orders_of("own", 2, 2, 1)


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
    "zbv": (2, dict(MESH, pp=2, pp_schedule="zbv", pp_layers=LAYERS)),
    "pp4": (4, dict(MESH, pp=4, pp_layers=LAYERS)),
    "pp2xdp2": (4, dict(MESH, pp=2, dp_shard=2, wrap="blocks")),
    "one": (1, dict(type="SingleDeviceStrategy")),
}
PAIRS: list[Any] = [
    pytest.param("zbv", "one"),
    pytest.param("one", "zbv", marks=pytest.mark.full),
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


def sizes_change(spec: dict[str, Any], lengths: list[list[tuple[int, int]]]) -> None:
    """In a worker: windows whose micro-batches have other numbers of samples and other lengths."""
    one, mesh = (traced(kind, lengths, is_alone) for kind, is_alone in ((ONE, True), (spec, False)))
    same_numbers(mesh.losses, one.losses, "the loss", 1e-12)
    same_numbers(mesh.grad_norms, one.grad_norms, "the gradient norm", 1e-12)


ONE = dict(type="SingleDeviceStrategy")
LENGTHS = [[(8, 16), (7, 12)], [(5, 9), (8, 9), (1, 16)], [(3, 4)], [(8, 16), (7, 12)]]


def traced(spec: dict[str, Any], lengths: list[list[tuple[int, int]]], is_alone: bool) -> Trace:
    windows = [
        [{k: v[:n, :m].contiguous() for k, v in sample("plain", 8, i).items()} for i, (n, m) in enumerate(window)]
        for window in lengths
    ]
    recipe = RECIPES["accumulate-clip"]
    with (
        alone() if is_alone else nullcontext(),
        dtype_of(torch.float64),
        started(spec, "plain_tied", recipe) as running,
    ):
        return train(running.strategy, running.model, running.optim, windows)


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.full)])
def test_sizes_may_change_from_batch_to_batch(workers2: WorkerGroup, schedule: str) -> None:
    workers2.run(sizes_change, dict(MESH, pp=2, pp_schedule=schedule), LENGTHS)


def without_the_group(spec: dict[str, Any]) -> None:
    with patch.object(
        ModelGroup, "total_norm", lambda self, grads, kind=2.0: gradients.total_norm([p.grad for p in grads])
    ):
        compare(spec, "plain", RECIPES["adamw-clip"], updates=2)


def added_once(spec: dict[str, Any]) -> None:
    with patch.object(Ties, "add", lambda self, optim: None):
        compare(spec, "plain_tied", RECIPES["adamw-clip"], updates=2)


def stages_reversed(spec: dict[str, Any]) -> None:
    cut = StageRun.cut

    def swapped(self: StageRun) -> None:
        first, last = (self._model.get_submodule(name) for name in ("layers.0", "layers.1"))
        self._model.layers[0], self._model.layers[1] = last, first
        cut(self)

    with patch.object(StageRun, "cut", swapped):
        compare(spec, "plain", RECIPES["adamw-clip"], updates=2)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(without_the_group, id="norm-without-the-pipeline-group"),
        pytest.param(added_once, id="a-tied-gradient-added-once-only"),
        pytest.param(stages_reversed, id="stage-order-reversed"),
    ],
)
def test_broken_on_purpose(workers2: WorkerGroup, broken: Callable[..., None]) -> None:
    with pytest.raises(Exception, match="CheckFailedError"):
        workers2.run(broken, dict(MESH, pp=2))


class ByAllGradients(torch.optim.SGD):
    """Divides gradients by their norm over all parameters."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class ByItsGradient(torch.optim.SGD):
    """Divides each gradient by its own norm."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


def set_up_with(kind: type[torch.optim.Optimizer]) -> None:
    strategy = MeshStrategy(pp=2, device=DEVICE)
    try:
        strategy.setup(Plain(), OptimWrapper(dict(type=kind, lr=0.1)))
    finally:
        strategy.leave()


@pytest.mark.distributed
def test_an_update_that_depends_on_parameters_of_other_stages_is_refused(workers2: WorkerGroup) -> None:
    workers2.run(set_up_with, ByItsGradient)
    with pytest.raises(
        Exception, match="ByAllGradients updates a parameter otherwise beside others than alone, by a norm"
    ):
        workers2.run(set_up_with, ByAllGradients)


def asked_of_groups_between_stages() -> list[Any]:
    asked: list[Any] = []
    make = pipeline_engine.group_with_this_process

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options.get("most_blocks"))
        return make(*args, **options)

    with (
        patch.object(pipeline_engine, "group_with_this_process", noted),
        started(dict(MESH, pp=2), "plain_tied", RECIPES["adamw"]),
    ):
        return asked


@pytest.mark.distributed
def test_what_waits_for_a_stage_leaves_the_accelerator_to_others(workers2: WorkerGroup) -> None:
    """A receive posted ahead occupies thread blocks until its message comes: NCCL is asked for few."""
    assert workers2.run(asked_of_groups_between_stages) == [[4] * 4] * 2
