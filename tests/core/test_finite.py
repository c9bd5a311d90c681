"""Finding NaN and infinity, in tensors and when a checkpoint is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain.core.base.errors import CheckpointError
from flextrain.core.base.tensors import nonfinite
from flextrain.core.checkpoint import (
    Checkpoint,
    FlatShard,
    Staging,
    directory,
    find_latest,
    is_marked,
    mark_latest,
    passed_over,
    save_checkpoint,
    save_in_background,
    what_is_not_finite,
)
from flextrain.core.checkpoint.manifest import MANIFEST

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 1002])
def test_one_element_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.ones(1003)
    tensor[place] = value
    found = nonfinite({"a": torch.ones(2, 2, dtype=dtype), "b": tensor.to(dtype), "c": torch.ones(1, dtype=dtype)})
    assert found == ["b"]


def test_the_largest_numbers_are_numbers() -> None:
    largest = {str(dtype): torch.full((5000,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES}
    both = torch.tensor([math.inf, -math.inf, math.inf])
    assert nonfinite({**largest, "both": both, "empty": torch.empty(0), "count": torch.tensor(3)}) == ["both"]


def test_a_slice_of_a_tensor_and_one_that_wants_gradients() -> None:
    bad = torch.tensor([1.0, math.nan])
    shards = {"good": FlatShard(torch.ones(2), (2, 2), 1), "bad": FlatShard(bad, (2, 2), 1)}
    assert nonfinite({**shards, "parameter": torch.nn.Parameter(bad)}) == ["bad", "parameter"]


def state(**changes: Tensor) -> dict[str, Any]:
    return {"model.a": torch.ones(3), "model.mask": torch.tensor(-math.inf), "loop": 1, **changes}


BAD = {"model.a": torch.tensor([0.0, math.nan, 1.0])}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_is_marked(tmp_path: Path, in_background: bool) -> None:
    staging = Staging()
    options: dict[str, Any] = dict(is_latest=True, finite={"model.a", "model.gone"}, staging=staging)

    def save(name: str, content: dict[str, Any]) -> None:
        if in_background:
            save_in_background(tmp_path / name, content, **options).wait()
        else:
            save_checkpoint(tmp_path / name, content, **options)

    save("a", state())
    assert staging.nonfinite == ()
    assert "nonfinite" not in json.loads((tmp_path / "a" / MANIFEST).read_text()), "older versions read it"
    save("b", state(**BAD))
    assert staging.nonfinite == ("model.a",)
    assert find_latest(tmp_path) == tmp_path / "a"
    assert Checkpoint.open(tmp_path / "b").nonfinite == ("model.a",)
    assert (is_marked(tmp_path / "a"), is_marked(tmp_path / "b"), is_marked(tmp_path / "c")) == (False, True, False)
    assert passed_over(tmp_path, tmp_path / "a") == ["b"]
    save("c", state())
    assert (staging.nonfinite, find_latest(tmp_path)) == ((), tmp_path / "c")
    assert passed_over(tmp_path, tmp_path / "c") == []


def test_without_a_good_one_there_is_no_latest(tmp_path: Path) -> None:
    for name in "ab":
        save_checkpoint(tmp_path / name, state(**BAD), is_latest=True, finite={"model.a"})
    assert find_latest(tmp_path) is None
    assert passed_over(tmp_path, None) == ["a", "b"]
    assert passed_over(tmp_path / "nowhere", None) == []


def test_what_may_be_infinite_marks_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", state(**BAD), is_latest=True, finite={"model.b"})
    assert (is_marked(tmp_path / "a"), find_latest(tmp_path)) == (False, tmp_path / "a")


def test_a_mark_of_what_is_not_there(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", state(**BAD), finite={"model.a"})
    mark_latest(path)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["xxh3"]
    manifest["nonfinite"] = ["model.z"]
    directory.seal(path, json.dumps(manifest).encode())
    with pytest.raises(
        CheckpointError, match=r"manifest.json: is damaged at .*model\.z is marked as not finite and does not exist"
    ):
        Checkpoint.open(path)


def test_in_words() -> None:
    assert what_is_not_finite(["a"]) == "1 tensor (a)"
    assert what_is_not_finite(list("abcde"), "weight") == "5 weights (a, b, c and 2 more)"
