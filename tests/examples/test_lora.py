"""examples/lora.py: adapters trained under every strategy, checkpoints without the base, and what peft makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.cli import main
from flextrain.core.checkpoint import Checkpoint
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .recipes import means, recipe, same, trained

pytest.importorskip("transformers")
pytest.importorskip("peft")

SIZE = ("--max-iters", "4", "--rank", "4")
STRATEGIES = [
    pytest.param("ddp", "8", marks=pytest.mark.full),
    ("fsdp", "8"),
    pytest.param("zero2", "8", marks=[pytest.mark.full, pytest.mark.deepspeed]),
    pytest.param("zero3", "8", marks=[pytest.mark.full, pytest.mark.deepspeed]),
    pytest.param("mesh:tp=2", "16", marks=pytest.mark.full),
]


def with_base(folder: Path, base: Path, flags: tuple[str, ...], stop: int | None = None) -> dict[str, Any]:
    return trained("lora", folder, (*SIZE, "--pretrained", str(base), *flags), stop)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    recipe("fine_tuning").write_base(folder)
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, Any]:
    with alone():
        found = with_base(tmp_path_factory.mktemp("alone"), base, ("--batch-size", "16"))
    assert found["losses"][-1] < found["losses"][0]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy, batch", STRATEGIES)
def test_two_processes_train_adapters_as_one_device(
    tmp_path: Path, workers2: WorkerGroup, base: Path, expected: dict[str, Any], strategy: str, batch: str
) -> None:
    flags = ("--strategy", strategy, "--batch-size", batch)
    found = workers2.run(with_base, tmp_path / "run", base, flags)
    assert means(found) == pytest.approx(expected["losses"], rel=1e-5)
    for one in found:
        same(one, expected, 1e-4)
        assert all("lora_" in name for name in one["optimized"])
        assert one["metrics"][-1] == pytest.approx(expected["metrics"][-1], rel=1e-4)
    check_checkpoint(tmp_path, base, expected)


def check_checkpoint(folder: Path, base: Path, expected: dict[str, Any]) -> None:
    """It has adapters alone; peft loads them, and merges them to the model that was exported merged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved = folder / "run" / "iter_4"
    names = [key for key in Checkpoint.open(saved).entries if key.startswith("model.")]
    assert len(names) == 28, "two matrices for each of seven layers of two blocks"
    assert all("lora_" in name for name in names)
    assert not main(["checkpoint", "export", str(saved), str(folder / "adapter"), "--peft"])
    merged = [str(saved), str(folder / "merged"), "--merge", "--base", str(base), "--hf"]
    assert not main(["checkpoint", "export", *merged])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapter").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(ids).logits
        of_merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()(ids).logits
        of_base = AutoModelForCausalLM.from_pretrained(base).eval()(ids).logits
    torch.testing.assert_close(of_merged, logits, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(of_base, logits, atol=1e-4), "the adapters have an effect"
    state = model.state_dict()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(state[f"base_model.model.{name}"], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("before, after", [("fsdp", "zero3"), ("zero3", "mesh:tp=2"), ("mesh:tp=2", "fsdp")])
def test_another_strategy_goes_on(
    tmp_path: Path, workers2: WorkerGroup, base: Path, expected: dict[str, Any], before: str, after: str
) -> None:
    def flags(strategy: str) -> tuple[str, ...]:
        return ("--strategy", strategy, "--batch-size", "16" if strategy.startswith("mesh") else "8")

    workers2.run(with_base, tmp_path / "run", base, flags(before), 2)
    found = workers2.run(with_base, tmp_path / "run", base, (*flags(after), "--resume"))
    assert means(found) == pytest.approx(expected["losses"][2:], rel=1e-5)
    for one in found:
        same({**one, "metrics": expected["metrics"]}, expected, 1e-4)
