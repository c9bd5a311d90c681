"""Optimizers from elsewhere under every strategy: what they compute on one device, or refused before the first update."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flextrain import BaseMetric, FlexibleRunner, Hook
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.optim import OptimWrapper, trial
from flextrain.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from flextrain.testing import WorkerError, WorkerGroup
from flextrain.testing.differences import relative_difference
from flextrain.testing.loop import windows
from flextrain.testing.models import Mlp, SmallModel
from flextrain.testing.sessions import Session, load, run, save, single_device, started, whole_model, whole_state


class Plain(Optimizer):
    """Calls ``update(group, state, parameter, gradient)`` for each parameter, as most optimizers outside of torch do."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, self.state[parameter], parameter, parameter.grad)

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        raise AssertionError("each has its own")


class Lion(Plain):
    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        state["updates"] = state.get("updates", torch.tensor(0)) + 1  # a counter with a name of its own
        p.add_(average.mul(group["momentum"]).add(grad, alpha=1 - group["momentum"]).sign_(), alpha=-group["lr"])
        average.lerp_(grad, 0.01)


class Lars(Plain):
    """Its state has the parameter's shape; only the arithmetic needs all of it."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        trust = torch.linalg.vector_norm(p) / (torch.linalg.vector_norm(grad) + 1e-9)
        moving = state.setdefault("momentum_buffer", torch.zeros_like(p))
        moving.mul_(group["momentum"]).add_(grad * trust)
        p.add_(moving, alpha=-group["lr"])


class Lamb(Plain):
    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        state["step"] = state.get("step", 0) + 1
        first, second = (state.setdefault(key, torch.zeros_like(p)) for key in ("exp_avg", "exp_avg_sq"))
        first.lerp_(grad, 0.1)
        second.lerp_(grad * grad, 0.01)
        update = first / (1 - 0.9 ** state["step"]) / ((second / (1 - 0.99 ** state["step"])).sqrt() + 1e-6)
        p.sub_(update * (group["lr"] * p.norm() / (update.norm() + 1e-9)))


class NovoGrad(Plain):
    """One number per parameter."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        square = grad.pow(2).sum()
        state["norm"] = square if "norm" not in state else state["norm"] * 0.9 + square * 0.1
        moving = state.setdefault("momentum_buffer", torch.zeros_like(p))
        moving.mul_(group["momentum"]).add_(grad / (state["norm"].sqrt() + 1e-8))
        p.add_(moving, alpha=-group["lr"])


class Shampoo(Plain):
    """A matrix for each dimension."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        for dim in range(grad.ndim):
            flat = grad.transpose(0, dim).reshape(grad.shape[dim], -1)
            if f"precond_{dim}" not in state:
                state[f"precond_{dim}"] = torch.eye(grad.shape[dim], device=grad.device)
            state[f"precond_{dim}"].add_(flat @ flat.t())
            values, vectors = torch.linalg.eigh(state[f"precond_{dim}"])
            root = vectors @ torch.diag(values.clamp(min=1e-6) ** (-1 / (2 * grad.ndim))) @ vectors.t()
            grad = (root @ flat).reshape(grad.transpose(0, dim).shape).transpose(0, dim)
        p.add_(grad, alpha=-group["lr"])


class RowScaled(Plain):
    """State in another shape than the parameter's, made of the parameter's own kind of tensor."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        if grad.ndim < 2:
            p.add_(grad, alpha=-group["lr"])
            return
        rows = grad.pow(2).mean(dim=1)
        state["rows"] = rows if "rows" not in state else state["rows"] * 0.9 + rows * 0.1
        p.add_(grad / (state["rows"].sqrt().unsqueeze(1) + 1e-6), alpha=-group["lr"])


class LargeRows(Plain):
    """One number for each row of matrices from 64 x 64 on, as Adafactor's ``min_dim_size_to_factor``; and for each of others."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        square = grad.pow(2)
        if p.ndim == 2 and min(p.shape) >= 64:
            square = square.mean(dim=1, keepdim=True)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(square))
        second.lerp_(square, 0.1)
        p.sub_(group["lr"] * grad / (second.sqrt() + 1e-3))


class Sam(Plain):
    """Takes a closure, says that it need not have one, and asserts that it has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "sharpness-aware minimization requires closure"


