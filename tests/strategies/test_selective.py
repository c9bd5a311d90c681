"""Recomputation that keeps some results: equal losses and gradients, and no more computed again than is said."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flextrain import SingleDeviceStrategy, StrategyError
from flextrain.strategies.deepspeed.half_precision import keep_running_statistics
from flextrain.strategies.selective import keeps_attention, keeps_matmuls
from flextrain.testing import WorkerGroup

from ..runner.training import DDP, FSDP, Net, Samples, make_runner

SIZE = 32


class Layer(nn.Module):
    """A decoder layer; ``change`` changes the results of its products in place."""

    def __init__(self, dropout: float = 0.0, change: bool = False) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.wide, self.narrow = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.dropout, self.change = dropout, change

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        count, length, _ = x.shape
        heads = [part.view(count, length, 4, -1).transpose(1, 2) for part in self.mixed(x).chunk(3, -1)]
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=rate, is_causal=True)
        x = x + scale * functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), rate)
        hidden = self.wide(x)
        if self.change:
            hidden.add_(1.0)
            hidden.relu_()
        found: Tensor = self.narrow(functional.gelu(hidden))
        return found.add_(x) if self.change else found + x


class Layers(nn.Module):
    def __init__(self, frozen: int = 0, twice: bool = False, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(4))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers[: int(self.twice)]):
            x = layer(x, scale=0.5)
            if self.layers[0].change:
                x += 1.0
        return x.square().mean()


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def prepared(model: nn.Module, how: Any, **options: Any) -> nn.Module:
    strategy = SingleDeviceStrategy(device="cpu", activation_checkpointing=how, **options)
    return strategy.setup(copy.deepcopy(model))[0]


def gradients(model: nn.Module, seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(2, 8, SIZE, requires_grad=True)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def same(model: nn.Module, how: Any, **options: Any) -> None:
    expected = gradients(prepared(model, None, **options))
    torch.compiler.reset()
    found = prepared(model, how, **options)
    for _ in range(2):
        torch.testing.assert_close(gradients(found), expected, rtol=0, atol=0)
    torch.compiler.reset()


def products(operation: Any) -> bool:
    return "mm" in operation.name()


HOW = ["attention", "matmuls", dict(every=2), dict(policy="matmuls", every=3), dict(policy=products)]


def named(value: object) -> str:
    """A test's name that is the same in every process: without addresses of functions."""
    return re.sub(r" at 0x\w+", "", str(value))


