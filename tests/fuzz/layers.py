"""Kinds of layers that random models are made of: each maps (samples, positions, WIDTH) to the same shape, sample by sample.

Sample by sample, because a model whose samples see each other (batch normalisation) is another model on two processes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, VOCABULARY = 8, 4, 11

Kind = Callable[[random.Random], nn.Module]
KINDS: dict[str, Kind] = {}
POSITIONWISE, PIPED = set[str](), set[str]()  # kinds that context and tensor parallelism, or a pipeline, are tried with


def kind(*sets: set[str]) -> Callable[[Any], Any]:
    """Register a function or class that makes a layer, under its name in lower case."""

    def register(made: Any) -> Any:
        name = re.sub("(?<!^)(?=[A-Z])", "_", made.__name__).lower()
        KINDS[name] = (lambda _: made()) if isinstance(made, type) else made
        for each in sets:
            each.add(name)
        return made

    return register


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


# Matrices and activations


@kind(POSITIONWISE, PIPED)
def linear(draw: random.Random) -> nn.Module:
    return Residual(nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5), nn.Tanh())


@kind(POSITIONWISE, PIPED)
def mlp(draw: random.Random) -> nn.Module:
    wide = draw.choice([6, 7, 16])
    activation = draw.choice([nn.GELU, nn.SiLU, nn.ReLU, nn.Mish, nn.Softplus])()
    return Residual(nn.Linear(WIDTH, wide), activation, nn.Linear(wide, WIDTH))


@kind(POSITIONWISE, PIPED)
class Gated(nn.Module):
    """A gated perceptron without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@kind(POSITIONWISE, PIPED)
def activation_with_weight(draw: random.Random) -> nn.Module:
    return Residual(nn.Linear(WIDTH, WIDTH), nn.PReLU(init=draw.choice([0.1, 0.25])))


@kind(PIPED)
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.inner(x, x.tanh())


@kind(POSITIONWISE, PIPED)
class StackOfMatrices(nn.Module):
    """One parameter of three dimensions, as stacks of experts have it, used by all with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.2)
        self.route = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("btd,edf,bte->btf", x, self.weight, self.route(x).softmax(-1))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = context.saved_tensors
        return gradient * 3 * x**2


@kind(POSITIONWISE, PIPED)
class OwnFunction(nn.Module):
    """An autograd function of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * _Cube.apply(self.inner(x).tanh())


@kind(POSITIONWISE, PIPED)
class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        found += x
        return found.mul_(0.9)


# Normalisation


@kind(POSITIONWISE, PIPED)
def layer_norm(draw: random.Random) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH, elementwise_affine=draw.random() < 0.7), nn.Linear(WIDTH, WIDTH))


@kind(POSITIONWISE, PIPED)
class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class OverChannels(nn.Module):
    """An inner module that takes (samples, WIDTH, positions)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


@kind()
def group_norm(draw: random.Random) -> nn.Module:
    return OverChannels(nn.GroupNorm(draw.choice([1, 2, 4]), WIDTH))


@kind()
def instance_norm(draw: random.Random) -> nn.Module:
    return OverChannels(nn.InstanceNorm1d(WIDTH, affine=True))


@kind()
class FrozenStatistics(nn.Module):
    """Batch normalisation that stays in evaluation mode: buffers, of which one is a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(WIDTH)
        self.inner.running_var.fill_(1.5)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


# Over positions


@kind()
def convolution(draw: random.Random) -> nn.Module:
    groups = draw.choice([1, 2, WIDTH])
    return OverChannels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups))


@kind()
class CausalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.inner(F.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2)


@kind()
class Image(nn.Module):
    """Two-dimensional convolutions, down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(3, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x[:, None]).tanh())[:, 0]


@kind()
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


@kind()
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@kind(PIPED)
class Attention(nn.Module):
    """torch's own, without biases of the keys, whose gradient would be rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


@kind(POSITIONWISE, PIPED)
class HeadsApart(nn.Module):
    """Attention by four matrices and torch's scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@kind()
class Memory(nn.Module):
    """Attention to a learned memory that is a parameter of the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.memory.T).softmax(-1) @ self.memory


@kind(PIPED)
class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


# Parameters and buffers of unusual kinds


@kind(POSITIONWISE, PIPED)
def tiny_scale(draw: random.Random) -> nn.Module:
    return TinyScale(draw.choice([1e-6, 1e-3, 1.0]))


class TinyScale(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh() * self.scale


@kind(PIPED)
class Scalar(nn.Module):
    """A parameter without dimensions, one of a single element, and a plain buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(1))
        self.register_buffer("fixed", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.size * self.fixed + self.shift


@kind()
class HiddenBuffer(nn.Module):
    """A buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.inner.weight * self.mask)


@kind()
class Counting(nn.Module):
    """A buffer that every forward in training changes, and that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.inner(x) / self.calls.clamp(min=1)


@kind()
class SometimesFrozen(nn.Module):
    """A frozen matrix with a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


@kind(POSITIONWISE, PIPED)
def frozen(draw: random.Random) -> nn.Module:
    return Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)


