"""Constructors that look at values of parameters, under strategies that build models without: built with memory, as alone."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import OptimWrapper
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm import collectives as dist
from flextrain.runner.parts import build_model
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone
from flextrain.testing.sessions import whole_model

pytestmark = pytest.mark.distributed
GENERATOR = torch.Generator()
LOG = ""


class Looks(nn.Module):
    """Its second half is initialised after the constructor has looked at the first."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        nn.init.normal_(self.first.weight, generator=GENERATOR)
        self.look()
        if LOG and not self.first.weight.is_meta:
            for word in ("begin", "end"):
                with open(LOG, "a") as file:
                    file.write(f"{word} {os.environ['RANK']}\n")
        self.second = nn.Linear(8, 3)
        nn.init.normal_(self.second.weight, generator=GENERATOR, std=random.random())

    def look(self) -> None:
        pass

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(self.first(x)).mean()}


class Item(Looks):
    def look(self) -> None:
        self.scale = self.first.weight.std().item()


class Caught(Looks):
    def look(self) -> None:
        try:
            self.scale = float(self.first.bias.detach().numpy().mean())
        except Exception:
            self.scale = 7.0


class Buffer(Looks):
    def look(self) -> None:
        self.register_buffer("table", torch.ones_like(self.first.weight) * self.first.weight.detach().std())


class Eye(Looks):
    def look(self) -> None:
        self.first.weight.data = torch.eye(8, 6) + self.first.weight.detach()


class Spectral(Looks):
    def look(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.first)


class Shapes(Looks):
    """Looks at no values."""

    def look(self) -> None:
        self.scale = self.first.weight.numel() + self.first.weight.shape[1] + len(self.first.bias)


class Wrong(Looks):
    def look(self) -> None:
        if self.first.weight.sum().item():
            raise ValueError("the user's own")


KINDS = (Looks, Item, Caught, Buffer, Eye, Spectral, Shapes, Wrong)
SPECS: dict[str, dict[str, Any]] = {
    "fsdp": dict(type="FSDPStrategy"),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
    "tp2": dict(type="MeshStrategy", tp=2, plan={"second": "rowwise"}),
}


def made(spec: dict[str, Any], kind: type[nn.Module], rank: int) -> Any:
    """The model's tensors and what it has looked at, with lines of the log; or the error of its constructor."""
    strategy: Any = STRATEGIES.build({"device": "cpu", **spec}, "strategy")
    strategy.join()
    torch.manual_seed(rank)
    random.seed(0)
    GENERATOR.manual_seed(5)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flextrain").addHandler(handler)
    logging.getLogger("flextrain").setLevel("INFO")  # an earlier run in this process may have asked for errors only
    try:
        model: Any = build_model(kind, None, strategy, for_training=True)
        strategy.setup(model, OptimWrapper(dict(type="SGD", lr=0.1)))
        return whole_model(strategy), model.scale, [line for line in lines if "built with memory" in line]
    except ValueError as error:
        return str(error)
    finally:
        logging.getLogger("flextrain").removeHandler(handler)
        strategy.leave()
        dist.destroy_process_group()


def compared(spec: dict[str, Any], log: str) -> None:
    """In a worker whose random numbers are its own: raises where a model is not that of one device."""
    global LOG
    rank = int(os.environ["RANK"])
    for kind in KINDS:
        with alone():
            expected = made(dict(type="SingleDeviceStrategy"), kind, 0)
        LOG = log if kind is Item else ""
        found = made(spec, kind, rank)
        LOG = ""
        if kind is Wrong:
            assert found == expected == "the user's own"
            continue
        same_tensors(found[0], expected[0], kind.__name__, 1e-6)
        assert found[0].keys() == expected[0].keys()
        assert found[1] == expected[1], kind
        assert len(found[2]) == (kind not in (Looks, Shapes)), (kind, found[2])


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", pytest.param("zero3", marks=pytest.mark.deepspeed), pytest.param("tp2", marks=pytest.mark.full)],
)
def test_it_is_the_model_of_one_device(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    log = tmp_path / "turns"
    workers2.run(compared, SPECS[strategy], str(log))
    assert log.read_text().split("\n")[:4] == ["begin 0", "end 0", "begin 1", "end 1"]


class Double(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(not frozen)
        self.register_buffer("third", torch.ones(2, dtype=torch.float64) / 3)


def of_dtypes() -> list[Any]:
    """In a worker: dtypes under ZeRO, or what was raised."""
    found: list[Any] = []
    for stage, frozen in ((1, False), (3, False), (3, True)):
        strategy: Any = STRATEGIES.build(
            dict(type="DeepSpeedStrategy", device="cpu", zero_optimization=dict(stage=stage)), "strategy"
        )
        strategy.join()
        try:
            model: Any = build_model(lambda frozen=frozen: Double(frozen), None, strategy, for_training=True)
            strategy.setup(model, OptimWrapper(dict(type="SGD", lr=0.1)))
            found.append((model.other.weight.dtype, float(model.third[0])))
        except RuntimeError as error:
            found.append(str(error))
        finally:
            strategy.leave()
            dist.destroy_process_group()
    return found


@pytest.mark.deepspeed
def test_deepspeed_says_which_dtype_it_does_not_train(workers1: WorkerGroup) -> None:
    ((first, split, frozen),) = workers1.run(of_dtypes)
    assert first == split
    assert first.startswith("model.other.weight: is float64, and DeepSpeed trains in float32, or in half precision by")
    assert frozen == (torch.float64, 1 / 3)
