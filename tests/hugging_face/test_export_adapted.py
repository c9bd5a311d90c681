"""Whole models of transformers are exported from runs with adapters and frozen parts, and nothing is left beside them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import Hook
from flextrain.cli import main
from flextrain.core.base.errors import CheckpointError
from flextrain.core.checkpoint import export_hugging_face
from flextrain.testing import WorkerGroup

from .folders import model_of, runner_of
from .test_export import _logits, loaded

peft = pytest.importorskip("peft", reason="needs pip install flextrain[peft]")

LORA = dict(type="LoRA", r=4, target_modules=["q_proj", "v_proj"])


def base(kind: str) -> Any:
    torch.manual_seed(0)
    return model_of(kind, tie_word_embeddings=kind == "gpt2")


def wrapped(kind: str = "llama", copied: list[str] | None = None) -> Any:
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    return peft.get_peft_model(base(kind), peft.LoraConfig(r=4, target_modules=targets, modules_to_save=copied))


class Holder(nn.Module):
    """A user's class around the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = wrapped()

    def forward(self, **batch: Tensor) -> Any:
        return {"loss": self.model(**batch).loss}


def frozen_llama() -> Any:
    model = base("llama")
    model.model.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "plain": (wrapped, "llama"),
    "copies": (partial(wrapped, "llama", ["lm_head"]), "llama"),
    "tied": (partial(wrapped, "gpt2"), "gpt2"),
    "copy of a tied one": (partial(wrapped, "gpt2", ["lm_head"]), "gpt2"),
    "held": (Holder, "llama"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in ("copies", "tied"))) for n in MODELS]
)
@pytest.mark.parametrize("leaves_out", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_model_that_get_peft_model_has_wrapped(tmp_path: Path, name: str, leaves_out: bool) -> None:
    model, kind = MODELS[name]
    strategy = dict(type="single", exclude_frozen_parameters=leaves_out)
    runner = runner_of(tmp_path / "run", dict(type=model), lr=0.5, strategy=strategy)
    runner.train()
    runner.export_hugging_face(tmp_path / "live")
    trained = runner.strategy.module
    expected = _logits(trained.model if name == "held" else trained)
    runner.close()
    plain = base(kind)
    assert (_logits(plain) - expected).abs().max() > 1e-3
    arguments = ["checkpoint", "export", str(tmp_path / "run" / "iter_2"), str(tmp_path / "merged"), "--merge", "--hf"]
    if leaves_out:
        prefix = "model." if name == "held" else ""
        torch.save({prefix + key: value for key, value in plain.state_dict().items()}, tmp_path / "base.pth")
        arguments += ["--base", str(tmp_path / "base.pth")]
    assert main(arguments) == 0
    for folder in ("live", "merged"):
        model_there = loaded(tmp_path / folder)
        assert (_logits(model_there) - expected).abs().max() < 1e-6, folder
        is_tied = kind == "gpt2" and name != "copy of a tied one"
        assert model_there.config.tie_word_embeddings is is_tied


def test_adapters_have_to_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = runner_of(tmp_path / "run", dict(type=wrapped))
    runner.train()
    runner.close()
    assert main(["checkpoint", "export", str(tmp_path / "run" / "iter_2"), str(tmp_path / "out"), "--hf"]) != 0
    error = capsys.readouterr().err
    assert "has adapters, which LlamaForCausalLM has not; merge them with --merge, or write" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def exported(folder: Path, strategy: Any, model: Any, transforms: Any) -> None:
    strategy = {**strategy, "exclude_frozen_parameters": True}
    runner = runner_of(folder, dict(type=model), lr=0.5, strategy=strategy, transforms=transforms)
    runner.train()
    runner.export_hugging_face(folder / "live")
    runner.close()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "model, transforms",
    [
        pytest.param(partial(base, "llama"), [LORA], id="adapters"),
        pytest.param(frozen_llama, None, id="frozen", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="fsdp", wrap="blocks"), id="fsdp"),
        pytest.param(dict(type="zero3"), id="zero3", marks=[pytest.mark.full, pytest.mark.deepspeed]),
        pytest.param(dict(type="mesh", pp=2), id="pp2", marks=pytest.mark.full),
        pytest.param(dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
    ],
)
def test_the_whole_model_is_exported_though_checkpoints_leave_frozen_parts_out(
    workers2: WorkerGroup, tmp_path: Path, strategy: dict[str, Any], model: Any, transforms: Any
) -> None:
    workers2.run(exported, tmp_path / "run", strategy, model, transforms)
    if strategy["type"] == "mesh":  # every process has all samples
        exported(tmp_path / "reference", dict(type="single"), model, transforms)
    else:
        workers2.run(exported, tmp_path / "reference", dict(type="ddp"), model, transforms)
    found, reference = (_logits(loaded(tmp_path / run / "live")) for run in ("run", "reference"))
    torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)
    assert (_logits(base("llama")) - found).abs().max() > 1e-3
    assert not list((tmp_path / "run").glob(".*"))