class Centralized(torch.optim.AdamW):
    """torch's own, with gradients whose rows have no mean."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad = parameter.grad - parameter.grad.mean(dim=1, keepdim=True)
        super().step()


def hugging_face() -> dict[str, Any]:
    from transformers.optimization import Adafactor

    return dict(type=Adafactor, lr=0.01, relative_step=False, scale_parameter=True)


class Matrices(SmallModel):
    """Without a vector, which Muon does not take; of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 13, bias=False), nn.Linear(13, self.num_classes, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


OPTIMIZERS: dict[str, Callable[[], dict[str, Any]]] = {
    "NAdam": lambda: dict(type="NAdam", lr=0.01),
    "Adafactor": lambda: dict(type="Adafactor", lr=0.01),
    "Muon": lambda: dict(type="Muon", lr=0.02),
    "HuggingFace": hugging_face,
    "Lion": lambda: dict(type=Lion),
    "Lars": lambda: dict(type=Lars),
    "Lamb": lambda: dict(type=Lamb),
    "NovoGrad": lambda: dict(type=NovoGrad),
    "Shampoo": lambda: dict(type=Shampoo),
    "RowScaled": lambda: dict(type=RowScaled),
    "LargeRows": lambda: dict(type=LargeRows),
    "Sam": lambda: dict(type=Sam),
    "Centralized": lambda: dict(type=Centralized, lr=0.01),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": dict(type=SingleDeviceStrategy, device="cpu"),
    "ddp": dict(type=DDPStrategy, device="cpu"),
    "fsdp": dict(type=FSDPStrategy, device="cpu"),
    **{f"zero{stage}": dict(type=DeepSpeedStrategy, device="cpu", zero_optimization=dict(stage=stage)) for stage in (1, 2, 3)},
}  # fmt: skip


ELEMENTWISE = ("NAdam", "Lion")
LOOKS_AT_WHOLE = ("Muon",)
# What is refused, with the part of the message that names what is in the way.
NEEDS_CLOSURE = "Sam cannot be stepped once per update as it is (AssertionError: sharpness-aware"
REFUSED_SPREAD = {
    "Adafactor": "Adafactor cannot update sharded parameters, RuntimeError: aten.",
    "HuggingFace": "Adafactor cannot update sharded parameters, RuntimeError: aten.",
    "NovoGrad": 'NovoGrad keeps "norm" as partial sums',
    "Shampoo": "Shampoo cannot update sharded parameters, RuntimeError: aten.",
    "Sam": NEEDS_CLOSURE,
}
REFUSED_PIECES = {
    "Adafactor": 'Adafactor keeps "row_var" of shape (16, 1) of a parameter of shape (16, 24)',
    "HuggingFace": 'Adafactor keeps "RMS", one number that it computes from a parameter as a whole',
    "Lars": 'Lars keeps "momentum_buffer", which it computes from a parameter as a whole',
    "Lamb": "Lamb computes with a parameter as a whole",
    "NovoGrad": 'NovoGrad keeps "norm", one number that it computes from a parameter as a whole',
    "Shampoo": 'Shampoo keeps "precond_0" of shape (16, 16) of a parameter of shape (16,)',
    "RowScaled": 'RowScaled keeps "rows" of shape (16,) of a parameter of shape (16, 24)',
    "LargeRows": 'LargeRows keeps "exp_avg_sq" of shape (144, 1) of a parameter of shape (144, 140)',
    "Sam": "Sam could not be tried on small parameters, AssertionError: sharpness-aware",
    "Centralized": 'Centralized keeps "exp_avg", which it computes from a parameter as a whole',
}


def refusal(name: str, strategy: str) -> str | None:
    if strategy == "fsdp":
        return REFUSED_SPREAD.get(name)
    if strategy.startswith("zero"):
        return REFUSED_PIECES.get(name)
    return NEEDS_CLOSURE if name == "Sam" else None


def outcome(name: str, spec: dict[str, Any], path: Path) -> str | dict[str, float]:
    """Largest differences from one device, and from itself after a resume; or why it was refused."""
    model: type[SmallModel] = Matrices if name == "Muon" else Mlp
    batches = windows([model.sample(8, seed) for seed in range(6)], 1)
    try:
        with started(spec, OptimWrapper(OPTIMIZERS[name]()), model) as session:
            found = run(session, batches[:3])
            save(session, path)
            found = run(session, batches[3:])
            state = whole_state(session.strategy)
    except (ConfigError, StrategyError) as error:
        return str(error)
    with started(spec, OptimWrapper(OPTIMIZERS[name]()), model, seed=99) as session:
        load(session, path)
        run(session, batches[3:])
        resumed = whole_state(session.strategy)
    with single_device(OptimWrapper(OPTIMIZERS[name]()), model) as single:
        expected = run(single, batches)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {
        "weights": max(relative_difference(found.weights[-1][key], v) for key, v in expected.weights[-1].items()),
        "moved": max(relative_difference(expected.weights[0][key], v) for key, v in expected.weights[-1].items()),
        "resumed": max(relative_difference(resumed[key], value) for key, value in tensors.items()),
    }


def names(strategy: str) -> list[str]:
    """What `make test` looks at: one of each kind."""
    if strategy in ("single", "ddp"):
        return ["Sam"]
    return ["Lion", "Lars", "RowScaled", "NovoGrad", "LargeRows"] if strategy in ("fsdp", "zero2") else []


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=[] if name in names(strategy) else pytest.mark.full)
        for strategy in STRATEGIES
        for name in OPTIMIZERS
    ],
)
def test_equal_to_one_device_or_refused(
    workers1: WorkerGroup, workers2: WorkerGroup, tmp_path: Path, strategy: str, name: str
) -> None:
    if name == "HuggingFace":
        pytest.importorskip("transformers")
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    workers = workers1 if strategy == "single" else workers2
    for found in workers.run(outcome, name, STRATEGIES[strategy], tmp_path / "c"):
        if (reason := refusal(name, strategy)) is not None:
            assert isinstance(found, str), found
            assert found.startswith(f"optim_wrapper.optimizer: {reason}"), found
            assert "\n" not in found
            continue
        assert isinstance(found, dict), found
        # Muon computes in bfloat16, which adds up the parts of a matrix in another order.
        assert found["weights"] < (0.1 * found["moved"] if name == "Muon" else 1e-5)
        assert found["moved"] > 0.01
        assert found["resumed"] == 0.0


