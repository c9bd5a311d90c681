"""Checks of the training itself: every run must equal the run of a single device on the whole batch."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.base.errors import ConfigError, FlexTrainError, StrategyError
from ..core.base.registry import STRATEGIES
from ..core.base.tensors import has_memory
from ..core.comm import collectives as dist
from ..optim.amp import AmpOptimWrapper
from ..optim.canonical import OWN
from ..optim.wrapper import OptimWrapper
from ..strategies.base import Strategy
from ..strategies.parts import WholeModel, explain
from .differences import (
    FLOAT32_TOLERANCE,
    CheckFailedError,
    multiple,
    relative_difference,
    require,
    same_keys,
    same_numbers,
    same_tensors,
)
from .loop import evaluate, learning_rates, train
from .models import Batch, ConformanceNet, PartlyUsed
from .sessions import (
    Session,
    StrategyLike,
    TrainedSession,
    load,
    make_strategy,
    run,
    save,
    single_device,
    started,
    whole_model,
    whole_state,
)

# The table of conformance checks, and the argument that every check gets.


T = TypeVar("T")


@dataclass(frozen=True)
class StrategyUnderTest:
    """The strategy under test, inside one of its processes.

    Attributes:
        folder: an empty folder that all processes share.
        rank: rank of this process, also outside ``session``.
        tolerance: largest relative difference from a single device that counts as rounding.
    """

    spec: StrategyLike
    world_size: int
    folder: Path
    tolerance: float = FLOAT32_TOLERANCE
    rank: int = 0

    def strategy(self) -> Strategy:
        """A new object of the strategy under test."""
        return make_strategy(self.spec)

    def session(self, optim: OptimWrapper) -> AbstractContextManager[Session]:
        """The strategy under test with a model, ready to train; collective."""
        return started(self.spec, optim)

    @contextlib.contextmanager
    def session_or_refused(self, optim: OptimWrapper) -> Iterator[Session]:
        """A session. An error during set-up counts as a refusal, which the contract allows."""
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(self.session(optim))
            except (ConfigError, StrategyError) as error:
                raise RefusedError(str(error)) from None
            yield session

    def reference(self, optim: OptimWrapper) -> AbstractContextManager[Session]:
        """A single device of the strategy's kind with rank 0's initial weights; do not use it inside ``session``."""
        return single_device(optim, device=self.strategy().config.device)

    def all_gather(self, value: T) -> list[T]:
        """The value of every process; use it only inside ``session``."""
        return dist.all_gather_object(value)


class RefusedError(FlexTrainError):
    """The strategy refused a request that it is allowed to refuse."""


Check = Callable[[StrategyUnderTest], None]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(title: str) -> Callable[[Check], Check]:
    """Register a check under its function's name, with ``title`` as its description. A check fails by raising."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = (title, function)
        return function

    return register


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
        here = {name: p.detach() for name, p in module.items() if has_memory(p)}
        parts = tested.all_gather({name: p.cpu() for name, p in here.items() if type(p) is Tensor})
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


# While gradients stay the same, the error of a method that adds what it has left out to the next update (error feedback,
# Karimireddy et al., arXiv:1901.09847) stays as large as that of a few updates, one at random without bias grows as the root of
# their number, and what is lost each time as the number.
ROUNDING = 0.08  # of the way: to 8 bits, of gradients or of the weights that they are computed with
FALL = 0.65  # over eight times as many updates: random errors fall to 0.35, what is lost each time stays at 1
STAGES = ((4, 32), (32, 256))  # numbers of updates; the second where little is sent at a time


@check(
    "what updates leave out is not lost: the difference from a single device grows more slowly than the weights move"
)
def lasting_errors(tested: StrategyUnderTest) -> None:
    for early, late in STAGES:
        before, after = _errors(tested, (early, late))
        if after <= max(ROUNDING, FALL * before):
            return
    raise CheckFailedError(
        f"after {late} updates with nearly the same gradients the weights' distance from a single device's is {after:.1%} of the "
        f"way that they have gone, after {early} {before:.1%}: what an update leaves out is lost, add it to the next one"
    )


