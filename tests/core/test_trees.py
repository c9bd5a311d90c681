"""Mapping over nested arguments gives what torch's function gives."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from flextrain.core.base.trees import map_tensors, tensors_in, tree_map_only

Pair = namedtuple("Pair", "first second")


class Names(dict[str, Any]):
    """A dict that torch takes for a leaf."""


ONE = torch.ones(2)
TREES: list[Any] = [
    ONE,
    (ONE, 3, None, "a"),
    [ONE, (ONE, [ONE])],
    {"b": ONE, "a": [1.5, True], 3: Pair(ONE, {"c": ONE})},
    OrderedDict(b=ONE, a=(ONE,)),
    Names(a=ONE),
    (),
    {},
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_as_torch_does(tree: Any) -> None:
    found = tree_map_only(Tensor, lambda tensor: tensor.sum().item(), tree)
    expected = _pytree.tree_map_only(Tensor, lambda tensor: tensor.sum().item(), tree)
    assert repr(found) == repr(expected)  # with the kinds of containers, and their order


def test_arguments_of_modules_leave_no_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        tree_map_only(Tensor, Tensor.detach, ((ONE, None), {"mask": ONE, "scale": 2.0}))
        assert gc.collect() == 0
    finally:
        gc.enable()


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass
class Slotted:
    __slots__ = ("loss", "name")
    loss: Tensor
    name: str


class Result:
    def __init__(self, loss: Tensor) -> None:
        self.loss, self.name = loss, "a"


HELD: dict[str, tuple[Any, Any]] = {
    "containers": ([ONE, {"a": (ONE, 3)}], lambda value: (value[0], value[1]["a"][0])),
    "frozen dataclass": (Frozen(ONE, {"a": [ONE]}), lambda value: (value.loss, value.rest["a"][0])),
    "dataclass with slots": ([Slotted(ONE, "a")], lambda value: (value[0].loss,)),
    "object": ({"a": Result(ONE)}, lambda value: (value["a"].loss,)),
    "namespace": (SimpleNamespace(loss=ONE, other=None), lambda value: (value.loss,)),
    "dict": (Names(a=[ONE]), lambda value: (value["a"][0],)),
    "distribution": (torch.distributions.Normal(ONE, ONE), lambda value: (value.loc, value.scale)),
}


@pytest.mark.parametrize("name", HELD)
def test_every_tensor_is_found_and_replaced_in_a_copy(name: str) -> None:
    values, parts = HELD[name]
    assert all(found is ONE for found in parts(values))
    assert len(tensors_in(values)) == len(parts(values))
    changed = map_tensors(Tensor, lambda tensor: tensor * 2, values)
    assert all(torch.equal(found, ONE * 2) for found in parts(changed))
    assert all(torch.equal(found, torch.ones(2)) for found in parts(values))


def test_what_holds_none_is_the_same_object() -> None:
    values = [Result(ONE), nn.Linear(2, 2), int, "a", None, print]
    changed = map_tensors(nn.Parameter, lambda tensor: tensor * 2, values)
    assert all(one is other for one, other in zip(changed, values, strict=True))
    assert tensors_in(values[1:]) == []