class FailingSave(Hook):
    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        raise CheckpointError("no space")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "out")))


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=frozen_llama), custom_hooks=[FailingSave()])
    with pytest.raises(CheckpointError, match="no space"):
        runner.export_hugging_face(tmp_path / "out")
    assert not leftovers(tmp_path)
    (tmp_path / ".out.weights").mkdir()
    (tmp_path / ".out.weights" / "mine.txt").touch()
    with pytest.raises(CheckpointError, match="mine.txt: is no part of a checkpoint and would be deleted"):
        runner.export_hugging_face(tmp_path / "out")
    assert leftovers(tmp_path) == [".out.weights"]
    runner.close()


class Tokenizer:
    """Calls a function while an export writes."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def save_pretrained(self, folder: Path) -> list[str]:
        self.call()
        return []


def test_a_run_may_export_to_its_own_folder(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=frozen_llama))
    runner.train()
    runner.export_hugging_face(tmp_path)
    runner.close()
    loaded(tmp_path)
    assert (tmp_path / "iter_2").is_dir()
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_two_exports_at_once_into_one_folder_are_refused(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=frozen_llama))
    runner.train()
    refused: list[str] = []

    def second() -> None:
        for export in (runner.export_hugging_face, partial(export_hugging_face, tmp_path / "iter_2")):
            with pytest.raises(CheckpointError, match="is being written by another run of this process") as raised:
                export(tmp_path / "out")
            refused.append(str(raised.value))

    for first in (runner.export_hugging_face, partial(export_hugging_face, tmp_path / "iter_2")):
        first(tmp_path / "out", tokenizer=Tokenizer(second))
        loaded(tmp_path / "out")
        assert leftovers(tmp_path) == ["out"]
        assert not list((tmp_path / "out").glob(".*"))
        shutil.rmtree(tmp_path / "out")
    runner.close()
    assert len(refused) == 4
    assert not any("\n" in message for message in refused)


@pytest.mark.full
@pytest.mark.processes
def test_what_a_kill_has_left_is_replaced_by_the_next_export(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.hugging_face.test_export_adapted import killed;"
        "killed(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ".out.weights" in leftovers(tmp_path)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    runner = runner_of(tmp_path, dict(type=frozen_llama))
    runner.export_hugging_face(tmp_path / "out")
    runner.close()
    assert leftovers(tmp_path) == ["out"]
    assert not list((tmp_path / "out").glob(".*"))
    loaded(tmp_path / "out")


def killed(folder: Path) -> None:
    """In a process of its own: the machine goes down in the middle of an export."""
    runner = runner_of(folder, dict(type=frozen_llama))
    runner.export_hugging_face(folder / "out", tokenizer=Tokenizer(lambda: os.kill(os.getpid(), signal.SIGKILL)))
