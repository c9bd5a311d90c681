"""Expert parallelism makes the training run that one device makes; what cannot be divided is refused in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flextrain import MeshStrategy
from flextrain.core.base.errors import FlexTrainError
from flextrain.core.hugging_face.transformers_private import WITH_PLANS
from flextrain.core.torch_compat.torch_private import TorchDispatchMode
from flextrain.strategies.mesh import experts as balance
from flextrain.strategies.mesh.experts import Dispatch, ExpertParallel, Repetitions, find_stacks
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import CheckFailedError

from .models import MATRICES, MODELS, Experts, Mixture, Plain, build
from .parity import RECIPES, compare

EXPERTS = {"layers.*.experts": "experts"}
MESH = dict(type="MeshStrategy")
FULL = pytest.mark.full

CASES: list[Any] = [
    pytest.param(2, dict(ep=2, plan=EXPERTS), "mixture", "accumulate-clip", id="dp2"),
    pytest.param(2, dict(ep=2, plan=EXPERTS, wrap="blocks"), "mixture_starved", "frozen", id="dp2-no_token"),
    pytest.param(
        2, dict(ep=2, tp=2, plan=EXPERTS | MATRICES), "mixture", "accumulate-clip", id="tp2-same_tokens", marks=FULL
    ),
    pytest.param(
        4, dict(ep=4, tp=2, plan=EXPERTS | MATRICES), "mixture", "accumulate-clip", id="dp2xtp2-ep4", marks=FULL
    ),
    pytest.param(4, dict(ep=2, plan=EXPERTS), "mixture", "adamw-clip", id="dp4", marks=FULL),
    pytest.param(4, dict(ep=4, plan=EXPERTS), "mixture", "adamw", id="dp4-ep4", marks=FULL),
    pytest.param(4, dict(ep=2, dp_replicate=2, plan=EXPERTS), "mixture", "accumulate-clip", id="hsdp", marks=FULL),
    pytest.param(4, dict(ep=2, tp=2, plan=EXPERTS | MATRICES), "mixture", "frozen", id="dp2xtp2", marks=FULL),
    pytest.param(
        2, dict(tp=2, plan=EXPERTS | MATRICES), "mixture", "accumulate-clip", id="tp2-whole_experts", marks=FULL
    ),
    pytest.param(2, dict(ep=2, tp=2), "mixtral", "accumulate-clip", id="mixtral-tp2"),
    pytest.param(2, dict(ep=2, cp=2), "mixtral", "accumulate-clip", id="mixtral-cp2", marks=FULL),
    pytest.param(4, dict(ep=4, cp=2, tp=2), "mixtral", "accumulate-clip", id="mixtral-cp2xtp2-ep4", marks=FULL),
    pytest.param(2, dict(ep=2, wrap="blocks"), "mixtral", "accumulate-clip", id="mixtral-dp2"),
    pytest.param(4, dict(ep=4, wrap="blocks"), "qwen3_moe", "accumulate-clip", id="qwen3_moe-dp4-ep4", marks=FULL),
]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size, spec, model, recipe", CASES)
def test_parity(
    workers: Callable[[int], WorkerGroup], world_size: int, spec: dict[str, Any], model: str, recipe: str
) -> None:
    traces = workers(world_size).run(compare, MESH | spec, model, RECIPES[recipe])
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


class Sorts(TorchDispatchMode):
    """Counts what sorts, in forward, in backward, and where backward repeats forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "sort" in func.name()
        return func(*args, **(kwargs or {}))


def routed(plan: Any, model: str, how: Any) -> tuple[int, int]:
    """In a worker: how often it asks for routes in four updates, which are those of one device; how often it sorts."""
    found, calls = Dispatch._routes, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return found(*args)

    with pytest.MonkeyPatch.context() as patch, Sorts() as sorts:
        patch.setattr(Dispatch, "_routes", counted)
        spec = dict(MESH, ep=2, plan=plan, activation_checkpointing=how)
        compare(spec, model, RECIPES["accumulate-clip"], updates=4)
    return calls, sorts.count