@kind(POSITIONWISE, PIPED)
class Unused(nn.Module):
    """A matrix that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


@kind()
class Transposed(nn.Module):
    """A parameter that is not contiguous, and one that is used twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDTH, 6) * 0.3).T)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.T).tanh() @ self.weight


@kind()
class Rotation(nn.Module):
    """Complex numbers made of a real parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.randn(WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * self.angles)
        return torch.view_as_real(turned).flatten(-2)


class Marked(nn.Parameter):
    """A class of parameter of one's own."""


@kind()
class OwnParameter(nn.Module):
    """A parameter of a class of its own, with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Marked(torch.randn(WIDTH, WIDTH) * 0.2)
        self.weight.note = "mine"

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight


@kind()
class NoElements(nn.Module):
    """A parameter without elements, as adapters of rank 0 have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Parameter(torch.zeros(0, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) + x @ self.down.T @ self.up.T


# Weights that are computed


@kind()
def weight_norm(draw: random.Random) -> nn.Module:
    return Residual(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


@kind()
def spectral_norm(draw: random.Random) -> nn.Module:
    return Residual(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@kind()
def symmetric(draw: random.Random) -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(made, "weight", _Symmetric())
    return Residual(made, nn.Tanh())


# Branches by data


class Branch(nn.Module):
    """Each sample goes through one of some modules, or through none; a module without samples is not called.

    Args:
        inner: the modules.
        skips: whether the first choice is none of them.
        loop: whether a module is called sample by sample.
    """

    def __init__(self, inner: list[nn.Module], skips: bool = False, loop: bool = False) -> None:
        super().__init__()
        self.inner, self.skips, self.loop = nn.ModuleList(inner), skips, loop
        self.register_buffer("direction", torch.randn(WIDTH, len(inner) + skips))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x.detach().mean(1) @ self.direction).argmax(-1) - int(self.skips)
        found = x.clone()
        for i, module in enumerate(self.inner):
            samples = (choice == i).nonzero().flatten()
            parts = samples.split(1) if self.loop else (samples,)
            for part in parts:
                if len(part):
                    found = found.index_copy(0, part, x[part] + module(x[part]).tanh())
        return found


@kind()
def experts(draw: random.Random) -> nn.Module:
    """Of equal shapes."""
    return Branch([nn.Linear(WIDTH, WIDTH) for _ in range(draw.choice([2, 3]))], loop=draw.random() < 0.3)


@kind()
def unequal_experts(draw: random.Random) -> nn.Module:
    """Of unequal shapes."""
    return Branch(
        [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH, bias=False))]
    )


@kind()
def stochastic_depth(draw: random.Random) -> nn.Module:
    """A layer that some samples leave out."""
    return Branch([nn.Linear(WIDTH, WIDTH)], skips=True)


@kind()
class EarlyExit(nn.Module):
    """Parameters of the layer itself, which not every batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.eye(WIDTH) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        deep = (x.detach().sum((1, 2)) > 0)[:, None, None]
        found = x @ self.first
        return torch.where(deep, found @ self.second, found) if bool(deep.any()) else found


# Hooks


def _rows(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(len(gradient)) % 2)[:, None].to(gradient)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@kind()
def masked_rows(draw: random.Random) -> nn.Module:
    """A hook of the weight's gradient: half of the rows do not move."""
    made = nn.Linear(WIDTH, WIDTH)
    made.weight.register_hook(_rows)
    return Residual(made, nn.Tanh())


@kind()
def halved_gradient(draw: random.Random) -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH)
    made.weight.register_post_accumulate_grad_hook(_halve)
    return Residual(made, nn.Tanh())


def _scaled_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.8


def _scaled_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 1.1,)


def _scaled_gradient(module: nn.Module, found: tuple[Tensor], gradients: Any) -> tuple[Tensor]:
    return (found[0] * 0.6,)


@kind(POSITIONWISE)
def hooked(draw: random.Random) -> nn.Module:
    """Hooks before and behind forward, and of backward."""
    made = nn.Linear(WIDTH, WIDTH)
    made.register_forward_hook(_scaled_output)
    if draw.random() < 0.5:
        made.register_forward_pre_hook(_scaled_input)
    if draw.random() < 0.5:
        made.register_full_backward_hook(_scaled_gradient)
    return Residual(made, nn.Tanh())


# Ways through autograd


@kind()
class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@kind()
class Detached(nn.Module):
    """A branch without gradient beside one that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x)
        return x + self.inner(x).tanh() * target


@kind()
class OwnLoss(nn.Module):
    """A part of the loss that the layer keeps until the model asks for it."""

    penalty: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        self.penalty = 0.01 * found.square().mean()
        return x + found.tanh()


@kind()
class GradientPenalty(nn.Module):
    """A derivative of the layer in forward, itself part of the loss: backward goes twice through the weights."""

    penalty: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.new_zeros(())
        if torch.is_grad_enabled():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(at).tanh().square().sum(), at, create_graph=True)
            self.penalty = 0.01 * slope.square().mean()
        return x + self.inner(x).tanh()


@kind()
class SparseTable(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach() > 0).long().sum(-1) % 4)


@kind()
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach() > 0).long().sum(-1) % 6)[:, None]
