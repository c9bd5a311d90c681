"""What models draw in their forward under a pipeline: alike on all stages before the layers, apart from there on."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flextrain.core.base.errors import StrategyError
from flextrain.strategies.mesh.pipeline.chain import chain_of
from flextrain.strategies.mesh.pipeline.rehearsal import Plan, Rehearsal
from flextrain.strategies.mesh.pipeline.stages import StageRun, Streams
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import evaluate, train
from flextrain.testing.sessions import whole_model

from .drawing import Noise, OnOneDevice
from .models import LENGTH, MODELS, Plain, sample
from .parity import RECIPES, compare, data, dtype_of, reference, started

MESH = dict(type="MeshStrategy", pp=2)


@contextmanager
def models(**built: Any) -> Iterator[None]:
    with patch.dict(MODELS, built):
        reference.cache_clear()
        yield


# One process


def drawn(depth: int, micro_batches: int) -> tuple[list[tuple[int, int, list[float]]], list[float]]:
    """What a process that has all stages draws, in two windows: before the layers in a submodule and outside, and in layers.

    Returns:
        stage, micro-batch, and numbers by torch in the submodule, outside of it, and in layers, and by the host in layers;
        then what is drawn after all.
    """
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    streams, found = Streams(torch.device("cpu")), []
    # A micro-batch is on its second stage when others are on their first, as in every schedule.
    order = sorted(
        ((stage, i) for stage in range(depth) for i in range(micro_batches)), key=lambda of: of[1] + 2 * of[0]
    )
    for window in range(2):
        streams.begin_window()
        for stage, i in order:
            streams.again(i)
            if stage:
                streams.pass_part()
                part = 0.0
            else:
                streams.enter_part()
                part = float(torch.rand(()))
                streams.leave_part()
            before = float(torch.rand(()))
            streams.leave_shared()
            torch.rand(stage)  # what the model draws between layers of other stages
            streams.enter_layers(stage)
            numbers = [part, before, float(torch.rand(())), random.random(), float(np.random.rand())]
            found.append((stage, window * micro_batches + i, numbers))
            streams.end()
    return found, [float(torch.rand(())), random.random(), float(np.random.rand())]


def test_masks_do_not_repeat_from_stage_to_stage() -> None:
    found, last = drawn(3, 4)
    for inside in (2, 3, 4):
        assert len({numbers[inside] for *_, numbers in found}) == 24
    # What is drawn from the batch, before the layers, is the same on every stage, and another for every micro-batch.
    before = {(i, numbers[1]) for _, i, numbers in found}
    parts = {numbers[0] for stage, _, numbers in found if not stage}
    assert len(before) == len({number for _, number in before}) == len(parts) == 8
    assert not parts & {number for _, number in before}
    assert drawn(1, 4)[1] == last  # all processes go on alike, whatever they have computed


def after_a_loss(draws: int) -> float:
    """What is drawn after a forward whose loss, outside of the model, draws on the last stage; 0: on another stage."""
    torch.manual_seed(5)
    streams = Streams(torch.device("cpu"))
    torch.rand(())
    if draws:
        streams.leave_model()
        torch.rand(draws)
    streams.end()
    return float(torch.rand(()))


def test_a_loss_outside_of_the_model_may_draw() -> None:
    assert after_a_loss(0) == after_a_loss(2) == after_a_loss(3)


def test_a_first_layer_that_is_computed_again_draws_the_same() -> None:
    streams = Streams(torch.device("cpu"))
    before = torch.get_rng_state()
    streams.leave_shared()
    streams.enter_layers(0)
    first = torch.rand(4)
    streams.end()
    torch.set_rng_state(before)
    streams.repeat_layer()
    assert torch.equal(torch.rand(4), first)


def test_a_submodule_that_ends_with_an_error_leaves_no_stream() -> None:
    """So activation checkpointing ends a forward that it repeats, when it has what it needs."""
    model = Noise(0.1)
    run = StageRun(model, chain_of(model), [1, 1], [0], torch.device("cpu"))
    run.cut()
    model.register_forward_hook(run.leave)
    batch = sample("plain", 2, 0)
    run.run(
        0, 0, lambda passed: torch.zeros(()), lambda: model(**batch)
    )  # from now on it is known that the embedding draws
    states = []
    for hook in (lambda *_: None, lambda *_: 1 / 0):
        handle = model.embed[1].register_forward_hook(hook)
        torch.manual_seed(3)
        with contextlib.suppress(ZeroDivisionError):
            model.embed(batch["input_ids"])
        states.append(torch.get_rng_state())
        handle.remove()
    assert torch.equal(*states)


def test_what_is_drawn_outside_of_the_model_on_the_last_stage_is_forgotten() -> None:
    states, batch = [], sample("plain", 2, 0)
    for draws in (1, 3):
        model = Noise()
        run = StageRun(model, chain_of(model), [1, 1], [1], torch.device("cpu"))
        run.cut()
        torch.manual_seed(3)
        run.run(
            1,
            0,
            lambda passed: torch.zeros(2, LENGTH, 32),
            lambda model=model, n=draws: (model(**batch), torch.rand(n)),
        )
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def plan_of(model: nn.Module, *, training: bool = True) -> Plan:
    rehearsal = Rehearsal(model, chain_of(model), [(0, 1), (1, 2)], torch.device("cpu"))
    return rehearsal.plan((), sample("plain", 2, 0), training)


def test_a_rehearsal_sees_where_numbers_are_drawn() -> None:
    plan = plan_of(Noise())  # its attention has a rate of dropout, 0
    assert plan.draws
    assert not plan.draws_inside
    assert not plan.apart
    plan = plan_of(Noise(dropout=0.1))
    assert plan.draws_inside
    assert plan.apart == {"embed"}
    assert not plan_of(Plain()).draws
    assert not plan_of(Plain(dropout=0.1), training=False).draws
    states = random.getstate(), np.random.get_state()[1].tobytes()
    assert plan_of(Noise(on_host=True)).draws_on_host
    assert states == (random.getstate(), np.random.get_state()[1].tobytes())


class Between(Plain):
    """The result has noise that was drawn between layers of the first stage."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.layers[0](self.embed(input_ids))
        noise = torch.randn(())
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return self.head(self.norm(x)) + noise