def _errors(tested: StrategyUnderTest, counts: Sequence[int]) -> list[float]:
    """The distance of the weights from a single device's, divided by that of these from where they began, after each of ``counts``."""
    # One batch and small steps, so that gradients change little.
    with tested.reference(sgd(lr=1e-3)) as single:
        start, *expected = _weights_after(single, counts)
    with tested.session(sgd(lr=1e-3)) as session:
        _, *found = _weights_after(session, counts)
        errors = []
        for ours, theirs in zip(found, expected, strict=True):
            same_keys(ours, theirs, "weights")
            errors.append((_update((theirs, ours), 1).norm() / _update((start, theirs), 1).norm()).item())
        largest: list[float] = torch.tensor(tested.all_gather(errors)).amax(0).tolist()  # NaN of one process stays
        return largest


def _weights_after(session: Session, counts: Sequence[int]) -> list[dict[str, Tensor]]:
    """The whole model before training and after each number of updates, all with the same batch."""
    weights, done = [whole_model(session.strategy)], 0
    for count in counts:
        train(session.strategy, session.model, session.optim, [batches(1)] * (count - done))
        weights.append(whole_model(session.strategy))
        done = count
    return weights


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


@check("parameters that only some processes use in an update, or none, move as on a single device, or are refused")
def unused(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(UPDATES))
    # All samples, the first one and the last one: then one process has a gradient and another has none.
    for (batch,), users in zip(windows[1::2], (slice(None), slice(1), slice(-1, None)), strict=True):
        batch["more"] = torch.zeros(SAMPLES, 1, 3)
        batch["more"][users] = torch.linspace(-1.0, 1.0, 3 * SAMPLES).view(SAMPLES, 1, 3)[users]
    with single_device(adamw(), PartlyUsed, device=tested.strategy().config.device) as single:
        expected = run(single, windows).weights
    try:
        with started(tested.spec, adamw(), PartlyUsed) as session:
            try:
                found = run(session, windows).weights
            except RuntimeError as error:  # of torch, such as a static graph's
                if (advice := explain(session.strategy, error)) is None:
                    raise
                raise RefusedError(advice) from None
    except (ConfigError, StrategyError) as error:
        raise RefusedError(str(error)) from None
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        same_tensors(ours, theirs, f"weights after {number} updates", tested.tolerance)


@check("a tied weight stays one tensor and is stored once, under the first of its names")
def tied(tested: StrategyUnderTest) -> None:
    with tested.session(sgd()) as session:
        weights = run(session, one_each(batches(3))).weights[-1]
        held = dict(session.strategy.module.named_parameters(remove_duplicate=False))
        # A stage may have one of them.
        uses = {id(held[name]) for name in ("tokens.weight", "head.weight") if name in held}
        require(len(uses) < 2, "head.weight and tokens.weight are different tensors after training")
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


# Checks of a strategy's canonical state: its keys, and that training continues from it under another strategy.


BEFORE = 3  # updates before the checkpoint
AFTER = 4


