"""Models of transformers begin with the weights of a folder, under every strategy, each process with its own part."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from flextrain import BaseModel
from flextrain.core.base.errors import ConfigError
from flextrain.core.checkpoint.safetensors_file import Fetch
from flextrain.testing import WorkerGroup

from .folders import runner_of, save_folder, whole_weights

CAUSAL = "transformers:AutoModelForCausalLM"
CLASSIFIER = "transformers:LlamaForSequenceClassification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a Llama in bfloat16, in several files."""
    path = tmp_path_factory.mktemp("models") / "llama"
    save_folder(path, shard="20KB", dtype=torch.bfloat16)
    return path


def check(work_dir: Path, model: Mapping[str, Any], strategy: Any) -> tuple[dict[str, Any], int]:
    """Build the model, train it with a learning rate of 0; return its weights and how many elements were read."""
    read = 0
    fill = Fetch.fill

    def counting(self: Any, name: str, slices: Any, target: Any) -> None:
        nonlocal read
        read += target.numel()
        fill(self, name, slices, target)

    Fetch.fill = counting  # type: ignore[method-assign]
    try:
        runner = runner_of(work_dir, model, strategy=strategy)
        runner.model  # noqa: B018 - built here
        weights = whole_weights(runner)
    finally:
        Fetch.fill = fill  # type: ignore[method-assign]
    runner.train()
    runner.close()
    return weights, read


def expected(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()  # type: ignore[no-any-return]


def test_one_device_has_the_folders_weights_in_float32(tmp_path: Path, folder: Path) -> None:
    weights, _ = check(tmp_path, dict(type=CAUSAL, pretrained=folder), "single")
    wanted = expected(folder)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="fsdp", wrap="blocks"), id="fsdp"),
        pytest.param("zero3", id="zero3"),
        pytest.param("ddp", id="ddp", marks=pytest.mark.full),
        pytest.param("zero1", id="zero1", marks=pytest.mark.full),
        pytest.param("zero2", id="zero2", marks=pytest.mark.full),
        pytest.param(dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
        pytest.param(dict(type="mesh", pp=2), id="pp2"),
    ],
)
def test_every_process_reads_its_own_part(workers2: WorkerGroup, tmp_path: Path, folder: Path, strategy: Any) -> None:
    if str(strategy).startswith("zero"):
        pytest.importorskip("deepspeed")
    wanted = expected(folder)
    alone = [check(tmp_path / kind[-9:], _of(kind, folder), "single")[0] for kind in (CAUSAL, CLASSIFIER)]
    for reference, kind in zip(alone, (CAUSAL, CLASSIFIER), strict=True):
        found = workers2.run(check, tmp_path / f"run{kind[-9:]}", _of(kind, folder), strategy)
        assert {name for weights, _ in found for name in weights} == reference.keys()
        for weights, _ in found:
            # A new head has the same random values as on one device too.
            assert all(torch.equal(weights[name], reference[name]) for name in weights)
        if kind == CAUSAL and strategy not in ("ddp", "zero1", "zero2"):
            size = sum(tensor.numel() for tensor in wanted.values())
            assert max(read for _, read in found) < 0.65 * size
            assert sum(read for _, read in found) < 1.1 * size


def _of(kind: str, folder: Path) -> dict[str, Any]:
    return dict(type=kind, pretrained=str(folder), **(dict(num_labels=2) if kind == CLASSIFIER else {}))


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("strategy", [dict(type="fsdp", wrap="blocks"), "zero3"], ids=["fsdp", "zero3"])
def test_names_with_other_prefixes_and_tied_heads(
    workers2: WorkerGroup, tmp_path: Path, kind: str, strategy: Any
) -> None:
    save_folder(tmp_path / kind, kind)
    auto = CAUSAL if kind == "gpt2" else "transformers:AutoModelForSequenceClassification"
    model = dict(type=auto, pretrained=str(tmp_path / kind))
    reference, _ = check(tmp_path / "single", model, "single")
    for weights, _ in workers2.run(check, tmp_path / "both", model, strategy):
        assert all(torch.equal(weights[name], reference[name]) for name in reference)