def keeps_sorts(operation: Any) -> bool:
    return "sort" in operation.name() or "mm" in operation.name()


RECOMPUTED: list[Any] = [
    pytest.param(EXPERTS, "mixture", dict(every=1), id="mixture"),
    pytest.param(EXPERTS, "mixture", dict(policy=keeps_sorts), id="mixture-kept"),
    pytest.param("auto", "mixtral", dict(policy="matmuls"), id="mixtral-matmuls", marks=FULL),
    pytest.param("auto", "mixtral", dict(offload=True), id="mixtral-offloaded", marks=FULL),
    pytest.param("auto", "mixtral", "model", id="mixtral-own_switch", marks=FULL),
]


@pytest.mark.distributed
@pytest.mark.parametrize("plan, model, how", RECOMPUTED)
def test_repetitions_have_the_routes_of_forward(workers2: WorkerGroup, plan: Any, model: str, how: Any) -> None:
    found, usual = workers2.run(routed, plan, model, how), workers2.run(routed, plan, model, None)
    assert [calls for calls, _ in found] == [calls for calls, _ in usual]
    if model == "mixture":  # whose experts do not sort themselves
        assert all(sorts <= calls for calls, sorts in (*found, *usual))


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("model", ["mixture", "mixtral", "qwen3_moe"])
def test_parity_in_float32(workers2: WorkerGroup, model: str) -> None:
    """transformers' models with their default kernels, which multiply by all experts in one call."""
    plan = EXPERTS if model == "mixture" else "auto"
    workers2.run(compare, dict(MESH, ep=2, plan=plan), model, RECIPES["accumulate-clip"], torch.float32)


@pytest.mark.distributed
def test_auxiliary_loss_is_that_of_all_tokens(workers2: WorkerGroup) -> None:
    """transformers computes it in float32, and its gradients through the routers exactly."""
    workers2.run(compare, dict(MESH, ep=2), "mixtral_balanced", RECIPES["accumulate-clip"], tolerance=1e-7)
    caught = workers2.run(differing, Unbalanced, "mixtral_balanced", "auto")
    assert "the loss of update" in caught[0]


class Penalised(Plain):
    """Its loss has the size of a gradient that goes through experts."""

    def __init__(self) -> None:
        super().__init__(Mixture)

    def forward(self, input_ids: Tensor, labels: Any = None, position_ids: Any = None) -> Any:
        seen: list[Tensor] = []
        handle = self.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            found = super().forward(input_ids, labels, position_ids)
            handle.remove()
            if labels is None:
                return found
            (gradient,) = torch.autograd.grad(cast(Any, found)["loss"], seen[0], create_graph=True)
        return {"loss": cast(Any, found)["loss"] + 10.0 * len(gradient) * gradient.square().sum()}


def penalised(updates: int = 4) -> None:
    """In a worker."""
    with patch.dict(MODELS, penalised=Penalised):
        compare(dict(MESH, ep=2, tp=2, plan=EXPERTS | MATRICES), "penalised", RECIPES["adamw-clip"], updates=updates)


@pytest.mark.distributed
def test_gradients_of_gradients_go_through_experts(workers2: WorkerGroup) -> None:
    workers2.run(penalised)


def differing(strategy: type[MeshStrategy], model: str = "mixture", plan: Any = EXPERTS) -> str:
    """In a worker: what is found to differ from one device."""
    with pytest.raises(CheckFailedError) as caught:
        compare(dict(type=strategy, ep=2, plan=plan), model, RECIPES["adamw-clip"], updates=4, tolerance=1e-7)
    return str(caught.value)


class UnbalancedAxis(ExpertParallel):
    def check(self, model: nn.Module, optim: Any) -> None:
        super().check(model, optim)
        self._balance = balance.BalanceLoss(nn.Module(), None)


class Unbalanced(MeshStrategy):
    axes = (UnbalancedAxis,)


class AveragedTwiceAxis(ExpertParallel):
    def _scale(self) -> float:
        return super()._scale() / self.size


class AveragedTwice(MeshStrategy):
    axes = (AveragedTwiceAxis,)