def test_every_optimizer_stands_in_one_of_the_columns() -> None:
    assert len(OPTIMIZERS) == 13
    assert set(OPTIMIZERS) == {*ELEMENTWISE, *LOOKS_AT_WHOLE, *REFUSED_PIECES}


class Sharpness(torch.optim.Optimizer):
    """As SAM is written everywhere: it steps another optimizer, which keeps the momentum."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, dict(lr=lr, rho=rho))
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = parameter.detach().clone()
        self.base_optimizer.step()


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["single", "fsdp", pytest.param("zero2", marks=pytest.mark.deepspeed)])
def test_what_an_inner_optimizer_keeps_comes_back(
    workers1: WorkerGroup, workers2: WorkerGroup, tmp_path: Path, strategy: str
) -> None:
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    workers = workers1 if strategy == "single" else workers2
    for weights, rates in workers.run(goes_on, STRATEGIES[strategy], tmp_path / "c"):
        assert weights == 0.0
        assert rates == [0.05, 0.05]


def goes_on(spec: dict[str, Any], path: Path) -> tuple[float, list[float]]:
    """How far a resumed run is from one that went on, and the rates of both optimizers after a schedule has set one."""
    batches = windows([Mlp.sample(8, seed) for seed in range(6)], 1)
    with started(spec, OptimWrapper(dict(type=Sharpness)), Mlp) as session:
        run(session, batches[:3])
        save(session, path)
        expected = run(session, batches[3:]).weights[-1]
    with started(spec, OptimWrapper(dict(type=Sharpness)), Mlp, seed=99) as session:
        load(session, path)
        found = run(session, batches[3:]).weights[-1]
        optimizer: Any = session.optim.optimizer
        session.optim.param_groups[0]["lr"] = 0.05
        rates = [optimizer.param_groups[0]["lr"], optimizer.base_optimizer.param_groups[0]["lr"]]
    return max(relative_difference(found[key], value) for key, value in expected.items()), rates


class ClimbsFirst(OptimWrapper):
    """Gives the optimizer the closure that it asks for."""

    def update_params(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(lambda: float(loss))


def test_an_override_may_step_in_a_way_of_its_own() -> None:
    strategy = SingleDeviceStrategy(device="cpu")
    _, optim = strategy.setup(nn.Linear(2, 2), ClimbsFirst(dict(type=Sam)))
    assert optim is not None
    optim.update_params(strategy.module(torch.ones(1, 2)).sum())
    strategy.leave()


def test_an_optimizer_that_is_built_is_tried_as_well() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match="Sam cannot be stepped once per update as it is"):
        SingleDeviceStrategy(device="cpu").setup(model, OptimWrapper(Sam(model.parameters(), lr=0.5)))


class ListKeeper(Plain):
    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        state["factors"] = self.container([grad.sum(0), grad.sum(-1)])
        state["sizes"] = [grad.numel(), 1.5]

    container: Callable[[list[Tensor]], Any] = list


class QueueKeeper(ListKeeper):
    container = deque


@pytest.mark.parametrize(("kind", "what"), [(ListKeeper, "list"), (QueueKeeper, "deque")])
def test_state_that_no_checkpoint_can_hold_is_refused_before_training(kind: type, what: str) -> None:
    message = f'optim_wrapper.optimizer: {kind.__name__} keeps "factors", a {what} of tensors, which no checkpoint has'
    with pytest.raises(StrategyError, match=message):
        SingleDeviceStrategy(device="cpu").setup(nn.Linear(2, 2), OptimWrapper(dict(type=kind)))


class Lookahead(Lion):
    """Goes back half of the way at every sixth update, by an operation on lists that DTensors do not have."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        slow = state.setdefault("slow", p.detach().clone())
        super().update(group, state, p, grad)
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 6 == 0:
            assert not isinstance(p, DTensor), "has no such operation"
            slow.lerp_(p, 0.5)
            p.copy_(slow)


