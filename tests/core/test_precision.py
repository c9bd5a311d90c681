"""Precision: what a wrapper may ask for, and what casting a model does to what goes in and comes out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.device.precision import (
    Precision,
    PrecisionReport,
    autocast_computes_in,
    cast_parameters,
    cast_tensors,
    dtypes,
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
        (Precision(compute=HALF, param=HALF), False),
    ],
)
def test_autocast_is_for_compute_that_differs_from_what_is_stored(precision: Precision, autocast: bool) -> None:
    assert precision.autocast is autocast


class Net(nn.Module):
    """Notes the dtypes that its parts are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scale", torch.ones(4))
        self.seen: dict[str, torch.dtype] = {}
        for name, part in (("first", self.first), ("norm", self.norm), ("last", self.last)):
            part.register_forward_hook(lambda _, inputs, __, name=name: self.seen.update({name: inputs[0].dtype}))

    def forward(self, x: Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
        self.seen |= {"x": x.dtype, "extra": extra["floats"][0].dtype, "labels": extra["labels"].dtype}
        out = self.last(self.norm(self.first(x)) * self.scale)
        self.seen["out"] = out.dtype
        return {"out": out, "labels": extra["labels"], "name": "net"}


def run(net: Net) -> dict[str, Any]:
    result: dict[str, Any] = net(torch.ones(2, 3), extra={"floats": [torch.ones(1)], "labels": torch.tensor([1])})
    return result


def test_half_precision_keeps_normalisation_and_gives_float32_out() -> None:
    net = Net()
    cast_parameters(net, Precision(compute=HALF, param=HALF))
    stored = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    assert {name for name, dtype in stored.items() if dtype is FULL} == {
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"
    }  # fmt: skip
    assert (stored["table"], stored["norm.num_batches_tracked"]) == (torch.int64, torch.int64)
    result = run(net)
    assert net.seen == {
        "x": HALF, "extra": HALF, "labels": torch.int64, "first": HALF, "norm": FULL, "last": HALF, "out": HALF,
    }  # fmt: skip
    assert (result["out"].dtype, result["labels"].dtype, result["name"]) == (FULL, torch.int64, "net")
    assert list(net.state_dict()) == list(Net().state_dict())


def test_pure_half_precision() -> None:
    net = Net()
    cast_parameters(net, Precision(compute=HALF, param=HALF, keep_norm=False))
    assert dtypes(net.parameters()) == (HALF,)
    run(net)
    assert net.seen["norm"] is HALF


def test_full_precision_changes_nothing() -> None:
    net = Net()
    cast_parameters(net, Precision())
    assert dtypes(net.parameters()) == (FULL,)
    run(net)
    assert set(net.seen.values()) == {FULL, torch.int64}


class Output(OrderedDict):
    """As those of transformers: a dict of a class of its own."""


@dataclass
class Predicted:
    logits: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("kind", [dict, Output, Predicted])
def test_outputs_of_all_kinds_are_float32(kind: Any) -> None:
    class Gives(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return kind(logits=super().forward(x), label=torch.ones(1, dtype=torch.int64))

    net = Gives(2, 2)
    cast_parameters(net, Precision(param=torch.bfloat16, compute=torch.bfloat16))
    found = net(torch.ones(1, 2))
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
