"""Construction without memory: the values that an ordinary construction gives, one parameter at a time."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import orthogonal_ as orthogonal
from torch.nn.init import trunc_normal_

from flextrain.core.base.errors import StrategyError
from flextrain.core.model.deferred import DeferredInit, Destination, storage_key
from flextrain.core.random.generators import drawing_apart, drawing_from


class Plain(nn.Module):
    """torch's own layers, which initialise themselves, among them one that zeroes a row and one that sets its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8, padding_idx=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)


class Own(nn.Module):
    """What people do by hand: values at registration, initialisation of the whole at the end, ties, slices, copies."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6) * 1.5)
        self.position = nn.Parameter(torch.zeros(4, 6))
        self.token = nn.Parameter(torch.randn(1, 6) * 0.02)
        self.raw = nn.Parameter(torch.empty(5, 3))
        self.embed = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.twin = copy.deepcopy(self.body[0])
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("rate", torch.linspace(0, 1, 3))
        self.rates = [value.item() for value in torch.linspace(0, 1, 3)]
        nn.init.trunc_normal_(self.position, std=0.02)
        self.apply(self._initialise)
        with torch.no_grad():
            self.raw.normal_(0, 2).mul_(0.5)
            self.raw[1:3, 2].fill_(7.0)
            self.body[1].weight.t().copy_(torch.arange(36.0).view(6, 6))
            self.body[2].weight.copy_(self.body[1].weight + 1)
        nn.init.orthogonal_(self.twin.weight)
        self.scale.data.add_(1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def construct(kind: Any) -> tuple[nn.Module, dict[str, Tensor], int]:
    """The module as built without memory, the values that it then gets, and the most memory at a time in elements."""
    context = DeferredInit()
    torch.manual_seed(3)
    with context:
        model = kind()
    values: dict[str, Tensor] = {}
    largest = 0

    def write(name: str, value: Tensor) -> None:
        values[name] = value.clone()

    destinations = {
        storage_key(p): Destination(p.detach(), lambda n=name: values[n], lambda value, n=name: write(n, value))
        for name, p in model.named_parameters()
    }
    context.replay(destinations)
    return model, values, largest


class PassedOver(nn.Module):
    """Every function of nn.init that does nothing to a tensor on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(4, 6))
        self.far = nn.Parameter(torch.zeros(4, 6))
        self.conv = nn.Conv1d(3, 3, 3)
        self.square = nn.Linear(5, 5)
        self.sparse = nn.Linear(5, 5)
        trunc_normal_(self.embed, std=0.02)
        nn.init.trunc_normal_(self.far, mean=3.0, std=0.5, a=2.9, b=3.0)
        nn.init.dirac_(tensor=self.conv.weight)
        orthogonal(self.square.weight, gain=2.0)  # imported by another name
        nn.init.sparse_(self.sparse.weight, 0.4)
        self.drawn = nn.Parameter(torch.randn(3))


class Drawn(nn.Module):
    """Numbers that are drawn at once come between those that are put off, several times, also for a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 20)
        self.scale = nn.Parameter(torch.randn(20) * 0.02)
        self.shift = nn.Parameter(torch.rand(20))
        nn.init.orthogonal_(self.first.weight)
        nn.init.normal_(self.first.weight.t()[:5])
        self.second = nn.Linear(20, 20)
        self.register_buffer("noise", torch.randn(20))
        self.tail = nn.Parameter(torch.empty(20).uniform_())
        self.order = torch.randperm(7).tolist()
        self.third = nn.Linear(20, 6)


class Converted(nn.Module):
    """Parameters that get other memory and go on being initialised in it, and a tensor that changes when it was copied."""

    def __init__(self) -> None:
        super().__init__()
        self.half = nn.Linear(6, 20).bfloat16()
        self.body = nn.Linear(20, 20)
        self.swapped = nn.Linear(20, 6)
        self.raw = nn.Parameter(torch.empty(3))
        values = torch.ones(3)
        self.raw.data.copy_(values)
        values.mul_(5)
        self.swapped.weight.data = self.swapped.weight.data.T.clone() * 2
        self.double()
        nn.init.orthogonal_(self.body.weight)


@pytest.mark.parametrize("kind", [Plain, Own, PassedOver, Drawn, Converted])
def test_the_values_are_those_of_an_ordinary_construction(kind: Any) -> None:
    torch.manual_seed(3)
    expected = kind()
    after = torch.get_rng_state()
    model, values, _ = construct(kind)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(values.keys() ^ dict(expected.named_parameters()).keys()) == []
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    assert torch.equal(torch.get_rng_state(), after), "what follows draws the same numbers"
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]


class Seeded(nn.Module):
    """A constructor that seeds generators, or sets their states, between layers; the name of the way is its argument."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        getattr(self, how)()
        self.last = nn.Linear(4, 4)
        self.seed = torch.initial_seed()

    def seeds(self) -> None:
        torch.manual_seed(5)

    def seeds_twice(self) -> None:
        torch.manual_seed(5)
        self.between = nn.Linear(4, 4)
        torch.default_generator.manual_seed(5)

    def seeds_again_as_before(self) -> None:
        torch.manual_seed(3)

    def forks(self) -> None:
        with torch.random.fork_rng(devices=[]):
            self.between = nn.Linear(4, 4)
            torch.manual_seed(7)
            self.inside = nn.Linear(4, 4)

    def sets_a_state(self) -> None:
        state = torch.get_rng_state()
        self.between = nn.Linear(4, 4)
        self.noise = nn.Parameter(torch.randn(3))
        torch.default_generator.set_state(state)
        self.again = nn.Linear(4, 4)

    def copies_the_state(self) -> None:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        self.between = nn.Parameter(torch.zeros(3))
        nn.init.normal_(self.between, generator=generator)

    def has_a_generator(self) -> None:
        generator = torch.Generator().manual_seed(5)
        nn.init.normal_(self.first.weight, generator=generator)
        state = generator.get_state()
        nn.init.trunc_normal_(self.first.bias, generator=generator)
        self.noise = nn.Parameter(torch.randn(3, generator=generator))
        generator.set_state(state)
        self.between = nn.Linear(4, 4)
        nn.init.orthogonal_(self.between.weight, generator=generator)
        generator.manual_seed(6)

    def names_the_default_generator(self) -> None:
        nn.init.normal_(self.first.weight, generator=torch.default_generator)