@check("the state has single-device's keys, shapes and dtypes, before the first update and after")
def state_keys(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(2))
    with tested.reference(adamw()) as single:
        expected = [whole_state(single.strategy)]
        run(single, windows)
        expected.append(whole_state(single.strategy))
    with tested.session(adamw()) as session:
        found = [whole_state(session.strategy)]
        run(session, windows)
        found.append(whole_state(session.strategy))
    for state, theirs, moment in zip(found, expected, ("before the first update", "after 2 updates"), strict=True):
        ours = {key: value for key, value in state.items() if not key.startswith(OWN)}
        same_keys(ours, theirs, f"state {moment}")
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                ours_is, theirs_is = _kind(ours[key]), _kind(value)
                require(ours_is == theirs_is, f"state {moment}: {key} is {ours_is}, single-device's is {theirs_is}")
            else:
                require(ours[key] == value, f"state {moment}: {key} is {ours[key]!r}, single-device's is {value!r}")


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@check("training from a single device's checkpoint continues under the strategy as on that device")
def resume_from_single(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(BEFORE + AFTER))
    path = tested.folder / "single"
    with tested.reference(adamw()) as single:
        run(single, windows[:BEFORE])
        if tested.rank == 0:
            save(single, path)
        expected = _continue(single, windows)
        state = whole_state(single.strategy)
    with tested.session(adamw()) as session:
        run(session, windows[AFTER:])  # other updates first, so that everything must come from the checkpoint
        load(session, path)
        _compare(tested, session, _continue(session, windows), expected, state)


@check("training from the strategy's checkpoint continues on a single device as it would have without the strategy")
def resume_to_single(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(BEFORE + AFTER))
    path = tested.folder / "strategy"
    with tested.session(adamw()) as session:
        run(session, windows[:BEFORE])
        save(session, path)
    with tested.reference(adamw()) as single:
        run(single, windows[:BEFORE])
        expected = _continue(single, windows)
        state = whole_state(single.strategy)
    with tested.reference(adamw()) as single:
        load(single, path)
        _compare(tested, single, _continue(single, windows), expected, state)


@check(
    "training from the strategy's own checkpoint continues as without interruption: bit for bit on up to two processes"
)
def resume_itself(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(BEFORE + AFTER))
    path = tested.folder / "itself"
    with tested.session(adamw()) as session:
        run(session, windows[:BEFORE])
        save(session, path)
        expected = _continue(session, windows)
        state = whole_state(session.strategy)
    with tested.session(adamw()) as session:
        load(session, path)
        # A sum over three processes depends on the order, which may change between the first calls of a back end.
        tolerance = 0.0 if tested.world_size <= 2 else tested.tolerance
        found = _continue(session, windows)
        same_numbers(found, expected, "after resuming, the loss", tolerance, "the training that was not interrupted")
        same_tensors(whole_state(session.strategy), state, "state at the end", tolerance)


