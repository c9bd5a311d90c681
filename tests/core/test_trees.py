"""Mapping over nested arguments gives what torch's function gives."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from flextrain.core.trees import tree_map_only

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
