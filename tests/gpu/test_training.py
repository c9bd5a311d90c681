"""Training through the runner: what the CPU computes, resuming bit for bit, and checkpoints that go from one to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.checkpoint import Checkpoint

from .runs import ADAMW, Classifier, losses, make_runner, validation

SGD = dict(type="SGD", lr=0.05, momentum=0.9)


def weights(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(path)
    found = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in checkpoint.tensors.items() if k.startswith("model.")}
    checkpoint.load(found)
    return found


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_losses_are_those_of_the_cpu(tmp_path: Path, kind: str, optimizer: dict[str, Any]) -> None:
    recipe = dict(optim_wrapper=dict(optimizer=optimizer, clip_grad=dict(max_norm=1.0)))
    found, expected = (losses(tmp_path / str(i), device, **recipe) for i, device in enumerate((kind, "cpu")))
    assert found[-1] < 0.8 * found[0]
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=2e-2, atol=2e-2
    )  # convolutions in TF32


@pytest.mark.parametrize(
    "more",
    [{}, dict(fused=True), dict(foreach=True), dict(capturable=True)],
    ids=["default", "fused", "foreach", "capturable"],
)
def test_resuming_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic=True sets if nobody else has
    if kind == "cpu" and more.get("capturable"):
        pytest.skip("capturable is for accelerators")
    recipe = dict(
        model=lambda: Classifier(dropout=0.3),
        optim_wrapper=dict(optimizer={**ADAMW, **more}),
        param_scheduler=dict(type="LinearLR", end=10, by_epoch=False),
        custom_hooks=[dict(type="EMAHook")],
        randomness=dict(seed=5, deterministic=True),
    )
    make_runner(tmp_path / "a", kind, epochs=3, **recipe).train()
    make_runner(tmp_path / "b", kind, epochs=2, **recipe).train()
    make_runner(tmp_path / "b", kind, epochs=3, resume=True, **recipe).train()
    torch.use_deterministic_algorithms(False)
    ours, theirs = weights(tmp_path / "b" / "epoch_3"), weights(tmp_path / "a" / "epoch_3")
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def test_a_checkpoint_is_resumed_on_the_cpu_and_back(tmp_path: Path, kind: str) -> None:
    make_runner(tmp_path, kind, epochs=1, optim_wrapper=dict(optimizer={**ADAMW, "fused": True})).train()
    make_runner(tmp_path, "cpu", epochs=2, resume=True).train()
    found = losses(tmp_path, kind, epochs=3, resume=True)
    assert len(found) == 8
    assert found[-1] < 0.5


def test_validation_with_averages(tmp_path: Path, kind: str) -> None:
    hooks = [dict(type="EMAHook", momentum=0.5)]
    runner = make_runner(tmp_path, kind, epochs=3, custom_hooks=hooks, **validation())
    runner.train()
    assert runner.message_hub.get_scalar("val/accuracy").current() > 0.8


@pytest.mark.accelerator
def test_the_log_tells_the_memory(tmp_path: Path, kind: str) -> None:
    make_runner(tmp_path, kind).train()
    (log,) = tmp_path.glob("*/*.log")
    lines = [line for line in log.read_text().splitlines() if "Epoch(train)" in line]
    figures = [line.partition("memory: ")[2].split()[0] for line in lines]
    assert figures
    assert all(float(figure) > 0 for figure in figures)