class SummedAxis(ExpertParallel):
    def _scale(self) -> float:
        return 1.0


class Summed(MeshStrategy):
    axes = (SummedAxis,)


@pytest.mark.distributed
def test_expert_gradients_averaged_twice_are_caught(workers2: WorkerGroup) -> None:
    for strategy in (AveragedTwice, Summed):
        assert "single-device has" in workers2.run(differing, strategy)[0]


class Limited(nn.Module):
    """Each expert takes some tokens only."""

    num_experts = 2

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor, capacity: int = 1000) -> Tensor:
        kept = torch.nn.functional.one_hot(ids, 2).cumsum(0).gather(-1, ids[..., None]).squeeze(-1) <= capacity
        return self.drop(tokens) * (weights * kept).sum(-1, keepdim=True)


def _tried(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    mesh: Any = SimpleNamespace(size=lambda: 1)
    Dispatch("experts", module, mesh, None, 1.0, Repetitions(), forward)._check_sum(torch.ones(1, 2), torch.ones(1, 1))


def test_a_trial_leaves_the_modes_of_all_modules() -> None:
    module = Limited()
    module.drop.eval()
    _tried(module, module.forward)
    assert (module.training, module.drop.training) == (True, False)


def test_experts_with_a_capacity() -> None:
    module = Limited()
    with pytest.raises(
        FlexTrainError,
        match=r"^model\.experts: its output for a token depends on the tokens beside it, as by a capacity",
    ):
        _tried(module, partial(module.forward, capacity=8))


class LimitedInTraining(Limited):
    """Its capacity counts in training only; what it counts of tokens is not to change by a trial."""

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor, capacity: int = 8) -> Tensor:
        self.seen = getattr(self, "seen", 0) + len(tokens)
        return super().forward(tokens, ids, weights, capacity if self.training else 1000)


def test_experts_with_a_capacity_in_training_only() -> None:
    module = LimitedInTraining()
    with pytest.raises(FlexTrainError, match=r"depends on the tokens beside it, as by a capacity"):
        _tried(module, module.forward)
    assert not hasattr(module, "seen")
    _tried(module.eval(), module.forward)


class Normalising(Experts):
    """Its output for two experts is no sum of outputs for one."""

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, ids, weights / weights.sum(-1, keepdim=True))


def _normalising() -> nn.Module:
    model = Plain(Mixture)
    for layer in model.layers:
        layer.experts = Normalising(4, 32)
    return model


def refused_normalising() -> str:
    from flextrain import OptimWrapper
    from flextrain.testing.loop import train
    from flextrain.testing.sessions import started

    from .models import sample

    optim = OptimWrapper(dict(type="SGD", lr=0.1))
    with (
        started(dict(MESH, ep=2, plan=EXPERTS), optim, _normalising) as session,  # type: ignore[arg-type]
        pytest.raises(FlexTrainError) as caught,
    ):
        train(session.strategy, session.model, session.optim, [[sample("mixture", 4, 0)]])
    return str(caught.value)


@pytest.mark.distributed
def test_experts_that_are_no_sum(workers2: WorkerGroup) -> None:
    expected = "model.layers.0.experts: its output for two experts is not the sum of its outputs for each of them"
    assert all(message.startswith(expected) for message in workers2.run(refused_normalising))


def check_models_of_transformers() -> None:
    """In a worker, which has imported transformers already."""
    from transformers.models.mixtral import modeling_mixtral

    model = build("mixtral_balanced")
    ids = torch.arange(12).view(2, 6)
    expected = model(ids, labels=ids).aux_loss
    ours = balance.BalanceLoss(model, None)
    before = modeling_mixtral.load_balancing_loss_func
    with ours.used():
        assert modeling_mixtral.load_balancing_loss_func is ours
        found = model(ids, labels=ids).aux_loss
    assert modeling_mixtral.load_balancing_loss_func is before
    torch.testing.assert_close(found, expected)
    stacks = find_stacks(nn.ModuleDict(dict(llm=model)), "auto", 2)
    assert list(stacks) == ["llm.model.layers.0.mlp.experts", "llm.model.layers.1.mlp.experts"]