@pytest.mark.distributed
def test_what_fails_after_some_updates_is_refused_before_training(workers2: WorkerGroup) -> None:
    for found in workers2.run(refused, Lookahead):
        assert found.startswith(
            "optim_wrapper.optimizer: Lookahead cannot update sharded parameters, AssertionError: has no"
        )


def refused(kind: type, spec: dict[str, Any] = STRATEGIES["fsdp"]) -> str:
    """In a worker: what a strategy says at set-up."""
    try:
        with started(spec, OptimWrapper(dict(type=kind)), Mlp):
            return ""
    except StrategyError as error:
        return str(error)


def test_quantised_moments_are_refused_before_training() -> None:
    kind = pytest.importorskip("torchao.optim").AdamW8bit
    message = "optim_wrapper.optimizer: AdamW8bit keeps quantised moments of large parameters, which no checkpoint has"
    with pytest.raises(StrategyError, match=message):
        SingleDeviceStrategy(device="cpu").setup(nn.Linear(64, 64), OptimWrapper(dict(type=kind)))


@pytest.mark.parametrize("kind, width", [("_AdamW", 64), ("AdamW8bit", 65)])
def test_torchaos_optimizers_that_quantise_no_moment_are_taken(kind: str, width: int) -> None:
    found = getattr(pytest.importorskip("torchao.optim"), kind)
    optimizer = found(nn.Linear(width, 64, bias=False).parameters())
    assert trial.why_not_saved(optimizer) is None


class Counting(Lion):
    """Counts its updates where no checkpoint looks."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        super().step(closure)
        if self.updates % 5 == 0:
            super().step(closure)


class Both(Plain):
    """Two optimizers in one, each with its own state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.inner = [torch.optim.AdamW(group["params"], lr=lr) for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.inner:
            optimizer.step()


class OfAll(Lion):
    """Has state of its own beside that of its parameters, as torch allows."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state.setdefault("all", {"updates": 0})["updates"] += 1  # type: ignore[call-overload]
        for group in self.param_groups:
            group["lr"] = 0.01 * self.state["all"]["updates"]  # type: ignore[index]
        super().step()


class OwnFormat(Lion):
    """Adds to its ``state_dict``, and needs what it has added."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.updates
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "updates"})