def test_what_is_new_and_what_is_not_used_is_told(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(tmp_path, dict(type=CLASSIFIER, pretrained=folder, num_labels=2), log_level="INFO")
    runner.model  # noqa: B018 - built here
    assert "does not have score.weight, which start with new random values" in caplog.text
    assert "lm_head.weight is not used, LlamaForSequenceClassification has no such tensor" in caplog.text
    assert "from bfloat16 to float32 (model.dtype)" in caplog.text
    head = dict(runner.strategy.module.named_parameters())["score.weight"]
    assert 0.005 < head.std() < 0.05  # initializer_range is 0.02
    runner.close()


def test_settings_reach_the_configuration(tmp_path: Path, folder: Path) -> None:
    settings = dict(attn_implementation="eager", attention_dropout=0.25, dtype="auto")
    runner = runner_of(tmp_path, dict(type=CAUSAL, pretrained=folder, **settings))
    runner.model  # noqa: B018 - built here
    config = runner.strategy.module.config
    assert (config._attn_implementation, config.attention_dropout) == ("eager", 0.25)
    assert next(runner.strategy.module.parameters()).dtype == torch.bfloat16
    runner.close()


def test_a_head_of_another_size_is_initialised_if_asked(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dict(type=CAUSAL, pretrained=folder, vocab_size=50)
    runner = runner_of(tmp_path / "a", model)
    with pytest.raises(
        ConfigError,
        match=r"model\.model\.embed_tokens\.weight: has shape \(50, 32\), and \(96, 32\) in .*, because model\.vocab_size does not .* "
        r"resize_token_embeddings .* draws every row anew",
    ):
        runner.model  # noqa: B018
    runner.close()
    runner = runner_of(tmp_path / "b", {**model, "ignore_mismatched_sizes": True})
    assert runner.model.model.embed_tokens.weight.isfinite().all()  # type: ignore[union-attr]
    assert ": has other shapes of " in caplog.text
    assert "does not have" not in caplog.text
    runner.close()


def test_a_head_that_was_trained_apart_is_not_tied_without_a_word(tmp_path: Path, folder: Path) -> None:
    model = dict(type=CAUSAL, pretrained=folder)
    runner = runner_of(tmp_path, model | dict(tie_word_embeddings=True))
    with pytest.raises(ConfigError) as raised:
        runner.model  # noqa: B018
    assert str(raised.value) == (
        f"model.pretrained: {folder} has other values of lm_head.weight than of model.embed_tokens.weight, and AutoModelForCausalLM ties "
        "them; give model.tie_word_embeddings=False to have both"
    )
    runner.close()


def _changed(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": (dict(pretrained="org/missing-model"), "model.pretrained: org/missing-model is no folder, and no model of the"),
    "no path": (dict(pretrained="./missing"), r"model.pretrained: ./missing is no folder$"),
    "empty": (dict(pretrained=""), "model.pretrained: an empty name|has no config.json"),
    "number": (dict(pretrained=3), "model.pretrained: 3 is not allowed, give a folder"),
    "left out": (dict(), 'model.pretrained: missing, AutoModelForCausalLM needs the folder of a model, pretrained="folder"'),
    "URL": (dict(pretrained="gs://bucket/model"), "model.pretrained: gs://bucket/model is a URL, download the model"),
    "hub": (dict(pretrained="gpt2-that-nobody-has"), "is no folder, .* download it first: hf download gpt2-that-nobody-has$"),
    "misspelt": (dict(pretrained="lama"), r'lama is no folder, and .*: hf download lama; did you mean "llama"\?$'),
    "misspelt path": (dict(pretrained="{folder}s"), r'/llamas is no folder; did you mean "/.*/llama"\?$'),
    "key of from_pretrained": (dict(pretrained_model_name_or_path="{folder}"), "pretrained_model_name_or_path: give pretrained="),
    "from_pretrained": (dict(type=f"{CAUSAL}.from_pretrained"), "model.type: from_pretrained reads all weights in every process"),
    "short name": (dict(type="AutoModelForCausalLM"), 'no known model, did you mean "transformers:AutoModelForCausalLM"'),
    "trust": (dict(trust_remote_code="no"), "model.trust_remote_code: 'no' is not allowed, give True or False"),
    "mismatched": (dict(ignore_mismatched_sizes=1), "model.ignore_mismatched_sizes: 1 is not allowed, give True or False"),
    "transforms": (dict(transforms=["LoRA"]), "model.transforms: is an argument of the runner"),
    "file": (dict(pretrained="{folder}/config.json"), "config.json is a file, give the folder"),
    "no config": (dict(pretrained="{bare}"), "has no config.json, give a folder of save_pretrained"),
    "adapter": (dict(pretrained="{adapter}"), "is an adapter of peft; give the folder of its base"),
    "no weights": (dict(pretrained="{hollow}"), "has no weights, neither model.safetensors nor"),
    "unknown": (dict(attn_implementaton="eager"), 'no such setting, did you mean "attn_implementation"'),
    "dtype": (dict(dtype="float33"), 'model.dtype: "float33" is not allowed'),
    "integers": (dict(dtype=torch.int64), "give a floating-point dtype"),
    "torch_dtype": (dict(torch_dtype="float32"), "model.torch_dtype: give dtype"),
    "device_map": (dict(device_map="auto"), "model.device_map: the strategy places the model"),
    "load_in_8bit": (dict(load_in_8bit=True), "model.load_in_8bit: a quantised model"),
    "other task": (dict(type="transformers:AutoModelForObjectDetection"), "AutoModelForObjectDetection has no model for llama"),
    "other class": (dict(type="transformers:GPT2LMHeadModel"), "model.type: GPT2LMHeadModel is a gpt2, .* holds a llama"),
    "quantised": (dict(pretrained="{quantised}"), "holds quantised weights"),
    "damaged": (dict(pretrained="{damaged}"), "the configuration of .* cannot be read"),
    "preprocessor": (dict(data_preprocessor=dict(type="BaseDataPreprocessor")), "data_preprocessor: AutoModelForCausalLM takes none"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configurations_are_told_in_a_line(
    tmp_path: Path, folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, message = WRONG[case]
    monkeypatch.chdir(folder.parent)
    folders = {name: tmp_path / name for name in ("bare", "adapter", "hollow", "quantised", "damaged")}
    for path in folders.values():
        path.mkdir()
    (folders["adapter"] / "adapter_config.json").write_text("{}")
    for name in ("hollow", "quantised", "damaged"):
        shutil.copy(folder / "config.json", folders[name])
    for name in ("quantised", "damaged"):
        for file in folder.glob("model*"):
            shutil.copy(file, folders[name])
    _changed(folders["quantised"], quantization_config=dict(quant_method="bitsandbytes", load_in_8bit=True))
    (folders["damaged"] / "config.json").write_text("{")
    model = {"type": CAUSAL, "pretrained": str(folder), **given}
    if isinstance(model["pretrained"], str):
        model["pretrained"] = model["pretrained"].format(folder=folder, **folders)
    if case == "left out":
        del model["pretrained"]
    with pytest.raises(ConfigError, match=message) as raised:
        runner_of(tmp_path / "run", model)
    assert "\n" not in str(raised.value)


def test_an_impossible_setting_is_told_when_the_model_is_built(tmp_path: Path, folder: Path) -> None:
    runner = runner_of(tmp_path, dict(type=CAUSAL, pretrained=folder, attn_implementation="nonsense"))
    with pytest.raises(ConfigError, match="model: ValueError, .*nonsense") as raised:
        runner.model  # noqa: B018
    assert "\n" not in str(raised.value)
    runner.close()


def test_older_versions_of_transformers_are_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.3")
    with pytest.raises(ConfigError) as raised:
        runner_of(tmp_path, dict(type=CAUSAL, pretrained=folder))
    assert str(raised.value) == "model.pretrained: needs transformers 5.0.0 or newer, 4.57.3 is installed"


def reads_in_a_function(folder: Path, work_dir: Path) -> str:
    import transformers

    runner = runner_of(
        work_dir, dict(type=lambda: transformers.AutoModelForCausalLM.from_pretrained(folder)), strategy="zero3"
    )
    with pytest.raises(ConfigError) as raised:
        runner.model  # noqa: B018 - built here
    runner.close()
    return str(raised.value)


def test_from_pretrained_in_a_function_that_builds_a_model_around_it(tmp_path: Path, folder: Path) -> None:
    """Some are built where there are no values, and would fail when they are made."""
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained
    runner = runner_of(tmp_path, dict(type=lambda: beside(read(folder))), strategy="fsdp")
    with pytest.raises(ConfigError, match=r'^model: from_pretrained reads .* pretrained="folder"\), with transforms='):
        runner.model  # noqa: B018 - built here
    runner.close()
    assert expected(folder), "it reads again afterwards"


def test_a_function_may_read_where_a_model_is_built_with_its_values(tmp_path: Path, folder: Path) -> None:
    import transformers

    read = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    runner = runner_of(tmp_path, dict(type=read), strategy="single")
    assert torch.equal(next(runner.model.parameters()), next(read().parameters()))
    runner.close()


class Beside(BaseModel):
    """A model and a frozen copy of it, in one."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.reference = copy.deepcopy(policy).requires_grad_(False)

    def forward(self, mode: str = "tensor", **batch: Any) -> Any:
        with torch.no_grad():
            theirs = self.reference(**batch).loss
        return dict(loss=(self.policy(**batch).loss - theirs).square())


def beside(policy: Any) -> Beside:
    return Beside(policy)


def check_beside(work_dir: Path, folder: Path, strategy: Any) -> list[str]:
    """The names of this process's parameters that are not as in the folder."""
    runner = runner_of(
        work_dir, dict(type=CAUSAL, pretrained=str(folder)), strategy=strategy, transforms=[beside], lr=0.1
    )
    runner.model  # noqa: B018 - built here
    weights, wanted = whole_weights(runner), expected(folder)
    runner.train()
    runner.close()
    assert {name.partition(".")[0] for name in weights} == {"policy", "reference"}
    return [name for name, tensor in weights.items() if not torch.equal(tensor, wanted[name.partition(".")[2]])]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(dict(type="fsdp", wrap="blocks"), id="fsdp"),
        pytest.param("zero3", id="zero3", marks=pytest.mark.full),
        pytest.param(dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
    ],
)
def test_a_copy_in_a_transform_has_the_folders_weights(
    workers2: WorkerGroup, tmp_path: Path, folder: Path, strategy: Any
) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    assert workers2.run(check_beside, tmp_path, folder, strategy) == [[], []]


@pytest.mark.full
@pytest.mark.distributed
def test_from_pretrained_in_a_function_is_refused_in_a_line(
    workers2: WorkerGroup, tmp_path: Path, folder: Path
) -> None:
    """A model that is built without values cannot read them."""
    pytest.importorskip("deepspeed")
    for line in workers2.run(reads_in_a_function, folder, tmp_path):
        assert line.startswith(
            "model: from_pretrained reads weights, and this strategy builds a model without them; give "
        )
