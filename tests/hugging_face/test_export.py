"""Folders that are exported load with from_pretrained, whatever strategy has trained the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("transformers")

from flextrain import FlexibleRunner
from flextrain.cli import main
from flextrain.core.base.errors import CheckpointError, ConfigError
from flextrain.core.checkpoint import Checkpoint, export_hugging_face
from flextrain.core.checkpoint.load import reading
from flextrain.testing import WorkerGroup

from .folders import model_of, runner_of, save_folder, save_tokenizer, tokens

CAUSAL = "transformers:AutoModelForCausalLM"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a Llama with a tokenizer, whose head is tied to its embeddings."""
    path = tmp_path_factory.mktemp("models") / "llama"
    save_folder(path, tie_word_embeddings=True, dtype=torch.bfloat16)
    save_tokenizer(path)
    return path


def train_and_export(work_dir: Path, model: dict[str, Any], strategy: Any, **options: Any) -> list[Tensor] | None:
    """Train, export the live model; return the logits of the trained model where it is whole."""
    runner = runner_of(work_dir, model, strategy=strategy, lr=0.5)
    runner.train()
    runner.export_hugging_face(work_dir / "live", max_shard_size="20KB", **options)
    logits = None
    if strategy in ("single", "ddp"):
        logits = [_logits(runner.strategy.module)]
    runner.close()
    return logits


def _logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(
            **{k: torch.stack([t[k] for t in tokens(4)]) for k in ("input_ids", "attention_mask")}
        ).logits
    return found


