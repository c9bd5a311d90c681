"""torch.compile and CUDA graphs: the losses and predictions of a run that is not compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import Engine

from .runs import ADAMW, BATCH, Classifier, losses, make_runner, spots, validation

GRAPHS = dict(mode="reduce-overhead")
RECIPES: dict[str, dict[str, Any]] = {
    "plain": dict(optim_wrapper=dict(optimizer=ADAMW)),
    "clipped": dict(optim_wrapper=dict(optimizer=ADAMW, clip_grad=dict(max_norm=0.5))),
    "accumulated": dict(optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=2)),
    "bfloat16": dict(optim_wrapper=dict(type="AmpOptimWrapper", dtype="bfloat16", optimizer=ADAMW)),
}


@pytest.fixture(autouse=True)
def _compiled_afresh() -> None:
    torch.compiler.reset()


def options(kind: str, **more: Any) -> dict[str, Any]:
    """Arguments of torch.compile; on the CPU without the compiler, which takes a minute there."""
    return dict(backend="aot_eager") if kind == "cpu" else more


def assert_close(found: list[float], expected: list[float], tolerance: float = 2e-2) -> None:
    assert len(set(found)) == len(found), "losses of several updates are one and the same"
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "strategy", [dict(type="SingleDeviceStrategy"), dict(type="FSDPStrategy", wrap=["Sequential"])]
)
def test_by_the_strategy(tmp_path: Path, kind: str, strategy: dict[str, Any]) -> None:
    expected = losses(tmp_path / "eager", kind, strategy=strategy)
    assert_close(losses(tmp_path / "compiled", kind, strategy=dict(strategy, compile=options(kind) or True)), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_graphs_by_the_runner(tmp_path: Path, kind: str, recipe: str) -> None:
    expected = losses(tmp_path / "eager", kind, **RECIPES[recipe])
    tolerance = 0.1 if recipe == "bfloat16" else 2e-2
    assert_close(losses(tmp_path / "graphs", kind, compile=GRAPHS, **RECIPES[recipe]), expected, tolerance)


@pytest.mark.parametrize("part", ["whole", "head"])
def test_by_the_user(tmp_path: Path, kind: str, part: str) -> None:
    def compiled() -> nn.Module:
        model = Classifier()
        if part == "whole":
            model.compile(**options(kind, **GRAPHS))
        else:
            model.head = torch.compile(model.head, **options(kind, **GRAPHS))  # type: ignore[assignment]
        return model

    assert_close(losses(tmp_path / part, kind, model=compiled), losses(tmp_path / "eager", kind))


def test_validation_keeps_what_it_is_given(tmp_path: Path, kind: str) -> None:
    runs = {}
    for name, changes in (("eager", {}), ("compiled", dict(compile=options(kind, **GRAPHS)))):
        runner = make_runner(tmp_path / name, kind, epochs=3, **changes, **validation())
        runner.train()
        runs[name] = runner.message_hub.get_scalar("val/accuracy").current()
        runner.strategy.leave()
    assert abs(runs["compiled"] - runs["eager"]) <= 0.03


class Graphed(nn.Module):
    """A classifier whose head the user has recorded as a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier()
        self.recorded: Any = None  # by the first forward, because it needs the device

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        features = self.inner.features(x)
        if self.recorded is None:
            self.recorded = [torch.cuda.make_graphed_callables(self.inner.head, (features.detach().requires_grad_(),))]
        return {"loss": nn.functional.cross_entropy(self.recorded[0](features), y)}


@pytest.mark.cuda
@pytest.mark.parametrize("windows", [1, 2])
def test_a_part_that_the_user_has_recorded(tmp_path: Path, kind: str, windows: int) -> None:
    changes = dict(optim_wrapper=dict(optimizer=ADAMW, accumulative_counts=windows))
    expected = losses(tmp_path / "eager", kind, **changes)
    assert_close(losses(tmp_path / "recorded", kind, model=Graphed, **changes), expected)


@pytest.mark.cuda
def test_an_engine_adds_up_the_gradients_of_several_calls(kind: str) -> None:
    found = {}
    batches = [[tensor.to(kind) for tensor in spots(BATCH, seed).tensors] for seed in range(3)]
    for name, changes in (("eager", {}), ("graphs", dict(compile=GRAPHS))):
        torch.manual_seed(0)
        strategy = dict(type="SingleDeviceStrategy", device=kind, **changes)
        with Engine(Classifier, strategy, dict(optimizer=dict(type="SGD", lr=0.1))) as engine:
            for _ in range(4):  # the first ones warm up and record
                for batch in batches[:2]:
                    engine.forward_backward(batch)
                engine.forward(batches[2])
                engine.optim_step()
            found[name] = [value.detach().clone() for value in engine.strategy.module.parameters()]
    for mine, other in zip(found["graphs"], found["eager"], strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-4)
