"""Activations that wait on the host: equal losses and gradients, the bytes that leave the device, and nothing left behind."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import ConfigError, SingleDeviceStrategy
from flextrain.strategies import offloading

from .test_selective import HOW, Layers, gradients, named, prepared, same

ALONE = dict(offload=True, recompute=False)


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are offloaded too."""
    monkeypatch.setattr(offloading, "LEAST", 64)


def alive() -> list[Any]:
    gc.collect()
    return [
        one
        for one in gc.get_objects()
        if type(one).__module__ == offloading.__name__ and type(one).__name__ != "Offloading"
    ]


@pytest.mark.parametrize(
    "how",
    [
        ALONE,
        dict(offload=True),
        *({"offload": True, **how} for how in [dict(policy="attention"), *HOW[1:]] if isinstance(how, dict)),
    ],
    ids=named,
)
@pytest.mark.parametrize(
    "model", [{}, dict(dropout=0.3, twice=True), dict(change=True), dict(frozen=2, change=True)], ids=named
)
def test_losses_and_gradients_are_those_without(how: dict[str, Any], model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    same(Layers(**model), how)
    assert not alive()


class Turned(nn.Module):
    """Saves complex tensors together with their conjugates, which share their memory, and negatives that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.weight / 32
        parts = z * torch.complex(z.conj().imag * z.real, z.imag)
        return parts * z * z.conj() + z.conj() @ z


@pytest.mark.parametrize("how", [ALONE, dict(offload=True)], ids=named)
def test_conjugates_share_memory_and_have_other_values(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Turned(), Turned())
    x = torch.randn(32, 32, dtype=torch.complex128)
    found = []
    for model in (plain, prepared(plain, dict(classes=["Turned"], **how))):
        model(x).abs().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0])
    assert found[0][0].abs().max() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("how", [ALONE, dict(offload=True), dict(offload=True, policy="matmuls")], ids=named)
def test_backward_twice_of_another_order_and_of_gradients(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    model = prepared(model, how)
    x = torch.randn(2, 8, 32, requires_grad=True)
    found = []
    for one in (plain, model):
        losses = [one(x), one(2 * x), one(3 * x)]
        first = torch.autograd.grad(losses[0], x, retain_graph=True)
        assert torch.equal(torch.autograd.grad(losses[0], x)[0], first[0])
        found.append([*first, *torch.autograd.grad(losses[2], x), *torch.autograd.grad(losses[1], x)])
    torch.testing.assert_close(found[1], found[0])
    del losses, first
    assert not alive()


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    model = prepared(plain, dict(classes=["Sequential"], **ALONE))
    x = torch.randn(4, 32, requires_grad=True)
    found = []
    for one in (plain, model):
        (gradient,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("least", [64, 2**20])
@pytest.mark.parametrize("how", [ALONE, dict(offload=True), dict(offload=True, policy="matmuls")], ids=named)
def test_a_backward_that_never_comes_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], least: int
) -> None:
    monkeypatch.setattr(offloading, "LEAST", least)
    model = prepared(nn.Sequential(Part(), Part()), dict(classes=["Part"], **how))
    for _ in range(2):
        model(torch.zeros(32, 32, requires_grad=True))
    assert not alive()


class Part(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(32, 32), fails
        self.register_buffer("mask", torch.ones(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (self.linear(x) * self.mask).exp()
        if self.fails:
            raise RuntimeError("in the middle")
        return found


def test_an_error_in_the_middle_leaves_nothing() -> None:
    model = prepared(nn.Sequential(Part(), Part(), Part(fails=True)), dict(classes=["Part"], **ALONE))
    with pytest.raises(RuntimeError, match="in the middle"):
        model(torch.zeros(32, 32))
    assert not alive()
    model[2].fails = False
    model(torch.zeros(32, 32)).sum().backward()
    assert not alive()


@pytest.mark.parametrize("after", ["now", "later"])
@pytest.mark.parametrize("least", [64, 2**20])
def test_a_change_in_place_is_an_error_as_without(monkeypatch: pytest.MonkeyPatch, after: str, least: int) -> None:
    monkeypatch.setattr(offloading, "LEAST", least)
    model = prepared(nn.Sequential(Part(), Part()), dict(classes=["Part"], **ALONE))
    x = model[0](torch.zeros(32, 32))
    if after == "now":
        x.add_(1.0)
    found = model[1](x * 2)
    if after == "later":
        found.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
        found.sum().backward()


def test_what_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result once, whatever views of it are saved; no weight, no buffer, nothing small."""
    monkeypatch.setattr(offloading, "LEAST", 32 * 32 * 4)
    sizes: list[int] = []
    make = offloading.on_host
    monkeypatch.setattr(offloading, "on_host", lambda like, pinned: sizes.append(like.nbytes) or make(like, pinned))
    model = prepared(nn.Sequential(Part(), Part()), dict(classes=["Part"], **ALONE))
    x = torch.zeros(32, 32, requires_grad=True)
    model(x)
    # The input, the result of exp, which is the next one's input too, and that of the second exp.
    assert sizes == [32 * 32 * 4] * 3
    sizes.clear()
    monkeypatch.setattr(offloading, "LEAST", 32 * 32 * 4 + 1)
    model(x)
    assert not sizes
    monkeypatch.setattr(offloading, "LEAST", 32 * 32 * 4)
    sizes.clear()
    prepared(Layers(), dict(offload=True))(torch.randn(2, 32, 32))
    assert sizes == [2 * 32 * 32 * 4] * 4  # the inputs of its layers


@pytest.mark.parametrize(
    "compiled", [dict(backend="eager"), pytest.param(dict(backend="aot_eager"), marks=pytest.mark.processes)], ids=named
)
def test_compiled(compiled: dict[str, Any]) -> None:
    torch.manual_seed(0)
    same(Layers(), ALONE, compile=compiled)
    same(Layers(), dict(offload=True), compile=compiled)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(activation_checkpointing=ALONE, compile=dict(mode="reduce-overhead")), 'offload: True is not allowed with compile mode "reduce-overhead"'),
        (dict(activation_checkpointing=dict(recompute=False)), "recompute: False is not allowed with offload=False"),
        (dict(activation_checkpointing=dict(ALONE, policy="matmuls")), "recompute: False is not allowed with a policy"),
    ],
)  # fmt: skip
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^strategy.activation_checkpointing.{message}"):
        SingleDeviceStrategy(**options)


def test_a_copy_of_the_model_offloads_too() -> None:
    torch.manual_seed(0)
    model = prepared(Layers(), ALONE)
    expected = gradients(model)
    torch.testing.assert_close(gradients(copy.deepcopy(model)), expected)
