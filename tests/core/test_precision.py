"""Precision: what a wrapper may ask for, and what casting a model does to what goes in and comes out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.device.precision import (
    Precision,
    PrecisionReport,
    autocast_computes_in,
    cast_tensors,
    dtypes,
    exact_float32,
    output_in_float32,
    require,
    to_dtype,
)

HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    "name, dtype", [("bf16", torch.bfloat16), ("float16", HALF), ("fp32", FULL), (torch.float64, torch.float64)]
)
def test_dtypes_by_name(name: Any, dtype: torch.dtype) -> None:
    assert to_dtype(name, "here") is dtype


def test_a_dtype_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match='^here: "fp8" is not allowed, choose float32, fp32, float16'):
        to_dtype("fp8", "here")


@pytest.mark.parametrize(
    "precision, autocast",
    [
        (Precision(), False),
        (Precision(compute=HALF), True),
        (Precision(compute=None), True),  # the device decides, and no device decides for float32
    ],
)
def test_autocast_is_for_compute_that_differs_from_what_is_stored(precision: Precision, autocast: bool) -> None:
    assert precision.autocast is autocast


class Output(OrderedDict):
    """As those of transformers: a dict of a class of its own."""


@dataclass
class Predicted:
    logits: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("kind", [dict, Output, Predicted])
def test_outputs_of_all_kinds_are_float32(kind: Any) -> None:
    given = kind(logits=torch.ones(1, 2, dtype=torch.bfloat16), label=torch.ones(1, dtype=torch.int64))
    found = output_in_float32(given)
    assert type(found) is kind
    values = vars(found) if kind is Predicted else found
    assert (values["logits"].dtype, values["label"].dtype) == (FULL, torch.int64)


def test_cast_tensors_leaves_other_things_alone() -> None:
    data = {"a": [torch.ones(1), 3], "b": (torch.tensor([1]), "text", None)}
    cast = cast_tensors(data, HALF)
    assert cast["a"][0].dtype is HALF
    assert cast["b"][0].dtype is torch.int64
    assert (cast["a"][1], cast["b"][1:]) == (3, ("text", None))
    assert data["a"][0].dtype is FULL  # type: ignore[union-attr]


def test_dtypes_that_occur() -> None:
    tensors = [torch.ones(1, dtype=FULL), torch.ones(1, dtype=HALF), torch.ones(1, dtype=HALF), torch.tensor([1])]
    assert dtypes(tensors) == (HALF, FULL)
    assert dtypes([]) == ()


def test_a_broken_promise_raises() -> None:
    require(HALF, (HALF,), "parameters")
    require(None, (FULL,), "parameters")
    require(HALF, (), "parameters")
    with pytest.raises(StrategyError, match=r"^precision: parameters .*torch.float16.* torch.float32$"):
        require(HALF, (FULL,), "parameters")


def test_an_autocast_that_would_do_nothing_is_found() -> None:
    assert autocast_computes_in("cpu", torch.bfloat16)
    assert autocast_computes_in("cpu", torch.float16)
    assert not autocast_computes_in("cpu", torch.float64)
    assert not autocast_computes_in("meta", torch.float16)
    assert not torch.is_autocast_enabled("cpu")


def test_the_report_reads_as_one_line() -> None:
    report = PrecisionReport(compute=(HALF,), parameters=(HALF, FULL), masters=(), gradients=(HALF,))
    assert str(report) == "compute float16, parameters float16/float32, gradients float16"


def _set(name: str) -> None:
    if name == "one of two" and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this version of torch has one switch")
    torch.set_float32_matmul_precision("high" if name == "high" else "highest")
    if name == "one of two":
        cast(Any, torch.backends.cudnn).conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = name != "off"


def _switches() -> list[Any]:
    cudnn: Any = torch.backends.cudnn
    owners = (cudnn.conv, cudnn.rnn) if hasattr(torch.backends, "fp32_precision") else ()
    return [torch.get_float32_matmul_precision(), *(owner.fp32_precision for owner in owners)]


@pytest.mark.parametrize("name", ["as at first", "high", "off", "one of two"])
def test_float32_is_exact_for_a_while(name: str) -> None:
    before = _switches()
    try:
        _set(name)
        own = _switches()
        with exact_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert _switches() == own
    finally:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
    assert _switches() == before