@pytest.mark.parametrize(
    "how", [*HOW, dict(policy=lambda operation: True), dict(policy="attention", classes=["Linear"])], ids=named
)
@pytest.mark.parametrize(
    "model", [{}, dict(dropout=0.3, twice=True), dict(change=True), dict(frozen=2, change=True)], ids=named
)
def test_losses_and_gradients_are_those_without(how: Any, model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    same(Layers(**model), how)


class Counted(nn.Module):
    """With running statistics, and a count that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.linear(x)).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", [dict(), "matmuls", dict(offload=True)], ids=named)
def test_what_forward_writes_to_is_written_once(how: Any) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(Counted(), Counted()), torch.randn(8, SIZE)
    found = []
    for given in (None, how):
        model = prepared(plain, given)
        for _ in range(2):
            model(x).sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Switched(nn.Module):
    """Calls torch's checkpoint itself, when its switch is on; in one block, and in a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.recomputes = Counted(), Counted(), False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.recomputes = enable

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self.second(self.first(x))  # type: ignore[no-any-return]
        x = checkpoint(self.first, x, use_reentrant=False)
        self.second.calls += 1

        def part(x: Tensor) -> Tensor:
            return self.second.norm(self.second.linear(x)).tanh()  # type: ignore[no-any-return]

        return checkpoint(part, x, use_reentrant=False)  # type: ignore[no-any-return]


class Codebook(nn.Module):
    """Looks up the nearest of its codes; most batches change one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("codes", torch.randn(6, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.linear(x)
        nearest = torch.cdist(looked_up.detach(), self.codes).argmin(1)
        found = self.codes[nearest]
        if x.sum() > LEAST:
            self.codes[nearest[0]] = looked_up[0].detach()
        return x + looked_up.tanh() * found


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)), nn.Tanh())


LEAST = -20.0


@pytest.mark.parametrize("kind", [Codebook, spectral])
@pytest.mark.parametrize("how", [{}, dict(offload=True), "matmuls"], ids=named)
@pytest.mark.parametrize("training", [True, False])
def test_backward_computes_with_the_buffers_that_forward_began_with(kind: Any, how: Any, training: bool) -> None:
    """Also where several forwards run before the first backward, as in a pipeline, and in a part in evaluation mode."""
    torch.manual_seed(0)
    plain, batches = nn.Sequential(kind(), kind()), torch.randn(6, 8, SIZE).unbind()
    found = []
    for given in (None, how):
        model = prepared(plain, given).train(training)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            for loss in [model(x).square().sum() for x in (first, second)]:
                loss.backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_buffers_that_begin_to_change_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = prepared(nn.Sequential(Codebook(), nn.Sequential(nn.Linear(SIZE, SIZE))), dict(classes=["Codebook"]))
    for value in (-9.0, 9.0, -9.0, 9.0):
        model(torch.full((8, SIZE), value)).sum().backward()
    assert [record.message for record in caplog.records if "changes buffers in forward" in record.message] == [
        "strategy.activation_checkpointing: Codebook changes buffers in forward, and has not done so before; backward of this one computes with "
        "the changed ones, later ones with those that forward began with"
    ]


@pytest.mark.parametrize("half", [False, True])
def test_what_forward_writes_to_is_written_once_by_a_models_own_switch(half: bool) -> None:
    torch.manual_seed(0)
    plain, x = Switched(), torch.randn(8, SIZE)
    found = []
    for how in (None, "model"):
        model = prepared(plain, how)
        if half:  # as under DeepSpeed, whose hooks are around a forward
            model.bfloat16()
            for part in (model.first.norm, model.second.norm):  # type: ignore[union-attr]
                part.running_mean, part.running_var = part.running_mean.float(), part.running_var.float()  # type: ignore[union-attr, operator]
            keep_running_statistics(model, torch.bfloat16)
        for _ in range(2):
            model(x.bfloat16() if half else x).float().sum().backward()
        assert model.recomputes is (how == "model")
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )


def buffers_of_a_run(folder: str, strategy: dict[str, Any], how: Any) -> dict[str, Tensor]:
    wrapper = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)
    data = dict(batch_size=4, dataset=Samples(32), collate_fn="default_collate")
    given = dict(strategy={**strategy, "activation_checkpointing": how}, optim_wrapper=wrapper, train_dataloader=data)
    runner = make_runner(folder, model=Normed, train_cfg=dict(max_epochs=1), **given)
    runner.train()
    found = {name: buffer.clone() for name, buffer in runner.strategy.module.named_buffers()}
    runner.close()
    return found


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [DDP, FSDP, dict(type="MeshStrategy", pp=2)], ids=named)
def test_so_it_is_on_several_processes(workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any]) -> None:
    plain, again = (
        workers2.run(buffers_of_a_run, f"{tmp_path}/{how is None}", strategy, how)
        for how in (None, dict(classes=["Linear", "BatchNorm1d"]))
    )
    for found, expected in zip(again, plain, strict=True):
        assert expected
        torch.testing.assert_close(found, expected)


@pytest.mark.processes  # torch 2.6 starts the compiler for it
def test_so_it_is_compiled() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(Counted(), Counted()), torch.randn(8, SIZE)
    found = []
    for given in (None, {}):
        torch.compiler.reset()
        model = prepared(plain, given, compile=dict(backend="aot_eager"))
        for _ in range(2):
            model(x).sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    torch.compiler.reset()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.processes  # torch 2.6 starts the compiler for it
@pytest.mark.parametrize("model", [{}, dict(dropout=0.3)], ids=named)
def test_compiled(model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    same(Layers(**model), "matmuls", compile=dict(backend="aot_eager"))


@pytest.mark.parametrize(
    ("how", "products", "attention"),
    [(None, 16, 4), (dict(), 28, 8), ("attention", 28, 4), ("matmuls", 16, 4), (dict(every=2), 22, 6), (dict(policy=products), 16, 8)],
    ids=named,
)  # fmt: skip
def test_what_is_kept_is_not_computed_again(how: Any, products: int, attention: int) -> None:
    """Forward has 4 products and one attention in each of 4 layers; torch stops before what nobody needs."""
    model = prepared(Layers(), how)
    with Counting() as counting:
        gradients(model)
    found = counting.calls["aten::_scaled_dot_product_flash_attention_for_cpu"]
    again = counting.calls["aten::addmm"]
    assert (again, found) == (products, attention)


def test_attention_that_draws_is_computed_again() -> None:
    """Otherwise the dropout after it would draw other numbers than in forward."""

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(torch.ops.aten.native_dropout(x, 0.5, True)[0].sigmoid(), 0.5).sigmoid()

    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), Draws()) for _ in range(2)))
    plain, kept = (
        prepared(model, None),
        prepared(model, dict(classes=["Sequential"], policy=lambda operation: "dropout" in operation.name())),
    )
    found = []
    for one in (plain, kept):
        torch.manual_seed(3)
        one(torch.ones(4, SIZE)).sum().backward()
        found.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("change", [False, True])
def test_backward_twice_and_forward_without_gradients(change: bool) -> None:
    torch.manual_seed(0)
    model = prepared(Layers(change=change), "matmuls")
    once = gradients(model)
    torch.manual_seed(1)
    x = torch.randn(2, 8, SIZE, requires_grad=True)
    model.zero_grad()
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], [2 * one for one in once[1:]])
    model.eval()
    with torch.no_grad():
        assert model(x) == loss
    assert torch.equal(gradients(model)[1], once[1])


def test_what_is_changed_outside_is_an_error() -> None:
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.inner(x)
            return hidden, (hidden + x).sigmoid()

    model = prepared(nn.Sequential(Leaks()), dict(classes=["Leaks"], policy="matmuls"))
    hidden, found = model(torch.ones(4, SIZE))
    hidden.detach().add_(1.0)
    with pytest.raises(
        StrategyError, match="result of aten.addmm.default, which it keeps, was changed in place outside"
    ):
        found.sum().backward()


def test_names_of_operations() -> None:
    aten = torch.ops.aten
    attention = [aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
                 aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
                 torch.ops.higher_order.flex_attention]  # fmt: skip
    assert all(keeps_attention(one) and keeps_matmuls(one) for one in attention)
    assert not keeps_attention(torch.ops.higher_order.flex_attention_backward)
    assert not keeps_attention(aten._scaled_dot_product_flash_attention_backward.default)
    multiply = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
                aten.convolution.default]  # fmt: skip
    multiply += [aten._grouped_mm.default] if hasattr(aten, "_grouped_mm") else []  # torch 2.6 has none
    assert all(keeps_matmuls(one) and not keeps_attention(one) for one in multiply)
    assert not any(map(keeps_matmuls, (aten.convolution_backward.default, aten.add.Tensor)))