class Noisy(Lion):
    """Draws random numbers, which a checkpoint does have."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        super().update(group, state, p, grad + torch.randn_like(grad))


@pytest.mark.parametrize(
    ("kind", "warned"),
    [(Counting, True), (Both, True), (OfAll, True), (OwnFormat, True), (Noisy, False), (Lamb, False), (Sam, False)],
)
def test_state_that_checkpoints_do_not_have(
    kind: type[Optimizer], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="flextrain"):
        SingleDeviceStrategy(device="cpu").setup(nn.Linear(3, 3), ClimbsFirst(dict(type=kind)))
    expected = (
        f'optim_wrapper.optimizer: {kind.__name__} keeps values outside of its parameters\' "state" and "param_groups"'
    )
    assert [message.startswith(expected) for message in caplog.messages] == [True] * warned


class Small(Plain):
    """Keeps its state in other dtypes than the parameter's."""

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        average = state.setdefault("average", torch.zeros_like(p, dtype=torch.bfloat16))
        signs = state.setdefault("signs", torch.zeros_like(p, dtype=torch.int8))
        state.setdefault("kind", "small")
        average.add_(grad.bfloat16())
        signs.add_(grad.sign().to(torch.int8))
        p.add_(average.to(p.dtype) + signs.to(p.dtype), alpha=-group["lr"])


def _dtypes(optim: OptimWrapper) -> dict[str, Any]:
    first = next(iter(optim.optimizer.state.values()))
    return {key: value.dtype if isinstance(value, Tensor) else value for key, value in first.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_keeps_its_dtype_when_a_run_goes_on(dtype: torch.dtype, tmp_path: Path) -> None:
    def session(dtype: torch.dtype = dtype) -> Session:
        torch.manual_seed(0)
        strategy, optim = SingleDeviceStrategy(device="cpu"), OptimWrapper(dict(type=Small))
        strategy.setup(nn.Linear(3, 2, dtype=dtype), optim)
        return Session(strategy, strategy.module, optim)

    def train(one: Session, updates: range) -> None:
        for update in updates:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(update)).to(dtype)
            one.optim.update_params(one.model(x).float().square().mean())

    straight, resumed, other = session(), session(), session(torch.float64)
    train(straight, range(3))
    save(straight, tmp_path / "half")
    train(straight, range(3, 6))
    load(resumed, tmp_path / "half")
    train(resumed, range(3, 6))
    assert _dtypes(resumed.optim) == dict(average=torch.bfloat16, signs=torch.int8, kind="small")
    for one, expected in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, expected)
    load(other, tmp_path / "half")  # what had the parameter's dtype follows it
    follows = torch.float64 if dtype is torch.bfloat16 else torch.bfloat16
    assert _dtypes(other.optim) == dict(average=follows, signs=torch.int8, kind="small")


def test_parameters_that_an_optimizer_does_not_take() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch 2.9")
    with pytest.raises(ConfigError, match=r"optim_wrapper\.optimizer: Muon only supports 2D parameters"):
        SingleDeviceStrategy(device="cpu").setup(nn.Linear(3, 3), OptimWrapper(dict(type="torch.optim.Muon", lr=0.01)))