def loaded(folder: Path) -> Any:
    """The model in a folder; everything in it has to fit."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model


@pytest.mark.parametrize("kind, tied", [("llama", False), ("llama", True), ("gpt2", True)])
def test_the_folder_has_the_logits_of_the_trained_model(tmp_path: Path, kind: str, tied: bool) -> None:
    save_folder(tmp_path / "base", kind, tie_word_embeddings=tied)
    model = dict(type=CAUSAL, pretrained=str(tmp_path / "base"))
    logits = train_and_export(tmp_path / "run", model, "single")
    assert logits is not None
    for written in (tmp_path / "run" / "live", tmp_path / "exported"):
        if not written.exists():
            export_hugging_face(tmp_path / "run" / "iter_2", written)
        assert torch.equal(_logits(loaded(written)), logits[0])
    assert not torch.equal(_logits(loaded(tmp_path / "base")), logits[0])


@pytest.mark.parametrize("by", ["load_from", "load_checkpoint"])
def test_a_run_that_does_not_train_exports_what_it_has_loaded(tmp_path: Path, by: str) -> None:
    save_folder(tmp_path / "base")
    weights = {name: tensor + 1 for name, tensor in loaded(tmp_path / "base").state_dict().items()}
    torch.save(weights, tmp_path / "weights.pth")
    runner = FlexibleRunner(
        model=dict(type=CAUSAL, pretrained=str(tmp_path / "base")),
        work_dir=tmp_path / "run",
        load_from=tmp_path / "weights.pth" if by == "load_from" else None,
        log_level="WARNING",
    )
    if by == "load_checkpoint":
        runner.load_checkpoint(tmp_path / "weights.pth")
    runner.export_hugging_face(tmp_path / "exported")
    runner.close()
    found = loaded(tmp_path / "exported").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "count, strategy",
    [
        pytest.param(2, dict(type="fsdp", wrap="blocks"), id="fsdp"),
        pytest.param(2, "zero3", id="zero3"),
        pytest.param(2, dict(type="mesh", pp=2), id="pp2"),
        pytest.param(4, dict(type="mesh", dp_shard=2, tp=2), id="dp2xtp2", marks=pytest.mark.full),
        pytest.param(2, dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
    ],
)
def test_every_strategy_exports_what_one_device_would(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, folder: Path, count: int, strategy: Any
) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    model = dict(type=CAUSAL, pretrained=str(folder))
    divides = (
        (isinstance(strategy, dict) and not {"pp", "tp"} & strategy.keys())
        or "dp_shard" in strategy
        or strategy == "zero3"
    )
    # As many samples per update: 2 processes with different data, or the same data on all.
    work_dir = tmp_path / "run"
    workers(count).run(train_and_export, work_dir, model, strategy)
    export_hugging_face(work_dir / "iter_2", tmp_path / "exported")
    live, exported = loaded(work_dir / "live"), loaded(tmp_path / "exported")
    assert torch.equal(_logits(live), _logits(exported))
    if divides:
        workers(2).run(train_and_export, tmp_path / "reference", model, "ddp")
    else:
        train_and_export(tmp_path / "reference", model, "single")
    reference = _logits(loaded(tmp_path / "reference" / "live"))
    torch.testing.assert_close(_logits(live), reference, rtol=1e-5, atol=1e-5)
    assert (_logits(loaded(folder).float()) - reference).abs().max() > 1e-2


def test_the_command_writes_configurations_and_the_tokenizer(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    train_and_export(tmp_path / "run", dict(type=CAUSAL, pretrained=str(folder)), "single")
    assert (
        main(["checkpoint", "export", str(tmp_path / "run" / "iter_2"), str(tmp_path / "out"), "--hf", "--json"]) == 0
    )
    written = [Path(entry["path"]).name for entry in json.loads(capsys.readouterr().out)]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(written)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("onely three")["input_ids"]
    half = tmp_path / "half"
    assert (
        main(["checkpoint", "export", str(tmp_path / "run" / "iter_2"), str(half), "--hf", "--dtype", "bfloat16"]) == 0
    )
    assert loaded(half).dtype == torch.bfloat16


def test_averages_are_exported_too(tmp_path: Path, folder: Path) -> None:
    model = dict(type=CAUSAL, pretrained=str(folder))
    runner = runner_of(tmp_path, model, lr=0.5, custom_hooks=[dict(type="EMAHook", momentum=0.5)])
    runner.train()
    runner.close()
    export_hugging_face(tmp_path / "iter_2", tmp_path / "averaged", averaged=True)
    export_hugging_face(tmp_path / "iter_2", tmp_path / "last")
    assert not torch.equal(_logits(loaded(tmp_path / "averaged")), _logits(loaded(tmp_path / "last")))


def head_first(dtype: str) -> Any:
    """A tied Llama whose head comes before its embeddings, under whose name files have the two."""
    model: Any = model_of("llama", tie_word_embeddings=True).to(getattr(torch, dtype))
    inner = model.model
    del model.model
    model.model = inner
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averages_of_tied_weights_have_the_name_that_files_have(tmp_path: Path, dtype: str) -> None:
    runner = runner_of(
        tmp_path, dict(type=head_first, dtype=dtype), lr=0.5, custom_hooks=[dict(type="EMAHook", momentum=0.5)]
    )
    runner.train()
    runner.close()
    checkpoint = Checkpoint.open(tmp_path / "iter_2")
    assert "model.lm_head.weight" in checkpoint.entries
    with reading(checkpoint) as reader:
        expected = reader.read("hook.EMAHook/averaged.lm_head.weight")
    export_hugging_face(tmp_path / "iter_2", tmp_path / "averaged", averaged=True)
    found = loaded(tmp_path / "averaged").state_dict()["model.embed_tokens.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def with_norm(dtype: str, of_norm: str) -> Any:
    model: Any = model_of("llama").to(getattr(torch, dtype))
    model.model.norm.to(getattr(torch, of_norm))
    return model


@pytest.mark.parametrize("most, other", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_configuration_has_the_dtype_of_most_weights(tmp_path: Path, most: str, other: str) -> None:
    """In which from_pretrained reads all of them."""
    runner = runner_of(tmp_path, dict(type=with_norm, dtype=most, of_norm=other))
    runner.export_hugging_face(tmp_path / "folder")
    runner.close()
    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert written["dtype"] == most


class Inside(nn.Module):
    """A model of transformers inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = model_of("llama")
        self.extra = nn.Linear(2, 2)

    def forward(self, **batch: Tensor) -> Any:
        return {"loss": self.llm(**batch).loss + 0 * self.extra.weight.sum()}