@pytest.mark.parametrize("how", [name for name in vars(Seeded) if not name.startswith("_")])
def test_a_generator_that_is_seeded_or_set(how: str) -> None:
    torch.manual_seed(3)
    expected = Seeded(how)
    after = torch.get_rng_state()
    model, values, _ = construct(partial(Seeded, how))
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
    assert torch.equal(torch.get_rng_state(), after), "what follows draws the same numbers"
    assert model.seed == expected.seed


@pytest.mark.parametrize("how", [name for name in vars(Seeded) if not name.startswith("_")])
def test_a_change_of_a_model_that_seeds_or_sets_generators(how: str) -> None:
    state = torch.Generator().manual_seed(11).get_state()
    torch.manual_seed(3)
    expected = nn.ModuleList([Late()])
    with drawing_apart(state):
        expected.append(Seeded(how))
    after = torch.get_rng_state()
    context = DeferredInit()
    torch.manual_seed(3)
    with context:
        model = nn.ModuleList([Late()])
    with context.changing(state):
        model.append(Seeded(how))
    values = dict[str, Tensor]()
    destinations = {
        storage_key(p): Destination(
            p.detach(), partial(values.get, name), lambda v, n=name: values.update({n: v.clone()})
        )  # type: ignore[arg-type]
        for name, p in model.named_parameters()
    }
    context.replay(destinations)
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
    assert torch.equal(torch.get_rng_state(), after)


def test_a_generator_that_is_seeded_before_the_values_are_made() -> None:
    torch.manual_seed(3)
    expected = Late()
    context = DeferredInit()
    torch.manual_seed(3)
    with context:
        model = Late()
    torch.manual_seed(9)
    wanted, values = torch.get_rng_state(), dict[str, Tensor]()
    destinations = {
        storage_key(p): Destination(
            p.detach(), partial(values.get, name), lambda v, n=name: values.update({n: v.clone()})
        )  # type: ignore[arg-type]
        for name, p in model.named_parameters()
    }
    context.replay(destinations)
    assert all(torch.equal(values[name], parameter) for name, parameter in expected.named_parameters())
    assert torch.equal(torch.get_rng_state(), wanted)


def test_a_state_that_another_constructor_has_read() -> None:
    states = []

    def reads() -> nn.Module:
        model = Late()
        states.append(torch.get_rng_state())
        return model

    def sets() -> nn.Module:
        torch.set_rng_state(states[0])
        return Late()

    construct(reads)
    with pytest.raises(StrategyError, match=r"^model: sets a state .* another model has read; give the model as"):
        construct(sets)


class Late(nn.Module):
    """Everything is drawn in the order of the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(4))
        self.apply(Own._initialise.__get__(self))
        nn.init.xavier_uniform_(self.layers[1].weight)
        with torch.no_grad():
            self.layers[2].weight[0].normal_()


def test_initialisation_at_the_end_of_the_constructor_is_drawn_in_its_order() -> None:
    torch.manual_seed(3)
    expected = dict(Late().named_parameters())
    _, values, _ = construct(Late)
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_parts_of_a_copy_and_of_a_tie() -> None:
    model, values, _ = construct(Own)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in values
    assert values["raw"][1:3, 2].tolist() == [7.0, 7.0]
    identity = values["twin.weight"] @ values["twin.weight"].t()
    assert torch.allclose(identity, torch.eye(6), atol=1e-5)


def test_values_in_memory_that_another_parameter_has_left() -> None:
    """A tensor of given values is filled where nobody looks on; it may lie where an empty one lay before."""

    class Constants(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(5, width)
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.pair = nn.Parameter(torch.tensor([3.0, 4.0]))

    for width in range(1, 40):
        _, values, _ = construct(partial(Constants, width))
        assert values["scalar"].item() == 2.0
        assert values["pair"].tolist() == [3.0, 4.0]


def test_what_cannot_be_put_off_is_named() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            with torch.no_grad():
                self.weight.copy_(torch.ones(3))
                self.weight.add_(torch.ones(3, device="meta"))

    with pytest.raises(StrategyError, match=r"^model: "):
        construct(Foreign)[1]


def test_outside_of_the_context_nothing_is_changed() -> None:
    register = nn.Module.register_parameter
    context = DeferredInit()
    with pytest.raises(RuntimeError), context:
        raise RuntimeError
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_borrowed_random_state_is_given_back() -> None:
    torch.manual_seed(1)
    own = torch.get_rng_state()
    torch.manual_seed(2)
    other = torch.get_rng_state()
    torch.set_rng_state(own)
    with drawing_from(other):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), own)
    with drawing_from(own):
        torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), own), "drawn from, as in a run of one process"