def test_noise_of_one_stage_that_another_needs() -> None:
    model = Between(layers=3)
    rehearsal = Rehearsal(model, chain_of(model), [(0, 2), (2, 3)], torch.device("cpu"))
    with pytest.raises(
        StrategyError, match=r"^strategy\.pp: what Between returns was computed from random numbers drawn after"
    ):
        rehearsal.plan((), {"input_ids": sample("plain", 2, 0)["input_ids"]}, True)


class Counts(Plain):
    """Draws before its layers, as often as the embedding says."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = torch.poisson(self.embed(input_ids).abs())
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_draws_whose_number_another_stage_does_not_know() -> None:
    with pytest.raises(
        StrategyError, match=r"^strategy\.pp: poisson draws as many random numbers as embed\.weight says"
    ):
        plan_of(Counts())


class Turned(nn.Module):
    """An embedding whose dimensions are in another order than its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids).transpose(0, 1).contiguous().transpose(0, 1)
        return found


def test_a_stand_in_has_the_order_of_memory() -> None:
    model = Plain()
    model.embed = Turned()  # type: ignore[assignment]
    rehearsal = Rehearsal(model, chain_of(model), [(0, 1), (1, 2)], torch.device("cpu"))
    ids = sample("plain", 3, 0)["input_ids"] % LENGTH
    for name, part in (("embed", model.embed), ("position", model.position)):
        torch.manual_seed(0)
        expected = torch.randn_like(part(ids))
        torch.manual_seed(0)
        assert torch.equal(torch.randn_like(rehearsal.stand_in(name, (ids,), {})), expected)


# Two processes


@pytest.mark.distributed
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(s, marks=pytest.mark.full) for s in ("zbv", "zero_bubble"))]
)
def test_noise_is_that_of_one_device(workers2: WorkerGroup, schedule: str) -> None:
    workers2.run(noise_only, dict(MESH, pp_schedule=schedule))


def noise_only(spec: dict[str, Any]) -> None:
    with models(noise=functools.partial(Noise, layers=4 if spec["pp_schedule"] == "zbv" else 2)):
        compare(spec, "noise", RECIPES["accumulate-clip"], updates=4)