def test_a_model_inside_of_another_module_is_exported(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=Inside), lr=0.5)
    runner.train()
    export_hugging_face(tmp_path / "iter_2", tmp_path / "out")
    assert torch.equal(_logits(loaded(tmp_path / "out")), _logits(runner.strategy.module.llm))
    runner.close()


def _of_another(tmp_path: Path) -> Path:
    runner = runner_of(tmp_path / "other", dict(type=Other))
    runner.train()
    runner.close()
    return tmp_path / "other" / "iter_2"


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 4)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return {"loss": self.table(input_ids).square().mean()}


def test_what_cannot_be_exported_is_told_in_a_line(tmp_path: Path, folder: Path) -> None:
    train_and_export(tmp_path / "run", dict(type=CAUSAL, pretrained=str(folder)), "single")
    saved, other = tmp_path / "run" / "iter_2", _of_another(tmp_path)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: export_hugging_face(other, tmp_path / "a"), "does not say which model of transformers"),
        (
            lambda: export_hugging_face(other, tmp_path / "a", config=folder),
            "lacks model.embed_tokens.weight and 19 others",
        ),
        (lambda: export_hugging_face(saved, folder), "config.json: is there already, give another folder"),
        (lambda: export_hugging_face(saved, tmp_path / "a", tokenizer=3), "tokenizer: int is not allowed"),
        (lambda: export_hugging_face(saved, tmp_path / "a", tokenizer=tmp_path), "has no files of a tokenizer"),
        (lambda: export_hugging_face(saved, tmp_path / "a", config=tmp_path), "config.json: cannot be read"),
        (lambda: export_hugging_face(saved, tmp_path / "a", max_shard_size="5XB"), 'max_shard_size: "5XB"'),
        (lambda: export_hugging_face(saved, tmp_path / "a", averaged=True), "holds no averaged weights"),
    ]
    for call, message in cases:
        with pytest.raises(CheckpointError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "a" / "config.json").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(architectures=["NoSuch"]), "NoSuch: transformers .* has no such model"),
        (dict(architectures=["GPT2Config"]), "GPT2Config is no model of transformers"),
        (dict(architectures=[]), "has no architectures"),
        (dict(n_head="x"), "GPT2LMHeadModel: its configuration is wrong, .*(n_head|'str')"),
        (dict(n_embd=33), "GPT2LMHeadModel: its configuration is wrong, .*33"),
        (dict(n_embd=64), r"has shape \(.*32\), and \(.*64\) by its configuration"),
        (dict(n_layer=3), "lacks transformer.h.2.attn.c_attn.bias and 11 others of GPT2LMHeadModel; give the folder"),
        (
            dict(prefix="net."),
            "and has net.transformer.h.0.attn.c_attn.bias; give weights whose names do not begin with net",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    state = save_folder(tmp_path / "base", "gpt2", tie_word_embeddings=True).state_dict()
    prefix = changes.get("prefix", "")
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "w.pth")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message) as raised:
        export_hugging_face(tmp_path / "w.pth", tmp_path / "out", config=tmp_path / "base")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_file_of_weights_is_exported_with_its_ties(tmp_path: Path) -> None:
    model = save_folder(tmp_path / "base", "gpt2", tie_word_embeddings=True)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    export_hugging_face(tmp_path / "w.pth", tmp_path / "out", config=tmp_path / "base")
    found = loaded(tmp_path / "out")
    assert torch.equal(_logits(found), _logits(model))
    assert found.config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tokenizer", "x"], "--tokenizer has no effect without --hf"),
        (["--config", "x"], "--config has no effect without --hf"),
        (["--hf", "--force"], "--force has no effect with --hf"),
        (["--hf", "--tied-once"], "--tied-once has no effect with --hf"),
    ],
)
def test_options_of_the_command_that_do_not_fit(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out"), *words]) != 0
    assert message in capsys.readouterr().err


def test_a_run_of_another_model_says_so(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, dict(type=Other))
    with pytest.raises(CheckpointError, match="Other is no model of transformers"):
        runner.export_hugging_face(tmp_path / "out")
    with pytest.raises(ConfigError, match="export_hugging_face.*shard_size.*max_shard_size"):
        runner.export_hugging_face(tmp_path / "out", shard_size="5GB")
    runner.close()
