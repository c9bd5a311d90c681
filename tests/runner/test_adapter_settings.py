"""What a LoRA's settings mean: the head of a task, settings that change what loaded matrices compute, and quantised bases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import CheckpointError, ConfigError, FlexibleRunner
from flextrain.cli import main

from ..hugging_face.folders import model_of, runner_of, save_folder
from .adapted import LORA, adapted, adapted_run, llama
from .training import refuses

peft = pytest.importorskip("peft", reason="needs pip install flextrain[peft]")
pytest.importorskip("transformers")

# Settings with which the same matrices compute something else


OTHERS: list[dict[str, Any]] = [dict(lora_alpha=80), dict(use_rslora=True), dict(alpha_pattern={"q_proj": 2})]


def refused(call: Any, changed: dict[str, Any]) -> None:
    (key,) = changed
    with refuses(CheckpointError, matches=f"its adapter was trained with {key}=.*, which computes something"):
        call()


@pytest.mark.parametrize("leaves_out", [False, True])
def test_other_settings_are_refused_when_a_run_goes_on(tmp_path: Path, leaves_out: bool) -> None:
    given = dict(options={"exclude_frozen_parameters": leaves_out})
    adapted(tmp_path, "single", 1, **given)
    for changed in OTHERS:
        refused(
            lambda c=changed: adapted(tmp_path, "single", 2, resume=True, transforms=[{**LORA, **c}], **given), changed
        )
    same = {**LORA, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": False}
    assert adapted(tmp_path, "single", 2, resume=True, transforms=[same], **given)[0]


def test_another_rank_is_named_and_not_a_list_of_shapes(tmp_path: Path) -> None:
    adapted(tmp_path, "single", 1)
    for changed in (dict(r=8), dict(rank_pattern={"q_proj": 2})):
        (key,) = changed
        says = f"its adapter was trained with {key}=.*, which makes other shapes; give {key}="
        with refuses(CheckpointError, matches=says):
            adapted(tmp_path, "single", 2, resume=True, transforms=[{**LORA, **changed}])
    with refuses(CheckpointError, "its adapter was trained with r=4, and LoRA has 8 here"):
        runner, _ = adapted_run(tmp_path / "next", "single", transforms=[{**LORA, "r": 8}])
        runner.load_checkpoint(tmp_path / "epoch_1", strict=True)


def test_other_settings_are_refused_where_weights_are_loaded(tmp_path: Path) -> None:
    adapted(tmp_path / "run", "single", 1)
    assert main(["checkpoint", "export", str(tmp_path / "run" / "epoch_1"), str(tmp_path / "peft"), "--peft"]) == 0
    for source in (tmp_path / "run" / "epoch_1", tmp_path / "peft", tmp_path / "peft" / "adapter_model.safetensors"):
        given = dict(load_from=str(source))
        for changed in OTHERS:
            lora = {**LORA, **changed}
            refused(lambda g=given, t=lora: adapted(tmp_path / "next", "single", 1, transforms=[t], **g), changed)
        # Under another name it is the same adapter.
        adapted(tmp_path / "next", "single", 1, transforms=[{**LORA, "adapter_name": "other"}], **given)
    llama().save_pretrained(tmp_path / "base")
    adapted(tmp_path / "next", "single", 1, transforms=[{**LORA, "lora_alpha": 80}], load_from=str(tmp_path / "base"))


def test_a_damaged_description_is_told(tmp_path: Path) -> None:
    adapted(tmp_path / "run", "single", 1)
    assert main(["checkpoint", "export", str(tmp_path / "run" / "epoch_1"), str(tmp_path / "peft"), "--peft"]) == 0
    (tmp_path / "peft" / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="adapter_config.json: is damaged, it is no JSON"):
        adapted(tmp_path / "next", "single", 1, load_from=str(tmp_path / "peft"))


# The head of a task


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"])
def test_the_head_of_a_task_is_trained_as_in_peft(tmp_path: Path, task: str) -> None:
    save_folder(tmp_path / "bert", "bert")
    kind = "TokenClassification" if task == "TOKEN_CLS" else "SequenceClassification"
    model = dict(type=f"transformers:AutoModelFor{kind}", pretrained=str(tmp_path / "bert"), num_labels=2)
    lora = dict(type="LoRA", r=2, target_modules=["query"], task_type=task)
    runner = runner_of(tmp_path / "run", model, transforms=[lora])
    built: Any = runner.model
    found = {name for name, parameter in built.named_parameters() if parameter.requires_grad}
    values = dict(built.named_parameters())
    runner.close()

    import transformers

    plain = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(tmp_path / "bert", num_labels=2)
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type=task)
    expected = peft.get_peft_model(plain, config).named_parameters()
    trained = {name.removeprefix("base_model.model.") for name, parameter in expected if parameter.requires_grad}
    assert found == trained
    assert ("classifier.modules_to_save.default.weight" in found) is task.endswith("CLS")
    if task.endswith("CLS"):
        head = [values[f"classifier.{part}.weight"] for part in ("modules_to_save.default", "original_module")]
        assert torch.equal(*head)


def test_a_task_without_its_head_is_refused(tmp_path: Path) -> None:
    model = dict(type=lambda: model_of("llama"))
    lora = dict(type="LoRA", r=2, target_modules=["q_proj"])
    for task, names in (("SEQ_CLS", '"classifier" or "score"'), ("QUESTION_ANS", '"qa_outputs"')):
        with pytest.raises(
            ConfigError, match=f'task_type: "{task}" trains the module {names}, which the model does not'
        ):
            runner_of(tmp_path, model, transforms=[{**lora, "task_type": task}]).model  # noqa: B018 - builds it
        copied = {**lora, "task_type": task, "modules_to_save": ["lm_head"]}
        runner_of(tmp_path, model, transforms=[copied]).model  # noqa: B018 - builds it
    with pytest.raises(ConfigError, match=r"transforms\[0\]: Invalid task type: 'SEQ_CLSS'"):
        runner_of(tmp_path, model, transforms=[{**lora, "task_type": "SEQ_CLSS"}])


# Quantised bases, and a configuration of peft


def test_quantised_weights_have_to_be_left_out(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    transforms: list[Any] = [
        dict(type="Quantize", config="Int8WeightOnlyConfig", but=["lm_head"]),
        dict(type="LoRA", r=2, target_modules=["q_proj"]),
    ]
    saves: dict[str, Any] = dict(options={"exclude_frozen_parameters": None})
    with refuses(ConfigError, matches=r"transforms\[0\]: Quantize, .*exclude_frozen_parameters=True\)$"):
        adapted_run(tmp_path, "single", model=llama(), transforms=transforms, **saves)
    model = llama()
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(ConfigError, match=r"model.model.layers.*weight: is quantised, .*exclude_frozen_parameters"):
        adapted_run(tmp_path, "single", model=model, transforms=transforms[1:], **saves)

    pytest.importorskip("peft", minversion="0.20")  # earlier ones want the quantiser of transformers

    def own(model: Any) -> None:
        torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())

    with pytest.raises(CheckpointError, match=r"weight: is quantised \(Int8Tensor\), and checkpoints .*exclude_frozen"):
        adapted(tmp_path, "single", 1, model=llama(), transforms=[own, transforms[1]], **saves)
    adapted_run(tmp_path, "single", model=llama(), transforms=transforms, default_hooks=dict(checkpoint=None), **saves)
    torch.manual_seed(0)
    adapted(tmp_path, "single", 1, model=llama(), transforms=transforms)
    torch.manual_seed(0)
    assert adapted(tmp_path, "single", 2, model=llama(), transforms=transforms, resume=True)[0]


def test_a_configuration_of_peft_is_a_transform(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"], use_rslora=True)
    given = {**LORA, "lora_alpha": 16, "use_rslora": True}
    expected = adapted(tmp_path / "dict", "single", 1, transforms=[given])[0]
    assert adapted(tmp_path / "object", "single", 1, transforms=[config])[0] == expected
    assert main(["checkpoint", "export", str(tmp_path / "object" / "epoch_1"), str(tmp_path / "peft"), "--peft"]) == 0
    saved = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["use_rslora"]) == (4, 16, True)
    with pytest.raises(ConfigError, match=r"transforms\[0\]: IA3Config is not allowed, give a function") as caught:
        FlexibleRunner(model=llama, transforms=[peft.IA3Config()])
    assert len(str(caught.value)) < 120
