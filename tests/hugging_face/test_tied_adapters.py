"""Adapters beside tied embeddings and heads: they begin with the tied values, and are merged into a model that is not tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flextrain.cli import main
from flextrain.testing import WorkerGroup
from tests.runner.training import log_lines

from .folders import model_of, runner_of, save_folder, whole_weights
from .test_export import _logits, loaded

pytest.importorskip("peft", reason="needs pip install flextrain[peft]")

CAUSAL = "transformers:AutoModelForCausalLM"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tied"
    save_folder(path, tie_word_embeddings=True)
    return path


def lora(**given: Any) -> list[dict[str, Any]]:
    return [dict(type="LoRA", r=4, **{"target_modules": ["q_proj"], **given})]


def tied_llama() -> Any:
    torch.manual_seed(0)
    return model_of("llama", tie_word_embeddings=True)


def copies(work_dir: Path, given: dict[str, Any], copied: list[str], strategy: Any) -> dict[str, Tensor]:
    """The first values of what this process has of the copies and of their original."""
    runner = runner_of(work_dir, transforms=lora(modules_to_save=copied), strategy=strategy, **given)
    runner.train()  # with a learning rate of 0
    weights = whole_weights(runner)
    runner.close()
    return {name: weight for name, weight in weights.items() if "embed_tokens" in name or "lm_head" in name}


def log_of(work_dir: Path) -> str:
    (log,) = work_dir.rglob("*.log")
    return log.read_text()


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "pretrained": dict(model=dict(type=CAUSAL, pretrained=str(folder))),
        "load_from": dict(model=dict(type=tied_llama), load_from=str(folder)),
    }


@pytest.mark.parametrize("copied", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids="-".join)
@pytest.mark.parametrize("source", ["pretrained", "load_from"])
def test_a_copy_of_a_tied_layer_begins_with_the_tied_values(
    tmp_path: Path, folder: Path, source: str, copied: list[str]
) -> None:
    found = copies(tmp_path, sources(folder)[source], copied, "single")
    assert sum("modules_to_save" in name for name in found) == len(copied)
    expected = model_of("llama").from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight
    for name, weight in found.items():
        assert torch.equal(weight, expected), name
    assert not any(text in log_of(tmp_path) for text in ("does not have", "does not fit"))


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["pretrained", pytest.param("load_from", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="fsdp", wrap="blocks"), id="fsdp"),
        pytest.param("zero3", id="zero3", marks=[pytest.mark.full, pytest.mark.deepspeed]),
        pytest.param("ddp", id="ddp", marks=pytest.mark.full),
        pytest.param(dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
        pytest.param(dict(type="mesh", pp=2), id="pp2", marks=pytest.mark.full),
    ],
)
def test_a_copy_begins_with_the_tied_values_under_every_strategy(
    workers2: WorkerGroup, tmp_path: Path, folder: Path, source: str, strategy: Any
) -> None:
    expected = copies(tmp_path / "single", sources(folder)[source], ["lm_head"], "single")
    results = workers2.run(copies, tmp_path / "both", sources(folder)[source], ["lm_head"], strategy)
    assert {name for found in results for name in found} == expected.keys()
    for found in results:
        assert all(torch.equal(found[name], expected[name]) for name in found)


ADAPTED: dict[str, dict[str, Any]] = {
    "copy of the head": dict(modules_to_save=["lm_head"]),
    "copy of the embedding": dict(modules_to_save=["embed_tokens"]),
    "both copies": dict(modules_to_save=["lm_head", "embed_tokens"]),
    "both copies, tied": dict(modules_to_save=["lm_head", "embed_tokens"], ensure_weight_tying=True),
    "adapter of the embedding": dict(target_modules=["q_proj", "embed_tokens"]),
    "adapter of the head": dict(target_modules=["q_proj", "lm_head"]),
    "both adapters": dict(target_modules=["q_proj", "lm_head", "embed_tokens"]),
    "both adapters, tied": dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
    "elsewhere": dict(),
}


@pytest.mark.parametrize("leaves_out", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ADAPTED)
def test_what_is_merged_computes_what_the_run_computed(
    tmp_path: Path, folder: Path, name: str, leaves_out: bool
) -> None:
    if name.endswith(", tied"):
        pytest.importorskip("peft", minversion="0.19")  # earlier ones tie copies only, and none of transformers 5
    runner = runner_of(
        tmp_path / "run",
        dict(type=CAUSAL, pretrained=str(folder)),
        lr=0.5,
        transforms=lora(**ADAPTED[name]),
        strategy=dict(type="single", exclude_frozen_parameters=leaves_out),
    )
    runner.train()
    expected = _logits(runner.strategy.module)
    runner.export_hugging_face(tmp_path / "live")
    runner.close()
    base = ["--base", str(folder)] if leaves_out else []
    command = ["checkpoint", "export", str(tmp_path / "run" / "iter_2")]
    assert main([*command, str(tmp_path / "merged"), "--merge", "--hf", *base]) == 0
    with log_lines() as said:
        assert main([*command, str(tmp_path / "merged.safetensors"), "--merge", *base]) == 0
    stays_tied = name in ("elsewhere", "both copies, tied", "both adapters, tied")
    assert any("two after the merge" in line for line in said) is not stays_tied
    for written in ("live", "merged"):
        there = loaded(tmp_path / written)
        assert (_logits(there) - expected).abs().max() < 1e-6, written
        assert there.config.tie_word_embeddings is stays_tied
    plain = model_of("llama", tie_word_embeddings=stays_tied)
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    assert (_logits(plain) - expected).abs().max() < 1e-6
    assert (_logits(loaded(folder)) - expected).abs().max() > 1e-3


def test_a_trained_copy_that_a_tied_model_cannot_take_is_told(tmp_path: Path, folder: Path) -> None:
    transforms = lora(modules_to_save=["lm_head"])
    runner = runner_of(tmp_path / "run", dict(type=CAUSAL, pretrained=str(folder)), lr=0.5, transforms=transforms)
    runner.train()
    expected = _logits(runner.strategy.module)
    runner.close()
    saved = str(tmp_path / "run" / "iter_2")
    for name, again in (("again", transforms), ("plain", None)):
        runner = runner_of(tmp_path / name, dict(type=tied_llama), load_from=saved, transforms=again)
        runner.train()
        difference = (_logits(runner.strategy.module) - expected).abs().max()
        assert bool(difference < 1e-6) is (name == "again")
        runner.close()
    assert "lm_head.modules_to_save.default.weight" in log_of(tmp_path / "plain")
    assert "unexpected" not in log_of(tmp_path / "again")


def tied_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=96,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )


def test_a_model_that_cannot_be_written_without_ties_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transforms = [dict(type="LoRA", r=4, target_modules=["q"], modules_to_save=["lm_head"])]
    runner = runner_of(tmp_path / "run", dict(type=tied_t5), lr=0.5, transforms=transforms)
    runner.train()
    runner.close()
    command = ["checkpoint", "export", str(tmp_path / "run" / "iter_2"), str(tmp_path / "merged")]
    assert main([*command, "--merge", "--hf"]) != 0
    error = capsys.readouterr().err
    assert (
        "T5ForConditionalGeneration cannot be written without tying them; write the adapter alone with --peft" in error
    )
    assert error.count("\n") == 1
    assert not (tmp_path / "merged").exists()
    assert main([*command, "--peft"]) == 0