def test_a_trial_leaves_random_numbers_and_the_model_alone() -> None:
    model, state = nn.Linear(2, 2), torch.get_rng_state()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    SingleDeviceStrategy(device="cpu").setup(model, optim := OptimWrapper(dict(type=Lars)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not optim.optimizer.state


class ScheduleFree(Plain):
    """Trains weights beside those that are to be evaluated, as the package schedulefree does: eval() swaps these in."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr, momentum)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["momentum"] if trains else 1 - 1 / group["momentum"])
                group["train_mode"] = trains

    def update(self, group: dict[str, Any], state: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        assert group["train_mode"], "not in training mode"
        state["step"] = state.get("step", 0) + 1
        z = state.setdefault("z", p.clone())
        p.lerp_(z, 1 / state["step"]).sub_(grad, alpha=group["lr"] * (1 - group["momentum"] * (1 - 1 / state["step"])))
        z.sub_(grad, alpha=group["lr"])


class Modes(Hook):
    def __init__(self, evaluates: bool) -> None:
        self.evaluates = evaluates

    def before_train(self, runner: Any) -> None:
        runner.optim_wrapper.optimizer.train()

    def before_val_epoch(self, runner: Any) -> None:
        if self.evaluates:
            runner.optim_wrapper.optimizer.eval()

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        runner.optim_wrapper.optimizer.train()


class Reader:
    def publish(self, weights: Any) -> None:
        pass


class Loss(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += (data_samples[0] == data_samples[1]).float().tolist()

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"right": sum(results)}


def scored(spec: dict[str, Any], path: Path, evaluates: bool) -> tuple[list[str], dict[str, Tensor]]:
    """In a worker: the warnings of a training with a validation in each epoch, and the weights to evaluate at its end."""
    sample = Mlp.sample(16, 0)
    data = dict(
        dataset=[{name: part[i] for name, part in sample.items()} for i in range(16)],
        batch_size=2,
        collate_fn="default_collate",
    )
    runner = FlexibleRunner(
        model=Mlp,
        strategy=spec,
        work_dir=path,
        train_dataloader=dict(data),
        val_dataloader=dict(data),
        val_evaluator=Loss(),
        val_cfg=dict(),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type=ScheduleFree)),
        custom_hooks=[Modes(evaluates)],
        randomness=dict(seed=3),
        default_hooks=dict(checkpoint=None),
    )
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    runner.logger.addHandler(handler)
    try:
        runner.train()
        runner.publish(Reader())
        runner.optim_wrapper.optimizer.eval()
        runner.publish(Reader())
        return lines, {key: value.clone() for key, value in whole_model(runner.strategy).items()}
    finally:
        runner.logger.removeHandler(handler)
        runner.strategy.leave()


@pytest.mark.distributed
@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluating_the_weights_that_are_trained_is_told(
    workers2: WorkerGroup, tmp_path: Path, evaluates: bool
) -> None:
    said = "optim_wrapper.optimizer: ScheduleFree is in training mode, in which the weights are not those to evaluate"
    whole = workers2.run(scored, STRATEGIES["ddp"], tmp_path, evaluates)
    parts = workers2.run(scored, STRATEGIES["fsdp"], tmp_path, evaluates)
    in_training = f"{said}; call its eval() before publish(), and train() after it"
    assert parts[0][0][-1:] == [in_training]
    assert [line.split(";")[0] for line in parts[0][0][:-1]] == ([] if evaluates else [said])
    for (_, weights), (_, expected) in zip(parts, whole, strict=True):
        assert max(relative_difference(weights[key], value) for key, value in expected.items()) < 1e-5


@pytest.mark.deepspeed
def test_an_engine_with_copies_refuses_weights_that_are_swapped(workers1: WorkerGroup, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    said = "optim_wrapper.optimizer: ScheduleFree swaps the weights that it has by train() and eval(), and DeepSpeed's engine computes"
    with pytest.raises(WorkerError, match=re.escape(said)):
        workers1.run(scored, STRATEGIES["zero2"], tmp_path, True)


def drawn(strategy: str) -> tuple[float, float]:
    """In a worker: how far an optimizer that draws is from one device, and what is drawn next."""
    batches = windows([Mlp.sample(8, seed) for seed in range(3)], 1)
    with started(STRATEGIES[strategy], OptimWrapper(dict(type=Noisy)), Mlp) as session:
        found = run(session, batches).weights[-1]
        number = float(torch.rand(()))
    with single_device(OptimWrapper(dict(type=Noisy)), Mlp) as single:
        expected = run(single, batches).weights[-1]
    return max(relative_difference(found[key], value) for key, value in expected.items()), number


@pytest.mark.deepspeed
def test_replicas_that_would_draw_apart_are_refused(workers2: WorkerGroup) -> None:
    pytest.importorskip("deepspeed")
    for found in workers2.run(
        refused, Noisy, dict(type=DeepSpeedStrategy, device="cpu", zero_optimization=dict(stage=0))
    ):
        assert found.startswith(
            "optim_wrapper.optimizer: Noisy draws random numbers, which are others on every process"
        )


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_draw_alike_in_the_optimizer_and_apart_elsewhere(workers2: WorkerGroup, strategy: str) -> None:
    (first, number), (second, other) = workers2.run(drawn, strategy)
    assert max(first, second) < 1e-5
    assert number != other