def dropout(spec: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """In a worker: train with dropout everywhere, and compare with one device that draws the same."""
    recipe, updates = RECIPES["accumulate-clip"], 4
    with models(
        noise=functools.partial(Noise, 0.1, **options), alone=functools.partial(OnOneDevice, dropout=0.1, **options)
    ):
        seed_host()
        expected, weights = reference("alone", recipe, updates, torch.float64)
        seed_host()
        with dtype_of(torch.float64), started(spec, "noise", recipe) as session:
            model = session.strategy.module
            found = train(session.strategy, session.model, session.optim, data("noise", recipe, updates))
            found_weights = whole_model(session.strategy)
            seen = sorted(
                {float(noise.sum()) for noise in model.seen}
            )  # zbv computes a micro-batch twice in each process
    same_numbers(found.losses, expected.losses, "the loss", 1e-12)
    same_numbers(found.grad_norms, expected.grad_norms, "the gradient norm", 1e-12)
    same_tensors(found_weights, weights, "final weights", 1e-12)
    return [seen, torch.get_rng_state().tolist(), random.random(), float(np.random.rand())]


def seed_host() -> None:
    random.seed(3)
    np.random.seed(3)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "schedule, options",
    [
        pytest.param("1f1b", dict(on_host=True), id="on-host"),
        pytest.param("1f1b", {}, id="plain", marks=pytest.mark.full),
        pytest.param("zero_bubble", {}, id="zero_bubble", marks=pytest.mark.full),
        pytest.param("zbv", dict(layers=4, on_host=True), id="zbv", marks=pytest.mark.full),
    ],
)
def test_masks_are_apart_and_noise_is_not(workers2: WorkerGroup, schedule: str, options: dict[str, Any]) -> None:
    first, last = workers2.run(dropout, dict(MESH, pp_schedule=schedule), options)
    assert first == last  # noise, and random states
    assert len(first[0]) == 6  # micro-batches


class Dropping(Plain):
    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def forward(self, input_ids: Tensor, labels: Any = None, mode: str = "loss") -> Any:
        return super().forward(input_ids, labels)


def evaluated() -> None:
    """In a worker: a model with dropout predicts what one device predicts, and draws nothing."""
    with models(dropping=Dropping), started(MESH, "dropping", RECIPES["adamw"]) as session:
        ids = {"input_ids": sample("plain", 4, 0)["input_ids"]}
        train(session.strategy, session.model, session.optim, [[sample("plain", 4, 0)]])
        before = torch.get_rng_state()
        (found,) = evaluate(session.strategy, session.model, [ids])
        assert torch.equal(torch.get_rng_state(), before)
        weights = whole_model(session.strategy)
        if found is not None:
            one = Dropping()
            one.load_state_dict(
                {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
            )
            torch.testing.assert_close(found, one.eval()(**ids))
        assert (found is None) == (session.strategy.topology.rank == 0)


@pytest.mark.distributed
def test_evaluation_has_no_dropout(workers2: WorkerGroup) -> None:
    workers2.run(evaluated)


class Repeating(Plain):
    """Computes its layers again in backward."""

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class NotRepeating(Plain):
    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def recomputed() -> list[Any]:
    """In a worker: losses and norms with dropout, of layers that are computed once and twice."""
    option, found = dict(activation_checkpointing=dict(classes=["PlainBlock"])), []
    with models(once=functools.partial(NotRepeating, dropout=0.3), twice=functools.partial(Repeating, dropout=0.3)):
        for name, spec in (("once", MESH), ("once", {**MESH, **option}), ("twice", MESH)):
            with dtype_of(torch.float64), started(spec, name, RECIPES["accumulate-clip"]) as session:
                torch.manual_seed(11)
                windows = [[sample("plain", 8, i) for i in range(2)]] * 3
                trace = train(session.strategy, session.model, session.optim, windows)
            found.append((trace.losses, trace.grad_norms))
    return found


@pytest.mark.distributed
def test_masks_of_layers_that_are_computed_again(workers2: WorkerGroup) -> None:
    for once, by_option, by_the_model in workers2.run(recomputed):
        assert once == by_option == by_the_model
