"""Hooks, attributes and classes of parameters, and later changes of them: as on one device, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm import collectives as dist
from flextrain.core.torch_compat.torch_private import keep_gradient_hooks
from flextrain.strategies import gradient_hooks
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers, same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import whole_model

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.mse_loss(self.head(x), y)}


class Marked(nn.Parameter):
    """A subclass, for optimizers that look at it."""


def clamp(model: Any) -> None:
    model.blocks[0][0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def halved(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


def halve(model: Any) -> None:
    model.head.bias.register_post_accumulate_grad_hook(halved)


def mark(model: Any) -> None:
    model.head.weight = Marked(model.head.weight.data)


def tag(model: Any) -> None:
    model.head.bias.kind = "bias"


def hook_later(model: Any) -> None:
    model.blocks[1][0].bias.register_hook(torch.zeros_like)


def replace_later(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() * 0)


def tie_later(model: Any) -> None:
    model.blocks[1][0].weight = model.blocks[0][0].weight


def freeze_later(model: Any) -> None:
    model.blocks[1].requires_grad_(False)


def hook_module_later(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, output: output * 0.9)


BEFORE = (clamp, halve, mark, tag)
LATER = (hook_later, replace_later, tie_later, freeze_later, hook_module_later)
EQUAL = ""
REPLACED = "model: head.weight is not the parameter that the optimizer has"
TIED = "model: blocks.1.0.weight is not the parameter that the optimizer has"
FROZEN = "model: blocks.1.0.weight is frozen now and was trainable"
LATE = "model.blocks.1.0.bias: has a gradient hook that was registered after set-up"
AFTER = "model.head.bias: has a hook from register_post_accumulate_grad_hook"
DIVIDED = {
    clamp: "model.blocks.0.0.weight: has a gradient hook (register_hook",
    halve: "model.head.bias: has a gradient hook (register_hook",
    mark: "model.head.weight: is a Marked, a subclass of torch.nn.Parameter",
}
CHANGED = {replace_later: REPLACED, tie_later: TIED}
SINGLE: dict[str, Any] = dict(type="SingleDeviceStrategy")
ZERO = {hook_later: LATE, freeze_later: FROZEN, **CHANGED}
EXPECTED: dict[str, tuple[dict[str, Any], dict[Any, str]]] = {
    "ddp": (dict(type="DDPStrategy"), {hook_later: LATE, freeze_later: FROZEN, **CHANGED}),
    "fsdp": (dict(type="FSDPStrategy", wrap=["Sequential"]), {hook_later: LATE, **CHANGED}),
    **{
        f"zero{stage}": (
            dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)),
            ZERO | ({halve: AFTER} if stage > 1 else {}),
        )
        for stage in (1, 2, 3)
    },
    "tp2": (dict(type="MeshStrategy", tp=2, plan={"blocks.*.0": "colwise_gather_output"}), {**DIVIDED, **CHANGED}),
}
FULL = pytest.mark.full
ZEROS = [pytest.param(f"zero{stage}", marks=[pytest.mark.deepspeed, *([FULL] * (stage != 3))]) for stage in (1, 2, 3)]


def outcome(
    spec: dict[str, Any], change: Callable[[Any], None], dtype: torch.dtype, made: Callable[[], nn.Module] = Net
) -> Any:
    """In a worker: losses, weights and the attribute after three updates of two micro-batches, or what was raised."""
    strategy: Any = STRATEGIES.build({"device": "cpu", **spec}, "strategy")
    generator = torch.Generator().manual_seed(1)
    batches = [
        {name: torch.randn(8, n, generator=generator).to(dtype) for name, n in (("x", 4), ("y", 2))} for _ in "six"
    ]
    torch.manual_seed(0)
    model = made().to(dtype)
    try:
        strategy.join()
        if change in BEFORE:
            change(model)
        optim = OptimWrapper(dict(type="SGD", lr=0.5, momentum=0.9), accumulative_counts=2)
        called, optim = strategy.setup(model, optim)
        losses = train(strategy, called, optim, [batches[:2]]).losses
        if change in LATER:
            change(strategy.module)
        losses += train(strategy, called, optim, [batches[1:], batches[:2]]).losses
        names = [name for name, p in strategy.parameters() if hasattr(p, "kind")]
        return losses, whole_model(strategy), names
    except StrategyError as error:
        return str(error)
    finally:
        strategy.leave()
        dist.destroy_process_group()


def compared(spec: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """In a worker: what was raised for each change; raises where results are not those of one device in float64."""
    found = {}
    for change in (*BEFORE, *LATER):
        with alone():
            expected = outcome(SINGLE, change, torch.float64)
        own = outcome(spec, change, dtype)
        found[change.__name__] = own if isinstance(own, str) else EQUAL
        if not isinstance(own, str):
            tolerance = 1e-12 if dtype is torch.float64 else 1e-5
            same_numbers(own[0], expected[0], change.__name__, tolerance)
            weights = {name: tensor.double() for name, tensor in own[1].items()}
            same_tensors(weights, expected[1], change.__name__, tolerance)
            assert own[2] == expected[2]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("tp2", marks=FULL), *ZEROS])
def test_they_count_as_on_one_device_or_are_refused(workers2: WorkerGroup, strategy: str) -> None:
    spec, refused = EXPECTED[strategy]
    dtype = torch.float32 if strategy.startswith("zero") else torch.float64
    expected = {change.__name__: refused.get(change, EQUAL) for change in (*BEFORE, *LATER)}
    for found in workers2.run(compared, spec, dtype):
        assert {name: text[: len(expected[name])] or text for name, text in found.items()} == expected


def of_pipeline() -> dict[str, Any]:
    """In a worker: the outcomes under a pipeline, beside those of one device."""
    found = {}
    for change in (clamp, hook_module_later):
        with alone():
            expected = outcome(SINGLE, change, torch.float64)
        own = outcome(dict(type="MeshStrategy", pp=2), change, torch.float64)
        assert not isinstance(own, str), own
        found[change.__name__] = own[0], expected[0]
    return found


def test_a_pipeline_calls_hooks_of_what_it_has(workers2: WorkerGroup) -> None:
    for found in workers2.run(of_pipeline):
        for name, (losses, expected) in found.items():
            same_numbers(losses, expected, name, 1e-12)


def hooked_on_one() -> str:
    return str(outcome(dict(type="DDPStrategy"), clamp if os.environ["RANK"] == "0" else tag, torch.float64))


def test_a_hook_on_one_process_is_refused(workers2: WorkerGroup) -> None:
    for message in workers2.run(hooked_on_one):
        assert "blocks.0.0.weight" in message
        assert "1 gradient hook" in message


def hooks_left(spec: dict[str, Any], dtype: torch.dtype) -> dict[str, list[str]]:
    """In a worker: the modules of the functions that backward still calls for parameters when a strategy was torn down."""
    strategy: Any = STRATEGIES.build({"device": "cpu", **spec}, "strategy")
    model = Net().to(dtype)
    clamp(model)
    strategy.join()
    strategy.setup(model, OptimWrapper(dict(type="SGD", lr=0.5, momentum=0.9)))
    strategy.leave()
    dist.destroy_process_group()
    return {
        name: [getattr(hook, "func", hook).__module__ for hook in parameter._backward_hooks.values()]  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks
    }


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.deepspeed), ZEROS[2]])
def test_teardown_leaves_the_hooks_of_the_user(workers2: WorkerGroup, strategy: str) -> None:
    dtype = torch.float32 if strategy.startswith("zero") else torch.float64
    for found in workers2.run(hooks_left, EXPECTED[strategy][0], dtype):
        assert found == {"blocks.0.0.weight": [__name__]}


class Routed(nn.Module):
    """Each sample goes through one of three matrices with a scalar, all with hooks; a process comes to them in its own order."""

    # By forward, of the samples of the first process and of the second; nobody needs the third matrix in the first update.
    routes = (
        ("0000", "1111"),
        ("0101", "1001"),
        ("2222", "1111"),
        ("2020", "0000"),
        ("0000", "0000"),
        ("0000", "0000"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in "012")
        self.sizes = nn.ParameterList(torch.tensor(0.7) for _ in "012")
        self.head = nn.Linear(4, 2)
        for parameter in (*self.weights, *self.sizes):
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2) + 1e-3)
        self.forwards = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        routes = self.routes[self.forwards]
        self.forwards += 1
        own = torch.tensor(list(map(int, "".join(routes) if len(x) == 8 else routes[dist.get_rank()])))
        parts = [torch.zeros_like(x) for _ in self.weights]
        for number in range(3) if dist.get_rank() == 0 else (2, 1, 0):
            if len(rows := (own == number).nonzero()[:, 0]):
                found = (x[rows] @ self.weights[number]).tanh() * self.sizes[number]
                parts[number] = parts[number].index_add(0, rows, found)
        return {"loss": nn.functional.mse_loss(self.head(x + sum(parts)), y)}


class RoutedByItself(Routed):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self(**data)
        optim_wrapper.update_params(losses["loss"])
        return losses


class AllRouted(Routed):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.head.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))


class HalvedRouted(Routed):
    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.weights, *self.sizes):
            parameter.register_post_accumulate_grad_hook(halved)


def routed(spec: dict[str, Any], made: Any, dtype: torch.dtype) -> Any:
    """In a worker: the outcomes of one device in float64 and of the strategy."""
    gradient_hooks.PATIENCE_S = 3.0
    with alone():
        expected = outcome(SINGLE, tag_none, torch.float64, made)
    return expected, outcome(spec, tag_none, dtype, made)


def tag_none(model: Any) -> None:
    """No change."""


UNUSED = dict(type="DDPStrategy", find_unused_parameters=True)
ZEROS_OR_FEWER = [
    pytest.param(EXPECTED[f"zero{n}"][0] if n else dict(type="DeepSpeedStrategy"), made, id=f"zero{n}", marks=[*marks])
    for n, made, *marks in (
        (0, HalvedRouted, pytest.mark.deepspeed, FULL),
        (1, HalvedRouted, pytest.mark.deepspeed, FULL),
        (2, AllRouted, pytest.mark.deepspeed),
    )
]


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        pytest.param(UNUSED, HalvedRouted, id="ddp"),
        pytest.param(dict(type="DDPStrategy"), RoutedByItself, id="ddp-train_step"),
        pytest.param(dict(type="FSDPStrategy"), HalvedRouted, id="fsdp"),
        *ZEROS_OR_FEWER,
    ],
)
def test_processes_may_use_other_hooked_parameters(workers2: WorkerGroup, spec: dict[str, Any], made: Any) -> None:
    is_zero = spec["type"] == "DeepSpeedStrategy"
    for expected, found in workers2.run(routed, spec, made, torch.float32 if is_zero else torch.float64):
        assert not isinstance(found, str), found
        tolerance = 1e-5 if is_zero else 1e-12
        same_numbers(found[0], expected[0], "losses", tolerance)
        same_tensors({name: value.double() for name, value in found[1].items()}, expected[1], "weights", tolerance)


@pytest.mark.deepspeed
def test_stage_3_refuses_that(workers2: WorkerGroup) -> None:
    for rank, (_, found) in enumerate(workers2.run(routed, EXPECTED["zero3"][0], Routed, torch.float32)):
        assert f"has a gradient hook, which needs the gradient from every process, and rank {rank} is at" in found
        assert "in backward 1" in found


def test_hooks_stay_when_a_parameter_gets_memory() -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    handles = [parameter.register_hook(torch.zeros_like), parameter.register_post_accumulate_grad_hook(halved)]
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(3)))
    keep_gradient_hooks(parameter)
    found = []
    for handle in (*handles, None):
        parameter.grad = None
        parameter.sum().backward()
        found.append(float(parameter.grad.sum()))
        if handle is not None:
            handle.remove()
    assert found == [0.0, 1.5, 3.0]