@check("full_weights gives a model with whole weights that computes alone, and does not change the following updates")
def full_weights(tested: StrategyUnderTest) -> None:
    windows, held_out = one_each(batches(4)), batches(1, seed=5)[0]
    with tested.session(adamw()) as session:
        undisturbed = run(session, windows)
    with tested.session(adamw()) as session:
        strategy = session.strategy
        run(session, windows[:2])
        expected = whole_model(strategy)
        training = session.model.training
        with WholeModel(strategy).open() as model, torch.no_grad():
            require(
                isinstance(model, ConformanceNet), f"full_weights gave a {type(model).__name__}, not the user's model"
            )
            found = {f"model.{name}": tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            model.eval()
            outputs = []
            for _ in range(1 + strategy.topology.rank):  # unequally often: no call may wait for another process
                with strategy.autocast():
                    outputs.append(model(**_on(held_out, strategy.device), mode="tensor").cpu())
        require(
            session.model.training == training, "full_weights left the model in another mode, training or evaluation"
        )
        last = run(session, windows[2:])
    single = ConformanceNet()
    single.load_state_dict({key.removeprefix("model."): value for key, value in expected.items()}, strict=False)
    with torch.no_grad():
        reference = single.eval()(**held_out, mode="tensor")
    same_tensors({key: found[key] for key in expected}, expected, "weights in full_weights", tested.tolerance)
    for output in outputs:
        same_tensors(
            {"logits": output}, {"logits": reference}, "outputs of the model with whole weights", tested.tolerance
        )
    same_tensors(last.weights[-1], undisturbed.weights[-1], "final weights with and without full_weights")


def _on(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _continue(session: Session, windows: list) -> list[float]:  # type: ignore[type-arg]
    return run(session, windows[BEFORE:]).trace.losses


def _compare(
    tested: StrategyUnderTest, session: Session, found: list[float], expected: list[float], state: dict[str, object]
) -> None:
    same_numbers(found, expected, "after resuming, the loss", tested.tolerance)
    same_tensors(whole_state(session.strategy), state, "state at the end of the resumed training", tested.tolerance)
    require(bool(learning_rates(session.optim)), "no parameter group is left after resuming")


# Checks of a strategy's properties, precision, refusals and teardown.


@check("rank, world size, device and data shards are right, and module is the user's own model")
def facts(tested: StrategyUnderTest) -> None:
    with tested.session(sgd()) as session:
        strategy = session.strategy
        strategy.join()  # a second call must change nothing
        require(
            strategy.topology.rank == tested.rank, f"rank is {strategy.topology.rank}, the launcher said {tested.rank}"
        )
        require(
            strategy.topology.world_size == tested.world_size,
            f"world_size is {strategy.topology.world_size}, {tested.world_size} were started",
        )
        require(isinstance(strategy.device, torch.device), f"device is {strategy.device!r}, give a torch.device")
        topology = strategy.topology
        shards = tested.all_gather((*topology.shard, topology.reports))
        count = shards[0][1]
        require(
            all(shard[1] == count for shard in shards) and {index for index, *_ in shards} == set(range(count)),
            f"topology.data is {shards} over the processes: the indices must cover 0 to count - 1",
        )
        require(
            sorted(index for index, _, reports in shards if reports) == list(range(count)),
            f"topology is {shards} over the processes: one process for each part of the data must report",
        )
        module = strategy.module
        require(
            isinstance(module, ConformanceNet), f"module is a {type(module).__name__}, the user's is a ConformanceNet"
        )
        whole = ConformanceNet()
        names, also = ({name for name, _ in whole.named_parameters(remove_duplicate=r)} for r in (True, False))
        held = set().union(*tested.all_gather({name for name, _ in module.named_parameters()}))
        # A process that has a tied parameter for its second use only, has it by its second name.
        require(names <= held <= also, "module's parameter names are not the user's")
        require(len(session.optim.param_groups) > 0, "the wrapper that setup returned has no param_groups")


# Rounding to 8 or 11 bits changes a few updates by less than 0.5 %, gradients that are halved by 50 %.
HALF_PRECISION = 0.1


def _trains_as_alone(
    tested: StrategyUnderTest, dtype: str, optim: Callable[[bool], OptimWrapper], windows: Sequence[Sequence[Batch]]
) -> None:
    """Raise CheckFailedError if updates in half precision are not nearly a single device's; collective.

    Args:
        dtype: for the message.
        optim: makes the wrapper: with True that of half precision, with False the same in float32.
    """
    what, error, told = _distance(tested, lambda: optim(True), windows)
    if error > HALF_PRECISION:  # a lossy strategy is as far from a single device in float32
        _, lossy, _ = _distance(tested, lambda: optim(False), windows)
        allowed = HALF_PRECISION + 2 * lossy
        require(
            error <= allowed,
            f"in {dtype} {what} differ by {error:.0%} from single-device's, allowed {allowed:.0%}{told}",
        )


def _distance(
    tested: StrategyUnderTest, optim: Callable[[], OptimWrapper], windows: Sequence[Sequence[Batch]]
) -> tuple[str, float, str]:
    """What differs most from a single device's in a training, by how much, and in words by which factor."""
    with tested.reference(optim()) as single:
        expected = run(single, windows)
    with tested.session_or_refused(optim()) as session:
        found = run(session, windows)
        keys = sorted(found.weights[0].keys() & expected.weights[0].keys())
        pairs = {
            "losses": _finite(found.trace.losses, expected.trace.losses),
            "gradient norms": _finite(found.trace.grad_norms, expected.trace.grad_norms),
            "updates": (_way(found.weights, keys), _way(expected.weights, keys)),
        }
        errors = {what: _relative_norm(ours - theirs, theirs) for what, (ours, theirs) in pairs.items()}
        errors = {what: max(tested.all_gather(error)) for what, error in errors.items()}
    what = max(errors, key=errors.__getitem__)
    return what, errors[what], f", they are {_relative_norm(*pairs[what]):.3g} times as large"


def _way(weights: Sequence[dict[str, Tensor]], keys: Sequence[str]) -> Tensor:
    """How far the weights have gone."""
    return torch.cat([(weights[-1][key] - weights[0][key]).double().flatten() for key in keys])


def _finite(found: Sequence[float | None], expected: Sequence[float | None]) -> tuple[Tensor, Tensor]:
    """Those of both that are numbers on a single device, and that the strategy has."""
    pairs = [
        (a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None and math.isfinite(b)
    ]
    ours, theirs = torch.tensor(pairs or [(0.0, 0.0)], dtype=torch.float64).unbind(1)
    return ours, theirs


def _relative_norm(tensor: Tensor, other: Tensor) -> float:
    return float((tensor.norm() / other.norm().clamp(min=1e-30)).nan_to_num(torch.inf))


@check(
    "float32 is float32, and bfloat16 under AmpOptimWrapper computes in it, with float32 weights, and trains nearly as a single device does"
)
def precision(tested: StrategyUnderTest) -> None:
    with tested.session(sgd()) as session:
        _require_dtypes(session, compute=torch.float32)
    with tested.session_or_refused(AmpOptimWrapper(dict(type="AdamW", lr=1e-3), dtype="bfloat16")) as session:
        run(session, one_each(batches(2)))
        _require_dtypes(session, compute=torch.bfloat16)
        # A layer in the middle of the model, because the model's outputs may be cast back.
        inner = session.strategy.module.get_submodule("blocks.0.out")
        found = set(tested.all_gather(_output_dtype(session, inner))) - {None}  # of the processes that have the layer
        require(found == {torch.bfloat16}, "a linear layer's output under autocast is not bfloat16")
        state = session.strategy.state()
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                require(value.dtype is torch.float32, f"{key} is stored in {value.dtype}, its truth must be float32")
    _trains_as_alone(tested, "bfloat16", _cast, one_each(batches(4)))


def _cast(in_half: bool) -> OptimWrapper:
    return AmpOptimWrapper(dict(type="SGD", lr=1e-3), dtype="bfloat16") if in_half else sgd(1e-3)


def _output_dtype(session: Session, layer: torch.nn.Module) -> torch.dtype | None:
    seen: list[torch.dtype] = []
    handle = layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    run(session, one_each(batches(1)))
    handle.remove()
    return seen[0] if seen else None


def _require_dtypes(session: Session, compute: torch.dtype) -> None:
    report = session.strategy.precision_report()
    require(report.compute == (compute,), f"precision_report says compute {report.compute}, {compute} was asked for")
    kept = report.masters or report.parameters
    require(kept == (torch.float32,), f"precision_report says the weights are kept in {kept}, float32 was asked for")


@check("gradients that overflow on one rank skip the update on all ranks; other updates are nearly a single device's")
def overflow(tested: StrategyUnderTest) -> None:
    windows = [[_strained(batch, number == 2)] for number, batch in enumerate(batches(5))]
    with tested.session_or_refused(_scaled(True)) as session:
        base = learning_rates(session.optim)
        result = run(session, windows, [Decay(session.optim)])
        outcomes = tested.all_gather((result.trace.skipped, learning_rates(session.optim)))
        parts = tested.all_gather(result.weights)
    for rank, (skipped, lrs) in enumerate(outcomes):
        require(
            skipped == [False, False, True, False, False],
            f"rank {rank} reports skipped={skipped}, only update 2 had a gradient that is not finite",
        )
        applied = [lr * 0.8**4 for lr in base]
        same_tensors(
            {"lr": torch.tensor(lrs)},
            {"lr": torch.tensor(applied)},
            f"learning rates of rank {rank} after 4 updates",
            1e-6,
        )
        same_tensors(parts[rank][3], parts[rank][2], f"weights of rank {rank} before and after the skipped update")
        same_tensors(parts[rank][5], parts[0][5], f"final weights of rank {rank} and rank 0")
    moved = any(not torch.equal(parts[0][3][key], parts[0][4][key]) for key in parts[0][3])
    require(moved, "the update after the skipped one did not change the weights")
    _trains_as_alone(tested, "float16", _scaled, one_each(batches(4)))


def _scaled(in_half: bool) -> OptimWrapper:
    optimizer: dict[str, Any] = dict(type="SGD", lr=0.05, momentum=0.9)
    clip = dict(max_norm=5.0)  # more than norms are, unless they are those of scaled gradients
    if in_half:
        return AmpOptimWrapper(optimizer, dtype="float16", loss_scale=dict(init_scale=256.0), clip_grad=clip)
    return OptimWrapper(optimizer, clip_grad=clip)


def _strained(batch: Batch, overflowing: bool) -> Batch:
    """The batch with ``strain`` zero, or infinite for the last sample, which the last rank gets."""
    strain = torch.zeros(SAMPLES)
    if overflowing:
        strain[-1] = torch.inf
    return {**batch, "strain": strain}


@check("impossible requests are refused: unknown options, an optimizer with another model's parameters")
def refusals(tested: StrategyUnderTest) -> None:
    described = isinstance(tested.spec, (str, Mapping)) or (
        isinstance(tested.spec, type) and issubclass(tested.spec, Strategy)
    )
    if described:
        config: dict[str, Any] = dict(tested.spec) if isinstance(tested.spec, Mapping) else {"type": tested.spec}
        try:
            STRATEGIES.build({**config, "no_such_option": 1}, "strategy")
        except ConfigError as error:
            require("no_such_option" in str(error), f"the error about an unknown option does not name it: {error}")
        else:
            raise CheckFailedError("an unknown option was accepted, it must raise ConfigError")
    foreign = OptimWrapper(torch.optim.SGD(ConformanceNet().parameters(), lr=0.1))
    try:
        with tested.session(foreign):
            pass
    except (ConfigError, StrategyError):
        return
    raise CheckFailedError(
        "setup accepted an optimizer that holds another model's parameters, it must raise StrategyError"
    )


@check(
    "after teardown, which may be called twice, no process group, thread, variable or model is left, and a new job can "
    "start"
)
def teardown(tested: StrategyUnderTest) -> None:
    variables, threads = dict(os.environ), set(threading.enumerate())
    models = [weakref.ref(_trained_and_left(tested)) for _ in range(2)]
    gc.collect()
    require(not any(model() for model in models), "the model is still in memory after teardown")
    own = ("MASTER_PORT", "TORCHINDUCTOR_CACHE_DIR")  # set by this kit, and by torch
    changed = sorted(name for name, value in os.environ.items() if variables.get(name) != value and name not in own)
    require(not changed, f"environment variables were left changed: {', '.join(changed)}")
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    require(not left, f"threads were left running: {', '.join(left)}")


def _trained_and_left(tested: StrategyUnderTest) -> nn.Module:
    """A model after a few updates and teardown."""
    module = ConformanceNet()
    strategy = tested.strategy()
    try:
        strategy.join()
        joined = dist.is_initialized()
        require(joined or tested.world_size == 1, "join() did not join a process group")
        strategy.example = partial(ConformanceNet.sample, strategy.topology.data.count, 0)
        model, optim = strategy.setup(module, sgd())
        assert optim is not None
        run(Session(strategy, model, optim), one_each(batches(3)))  # type: ignore[arg-type]
    finally:
        strategy.leave()
    require(not dist.is_initialized(), "the process group is still there after teardown")
    strategy.leave()
    return module