@pytest.mark.distributed
def test_models_of_transformers(workers2: WorkerGroup) -> None:
    pytest.importorskip("transformers", minversion=WITH_PLANS)
    workers2.run(check_models_of_transformers)


def test_unknown_auxiliary_loss_is_left_and_said(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), balance._NAME, lambda logits, experts, top_k, mask: logits[0].sum())
    model = Experts(2, 4)
    monkeypatch.setattr(Experts, "__module__", __name__)
    with caplog.at_level("WARNING", "flextrain"), contextlib.nullcontext(balance.BalanceLoss(model, None)) as ours:
        assert not ours._namespaces
    assert "is left over each process's tokens" in caplog.text


class Scaled(nn.Module):
    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.ones(4, 2, 3)), nn.Parameter(torch.ones(3))


class Counting(Experts):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros(4))


class OfList(nn.Module):
    num_experts = 2

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class OneInput(Experts):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return tokens


def _tied() -> nn.Module:
    model = nn.ModuleDict(dict(a=Experts(4, 2), b=Experts(4, 2)))
    model["a"].up = model["b"].up
    return model


def _within(module: nn.Module) -> nn.Module:
    return nn.ModuleDict(dict(layer=module))


REFUSED: list[tuple[Callable[[], nn.Module], Any, int, str]] = [
    (
        lambda: build("plain"),
        "auto",
        2,
        "strategy.ep: Plain has no plan for experts, give a model with a module of stacked",
    ),
    (
        lambda: build("mixture"),
        {"layers.*.up": "colwise"},
        2,
        'strategy.ep: Plain has no plan for experts, give strategy.plan={"layers.*.experts": "experts"}, or leave ep out',
    ),
    (
        lambda: build("mixture"),
        {"layers.*.expert": "experts"},
        2,
        'strategy.plan["layers.*.expert"]: names no module of the model, did you mean "layers.',
    ),
    (
        lambda: build("mixture"),
        EXPERTS,
        3,
        "strategy.ep: 3 does not divide the 4 experts of layers.0.experts, choose one of 1, 2, 4",
    ),
    (
        lambda: build("mixture"),
        {"layers.*.router": "experts"},
        2,
        'strategy.plan["layers.*.router"]: layers.0.router is a Linear without num_experts, name the module whose',
    ),
    (
        lambda: _within(OfList()),
        {"layer": "experts"},
        2,
        'strategy.plan["layer"]: layer is a OfList with parameters in submodules (experts.0.weight), and a stack of experts',
    ),
    (
        lambda: _within(Scaled()),
        {"layer": "experts"},
        2,
        'strategy.plan["layer"]: layer is a Scaled of 4 experts, but scale has the shape (3,); its first size must be 4',
    ),
    (
        lambda: _within(Counting()),
        {"layer": "experts"},
        2,
        'strategy.plan["layer"]: layer is a Counting whose buffer seen has a row for every expert; move it out',
    ),
    (
        lambda: _within(OneInput(4, 2)),
        {"layer": "experts"},
        2,
        'strategy.plan["layer"]: layer is a OneInput whose forward takes tokens; it must take tokens, expert ids and weights',
    ),
    (
        _tied,
        {"*": "experts"},
        2,
        "strategy.ep: a.up is b.up too, and shared parameters cannot be divided; make it a copy",
    ),
]


@pytest.mark.parametrize("model, plan, size, message", REFUSED)
def test_refused_models(model: Callable[[], nn.Module], plan: Any, size: int, message: str) -> None:
    with pytest.raises(FlexTrainError) as caught:
        find_stacks(model(), plan, size)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (6, 1), (6, 1)), ((6, 4), (6, 2), (6, 1)), ((6, 4), (5, 2), (5, 2))])
def test_refused_tokens(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(FlexTrainError) as caught:
        Dispatch._check(_Named(), *(torch.zeros(shape) for shape in shapes))  # type: ignore[arg-type]
    assert "strategy.ep needs (n, width), (n, k) and (n, k)" in str(caught.value)


class _Named:
    _name = "layers.0.experts"
