"""Checks of the training itself: every run must equal the run of a single device on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim.wrapper import OptimWrapper
from .check_table import StrategyUnderTest, check
from .differences import CheckFailedError, multiple, relative_difference, require, same_numbers, same_tensors
from .loop import evaluate, learning_rates
from .models import Batch, ConformanceNet
from .sessions import TrainedSession, run

SAMPLES = 8  # in a global micro-batch
UPDATES = 6


def batches(count: int, samples: int = SAMPLES, seed: int = 0) -> list[Batch]:
    """Global micro-batches, the same for every process and every run."""
    return [ConformanceNet.sample(samples, seed=100 * seed + i) for i in range(count)]


def one_each(micro_batches: Sequence[Batch]) -> list[list[Batch]]:
    """Windows of one micro-batch."""
    return [[batch] for batch in micro_batches]


def sgd(lr: float = 0.1, **kwargs: Any) -> OptimWrapper:
    """Plain gradient descent: its updates are the gradients times the learning rate."""
    return OptimWrapper(dict(type="SGD", lr=lr), **kwargs)


def adamw(**kwargs: Any) -> OptimWrapper:
    """AdamW with parameter groups of different learning rate and weight decay."""
    paramwise = dict(bias_lr_mult=2.0, norm_decay_mult=0.0, bias_decay_mult=0.0)
    return OptimWrapper(dict(type="AdamW", lr=3e-3, weight_decay=0.1), paramwise_cfg=paramwise, **kwargs)


def assert_same_run(found: TrainedSession, expected: TrainedSession, tolerance: float) -> None:
    """Raise CheckFailedError at the first update whose weights, loss or gradient norm differ from the expected ones."""
    for number in range(1, len(expected.weights)):
        _same_update(found, expected, number, tolerance)
    same_numbers(found.trace.losses, expected.trace.losses, "the loss", tolerance)
    same_numbers(found.trace.grad_norms, expected.trace.grad_norms, "the gradient norm", tolerance)


def _same_update(found: TrainedSession, expected: TrainedSession, number: int, tolerance: float) -> None:
    try:
        same_tensors(found.weights[number], expected.weights[number], f"weights after update {number - 1}", tolerance)
    except CheckFailedError as error:
        ours, theirs = _update(found.weights, number), _update(expected.weights, number)
        raise CheckFailedError(f"{error}{multiple(ours, theirs)}") from None


def _update(weights: Sequence[dict[str, Tensor]], number: int) -> Tensor:
    after, before = weights[number], weights[number - 1]
    return torch.cat([(after[key] - before[key]).double().flatten() for key in sorted(before)])


def both(
    tested: StrategyUnderTest, optim: Callable[[], OptimWrapper], windows: Sequence[Sequence[Batch]]
) -> tuple[TrainedSession, TrainedSession]:
    """The same training by the strategy and by a single device."""
    with tested.reference(optim()) as single:
        expected = run(single, windows)
    with tested.session(optim()) as session:
        return run(session, windows), expected


@check("processes that were seeded differently train with rank 0's weights and buffers")
def initial_weights(tested: StrategyUnderTest) -> None:
    with tested.reference(sgd()) as single:
        expected = run(single, []).weights[0]
    with tested.session(sgd()) as session:
        module = dict(session.strategy.module.named_parameters())
        found = run(session, []).weights[0]
        same_tensors(found, expected, "weights after setup")
        # The weights that each process computes with, not only those that it would save.
        parts = tested.all_gather({name: p.detach().cpu() for name, p in module.items() if type(p.detach()) is Tensor})
        for rank, part in enumerate(parts):
            for name, value in part.items():
                require(
                    torch.equal(value, parts[0].get(name, value)), f"after setup {name} of rank {rank} is not rank 0's"
                )


@check("gradients, and therefore SGD's updates, are those of the mean loss over the whole batch")
def gradients(tested: StrategyUnderTest) -> None:
    found, expected = both(tested, sgd, one_each(batches(UPDATES)))
    assert_same_run(found, expected, tested.tolerance)


@check("losses and weights under AdamW with parameter groups equal those of a single device")
def losses(tested: StrategyUnderTest) -> None:
    found, expected = both(tested, adamw, one_each(batches(UPDATES)))
    same_numbers(found.trace.losses, expected.trace.losses, "the loss", tested.tolerance)
    same_tensors(found.weights[-1], expected.weights[-1], "final weights", tested.tolerance)


@check("a window of micro-batches gives the same update as one large batch, also a shorter last window")
def accumulation(tested: StrategyUnderTest) -> None:
    micro = batches(7)
    windows = [micro[:3], micro[3:6], micro[6:]]
    large = [[{name: torch.cat([batch[name] for batch in window]) for name in window[0]}] for window in windows]
    with tested.reference(sgd()) as single:
        expected = run(single, large)
    with tested.session(sgd(accumulative_counts=3)) as session:
        found = run(session, windows)
    assert_same_run(found, expected, tested.tolerance)


@check("gradients are clipped by their norm over all processes; the reported norm is that before clipping")
def clipping(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(UPDATES))
    found, expected = both(tested, lambda: sgd(clip_grad=dict(max_norm=0.3)), windows)
    same_numbers(found.trace.grad_norms, expected.trace.grad_norms, "the gradient norm", tested.tolerance)
    assert_same_run(found, expected, tested.tolerance)


@check("gradients are clipped element by element after averaging, if the strategy supports it")
def clipping_by_value(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(UPDATES))
    clip = dict(type="value", clip_value=0.01)
    with tested.reference(sgd(clip_grad=clip)) as single:
        expected = run(single, windows)
    with tested.session_or_refused(sgd(clip_grad=clip)) as session:
        found = run(session, windows)
    assert_same_run(found, expected, tested.tolerance)


@check("frozen parameters and buffers keep their values, bit for bit")
def frozen(tested: StrategyUnderTest) -> None:
    names = [f"model.frozen.{name}" for name in ("weight", "bias")] + ["model.scale"]
    with tested.session(adamw()) as session:
        weights = run(session, one_each(batches(3))).weights
    for name in names:
        require(name in weights[0], f"{name} is missing from the state")
        require(torch.equal(weights[0][name], weights[-1][name]), f"{name} changed in training")


@check("a tied weight stays one tensor and is stored once, under the first of its names")
def tied(tested: StrategyUnderTest) -> None:
    with tested.session(sgd()) as session:
        weights = run(session, one_each(batches(3))).weights[-1]
        module = session.strategy.module
        first, second = module.get_parameter("tokens.weight"), module.get_parameter("head.weight")
        require(first is second, "head.weight and tokens.weight are different tensors after training")
    require("model.tokens.weight" in weights, "model.tokens.weight is missing from the state")
    require("model.head.weight" not in weights, "the tied weight is stored twice, as model.head.weight too")


class Decay:
    """A scheduler: multiplies every learning rate by 0.8 at each step."""

    def __init__(self, optim: OptimWrapper) -> None:
        self.optim = optim

    def step(self) -> None:
        """Move by one update."""
        for group in self.optim.param_groups:
            group["lr"] *= 0.8


@check("the learning rate changes only when the scheduler steps: once per update, not per micro-batch")
def schedule(tested: StrategyUnderTest) -> None:
    micro = batches(8)
    windows = [micro[:3], micro[3:6], micro[6:]]
    with tested.session(adamw(accumulative_counts=3)) as session:
        base = learning_rates(session.optim)
        trace = run(session, windows, [Decay(session.optim)]).trace
        after = learning_rates(session.optim)
    for number, seen in enumerate([*trace.lrs_seen, [after]]):
        expected = [lr * 0.8**number for lr in base]
        for i, lrs in enumerate(seen):
            require(
                relative_difference(torch.tensor(lrs), torch.tensor(expected)) < 1e-6,
                f"learning rates before micro-batch {i} of update {number} are {lrs}, expected {expected}: "
                "they changed without the scheduler, or did not follow it",
            )


@check("evaluation during training gives a single device's outputs and does not change the following updates")
def evaluation(tested: StrategyUnderTest) -> None:
    windows, held_out = one_each(batches(4)), batches(2, seed=5)
    with tested.reference(adamw()) as single:
        run(single, windows[:2])
        expected = evaluate(single.strategy, single.model, held_out)
    with tested.session(adamw()) as session:
        undisturbed = run(session, windows)
    with tested.session(adamw()) as session:
        evaluate(session.strategy, session.model, held_out)
        first = run(session, windows[:2])
        outputs = evaluate(session.strategy, session.model, held_out)
        topology = session.strategy.topology
        parts = [part for part in tested.all_gather((topology.data.index, outputs, topology.reports)) if part[2]]
        second = run(session, windows[2:])
    for i, reference in enumerate(expected):
        whole = torch.cat([part[i] for _, part, _ in sorted(parts, key=lambda part: part[0])])
        same_tensors({"logits": whole}, {"logits": reference}, f"outputs for batch {i}", tested.tolerance)
    require(
        first.trace.losses + second.trace.losses == undisturbed.trace.losses,
        "losses differ from those of the same training without evaluation",
    )
    same_tensors(second.weights[-1], undisturbed.weights[-1], "final weights with and without evaluation")
