"""Activation checkpointing and compilation change what a module does with memory and time, and no name or number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError
from flextrain.strategies.recomputation import checkpoint_activations, compile_in_place, module_filter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(4, 4), nn.Dropout(0.5), 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return self.dropout(self.linear(x)).relu() * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.nested = nn.Sequential(Block(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=2.0)
        return self.nested(x).sum()


def run(net: nn.Module) -> dict[str, Tensor]:
    """Loss and gradients of one batch."""
    torch.manual_seed(1)  # dropout
    net.zero_grad()
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    loss = net(x)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), "input": x.grad, **grads}  # type: ignore[dict-item]


def make() -> Net:
    torch.manual_seed(0)
    return Net()


# Activation checkpointing


def test_recomputed_activations_give_the_same_gradients_and_names() -> None:
    plain, saving = make(), make()
    chosen = checkpoint_activations(saving, module_filter(["Block"], saving, "here"))
    assert chosen == ["blocks.0", "blocks.1", "nested.0"]
    torch.testing.assert_close(run(saving), run(plain), rtol=0, atol=0)
    assert list(saving.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in saving.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [block.calls for block in plain.modules() if isinstance(block, Block)] == [1, 1, 1]
    assert [block.calls for block in saving.modules() if isinstance(block, Block)] == [2, 2, 2]  # once more in backward


def test_only_the_outermost_of_nested_modules_is_recomputed() -> None:
    net = make()
    assert checkpoint_activations(net, lambda module: isinstance(module, (nn.Sequential, nn.Linear))) == [
        "blocks.0.linear", "blocks.1.linear", "nested",
    ]  # fmt: skip
    run(net)
    assert net.nested[0].calls == 2


def test_the_module_itself_is_not_recomputed_as_a_whole() -> None:
    net = make()
    assert checkpoint_activations(net, lambda module: isinstance(module, Net)) == []


def test_a_copy_recomputes_with_its_own_weights() -> None:
    net = make()
    checkpoint_activations(net, module_filter(["Block"], net, "here"))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert run(twin)["loss"] == 0
    assert run(net)["loss"] != 0


def test_class_names_are_checked() -> None:
    there = "he model has Block, Dropout, Linear, ModuleList, Net, Sequential"
    with pytest.raises(ConfigError, match=f'^here: no submodule is a "Blok", did you mean "Block"\\? T{there}$'):
        module_filter(["Linear", "Blok"], make(), "here")
    with pytest.raises(ConfigError, match=f'^here: no submodule is a "Xyz"; t{there}$'):
        module_filter(["Xyz"], make(), "here")
    check_fn: Any = lambda module: True  # noqa: E731
    assert module_filter(check_fn, make(), "here") is check_fn


# Compilation


class Counts:
    """A back end that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1

        def run_graph(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run_graph


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Plain(nn.Module):
    """Without the counters of Block, at which the compiler would start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        pytest.param("aot_eager", marks=pytest.mark.processes),  # torch 2.6 starts the compiler's for it too
        pytest.param(
            "inductor", marks=[pytest.mark.slow, pytest.mark.processes]
        ),  # it starts the compiler, unless its cache has the code
    ],
)
def test_compiled_modules_keep_names_and_numbers(backend: str) -> None:
    plain = Plain()
    compiled = copy.deepcopy(plain)
    # Processes to compile in would outlive the test.
    options = {"options": {"compile_threads": 1}} if backend == "inductor" else {}
    compile_in_place([compiled], {"backend": backend, **options})
    torch.testing.assert_close(run(compiled), run(plain), rtol=1e-5, atol=1e-6)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    twin = copy.deepcopy(compiled)  # as for a moving average of the weights
    assert list(twin.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(run(twin), run(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_fresh_compiler")
def test_calling_the_module_runs_what_was_compiled() -> None:
    backend = Counts()
    net = Plain()
    compile_in_place([net], {"backend": backend})
    assert backend.graphs == 0
    for _ in range(3):
        run(net)
    assert (backend.graphs, backend.calls) == (1, 3)


@pytest.mark.processes  # the compiler
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_and_recomputed_at_once() -> None:
    plain = Plain()
    both = copy.deepcopy(plain)
    checkpoint_activations(both, lambda module: isinstance(module, nn.Linear))
    compile_in_place([both], {"backend": "aot_eager"})
    torch.testing.assert_close(run(both), run(plain), rtol=1e-5, atol=1e-6)
    assert list(both.state_dict()) == list(plain.state_dict())
