"""Foreign state as JSON, and back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from flextrain import CheckpointError
from flextrain.core.base.json_values import add_to, pack, taken_from, unpack

TENSORS = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.tensor([True, False]),
    torch.get_rng_state(),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_tensors(tensor: torch.Tensor) -> None:
    found = unpack(json.loads(json.dumps(pack({"x": [tensor]}, "state"))))["x"][0]
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**70, 0.1, float("inf"), "text", b"\x00bytes", [], (), {}, [1, (2, [3.0])],
        {1: "a", ("x", 2): {"dict": {"tuple": []}}, None: False}, random.Random(3).getstate(), {"tensor": ["float32", [1], "x"]},
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values(value: Any) -> None:
    found = unpack(json.loads(json.dumps(pack(value, "state"))))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value", [np.arange(6).reshape(3, 2), np.zeros((0, 2)), np.float32(0.1), np.array(["ab", "c"])]
)
def test_arrays(value: Any) -> None:
    found = unpack(json.loads(json.dumps(pack(value, "state"))))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.array([None]), torch.eye(2).to_sparse(), print],
    ids=lambda value: type(value).__name__,
)
def test_what_is_neither_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^state\['a'\]\[1\]: {type(value).__name__} cannot be saved") as caught:
        pack({"a": (0, value)}, "state")
    assert "\n" not in str(caught.value)


def test_tensors_may_be_kept_elsewhere() -> None:
    tensors: list[torch.Tensor] = []
    word = add_to(tensors, lambda value: isinstance(value, torch.Tensor))
    packed = json.loads(json.dumps(pack({"x": (TENSORS[0], [TENSORS[1]])}, "state", word)))
    assert packed == {"dict": [["x", {"tuple": [{"tensor": 0}, [{"tensor": 1}]]}]]}
    found = unpack(packed, taken_from(tensors.__getitem__))
    assert found["x"][0] is TENSORS[0]
    assert found["x"][1][0] is TENSORS[1]
    with pytest.raises(CheckpointError, match=r"state\[0\]: bytes cannot be saved"):
        pack([b"x"], "state", word)
    with pytest.raises(ValueError, match="unknown kind bytes"):
        unpack({"bytes": "eA=="}, taken_from(tensors.__getitem__))
