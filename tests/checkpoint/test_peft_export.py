"""Adapters in checkpoints: written in peft's own format, which peft loads, and merged into their base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flextrain import CheckpointError
from flextrain.cli import main
from flextrain.core.checkpoint import Checkpoint
from flextrain.core.checkpoint.weights import name_in_base, sources_of
from flextrain.testing import WorkerGroup

from ..runner.adapted import LORA, STRATEGIES, adapted, adapted_run, llama

peft = pytest.importorskip("peft", reason="needs pip install flextrain[peft]")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def base_in(folder: Path, model: Any = llama) -> Path:
    torch.manual_seed(7)
    torch.save(model().state_dict(), folder / "base.pth")
    return folder / "base.pth"


def built(base: Path, model: Any = llama) -> Any:
    found = model()
    found.load_state_dict(torch.load(base))
    return found


def trained(folder: Path, lora: dict[str, Any], model: Any = llama, **options: Any) -> torch.Tensor:
    """The outputs of a model after training from the base, whose checkpoint is in the folder."""
    runner, _ = adapted_run(
        folder / "run", "single", 1, model=model, transforms=[lora], load_from=str(folder / "base.pth"), options=options
    )
    try:
        return logits(runner.train())
    finally:
        runner.close()


def gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **changes,
    )
    return transformers.GPT2LMHeadModel(config)


def untied_gpt2() -> Any:
    return gpt2(tie_word_embeddings=False)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (llama, LORA),
    "rslora": (llama, {**LORA, "use_rslora": True, "alpha_pattern": {"v_proj": 3}, "rank_pattern": {"o_proj": 2}}),
    "copies": (llama, {**LORA, "modules_to_save": ["lm_head", "norm"]}),
    "embedding": (llama, {**LORA, "target_modules": ["embed_tokens", "q_proj"]}),
    "named": (llama, {**LORA, "adapter_name": "mine"}),
    "gpt2": (gpt2, {"type": "LoRA", "r": 4, "target_modules": ["c_attn", "c_proj"]}),
    # The head is a Linear and comes last, so that peft's settings say so of all layers; c_proj is square.
    "two_layouts": (untied_gpt2, {"type": "LoRA", "r": 4, "target_modules": ["c_attn", "c_proj", "lm_head"]}),
    "biases": (gpt2, {"type": "LoRA", "r": 4, "target_modules": ["c_attn"], "bias": "all"}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind not in ("plain", "gpt2"))) for kind in KINDS]
)
def test_peft_and_a_model_without_adapters_compute_the_same(tmp_path: Path, kind: str, capsys: Any) -> None:
    model, lora = KINDS[kind]
    base = base_in(tmp_path, model)
    expected = trained(tmp_path, lora, model, exclude_frozen_parameters=True)
    assert (expected - logits(built(base, model))).abs().max() > 1e-3
    checkpoint = str(tmp_path / "run" / "epoch_1")
    assert main(["checkpoint", "export", checkpoint, str(tmp_path / "adapter"), "--peft", "--json"]) == 0
    assert [Path(row["path"]).name for row in json.loads(capsys.readouterr().out)] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(built(base, model), str(tmp_path / "adapter"))
    assert (logits(loaded) - expected).abs().max() < 1e-6
    out = str(tmp_path / "merged.safetensors")
    assert main(["checkpoint", "export", checkpoint, out, "--merge", "--base", str(base), "--tied-once"]) == 0
    plain = model()
    lacking, unexpected = plain.load_state_dict(load_file(out), strict=False)
    assert not unexpected
    assert set(lacking) <= {"lm_head.weight"}
    assert (logits(plain) - expected).abs().max() < 1e-6


def test_the_file_is_that_of_peft(tmp_path: Path) -> None:
    """Names, shapes and settings are those that save_pretrained writes."""
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    base_in(tmp_path)
    trained(tmp_path, lora)
    main(["checkpoint", "export", str(tmp_path / "run" / "epoch_1"), str(tmp_path / "ours"), "--peft"])
    config = peft.LoraConfig(**{key: value for key, value in lora.items() if key != "type"})
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path / "theirs")
    name = "adapter_model.safetensors"
    ours, theirs = load_file(tmp_path / "ours" / name), load_file(tmp_path / "theirs" / name)
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    settings = [json.loads((tmp_path / which / "adapter_config.json").read_text()) for which in ("ours", "theirs")]
    for each in settings:
        each["target_modules"] = sorted(each["target_modules"])
        each.pop("base_model_name_or_path")
        each.pop("auto_mapping")
    assert settings[0] == settings[1]


def test_an_adapter_is_loaded_again(tmp_path: Path) -> None:
    base = base_in(tmp_path)
    expected = trained(tmp_path, LORA, exclude_frozen_parameters=True)
    main(["checkpoint", "export", str(tmp_path / "run" / "epoch_1"), str(tmp_path / "adapter"), "--peft"])
    runner, _ = adapted_run(tmp_path / "again", "single", load_from=str(base), log_level="INFO")
    runner.load_checkpoint(base, strict=True)
    runner.load_checkpoint(tmp_path / "adapter", strict=True)
    assert torch.equal(logits(runner.strategy.module), expected)
    log = next((tmp_path / "again").rglob("*.log")).read_text()
    assert "holds nothing of the base; 21 parameters of the base keep their values" in log


def taken_out(folder: Path, kind: str, **changes: Any) -> Any:
    """A runner with adapters that were taken out of the base."""
    base = base_in(folder)
    lora = {**LORA, "init_lora_weights": kind}
    changes = {
        "transforms": [lora],
        "model": lambda: built(base),
        "options": {"exclude_frozen_parameters": False},
    } | changes
    return adapted_run(folder / f"{kind}_{len([*folder.iterdir()])}", "single", 1, **changes)[0]


def test_an_adapter_that_was_taken_out_of_its_base_has_what_was_left(tmp_path: Path) -> None:
    from flextrain.core.checkpoint.export.peft_adapters import export_adapter

    runner = taken_out(tmp_path, "pissa")
    expected = logits(runner.train())
    export_adapter(Path(runner.work_dir) / "epoch_1", tmp_path / "adapter")
    same = taken_out(tmp_path, "pissa")
    same.load_checkpoint(tmp_path / "adapter", strict=True)
    assert torch.equal(logits(same.strategy.module), expected)
    with pytest.raises(CheckpointError, match='has the base without adapters, and init_lora_weights="pissa" has taken'):
        same.load_checkpoint(tmp_path / "base.pth")
    other, _ = adapted_run(tmp_path / "other", "single", load_from=str(tmp_path / "base.pth"))
    with pytest.raises(CheckpointError, match="with init_lora_weights='pissa', and LoRA has True here, which leaves"):
        other.load_checkpoint(tmp_path / "adapter")
    other.load_checkpoint(Path(runner.work_dir) / "epoch_1")  # which has what was left of the base
    assert torch.equal(logits(other.strategy.module), expected)
    export_adapter(adapted_checkpoint(tmp_path), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="with init_lora_weights=True, and LoRA has 'pissa' here, which leaves"):
        same.load_checkpoint(tmp_path / "plain")


def adapted_checkpoint(folder: Path) -> Path:
    trained(folder, LORA)
    return folder / "run" / "epoch_1"


def test_what_was_taken_out_by_random_numbers_is_not_exported_alone(tmp_path: Path) -> None:
    from flextrain.core.checkpoint.export.peft_adapters import export_adapter, merged
    from flextrain.core.checkpoint.load import reading

    runner = taken_out(tmp_path, "pissa_niter_1")
    expected = logits(runner.train())
    checkpoint = Path(runner.work_dir) / "epoch_1"
    with pytest.raises(CheckpointError, match="peft would not find what was left of the base; export the whole model"):
        export_adapter(checkpoint, tmp_path / "adapter")
    plain = llama()
    with merged(checkpoint) as source, reading(source) as reader:
        plain.load_state_dict({key.removeprefix("model."): reader.read(key) for key in source.entries})
    assert (logits(plain) - expected).abs().max() < 1e-6


class Convolutions(torch.nn.Module):
    """As many channels as adapters have ranks, so that wrong products have the right shape."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Conv2d(4, 4, 1)
        self.wide = torch.nn.Conv2d(4, 3, 3, padding=1, bias=False)
        self.apart = torch.nn.Conv2d(4, 4, 3, groups=2)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.wide(torch.tanh(self.narrow(image)))
        return {"loss": (found - 1).square().mean() + self.apart(image).square().mean()}


def of_convolutions(folder: Path, targets: list[str]) -> Any:
    images = [{"image": torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(seed))} for seed in range(8)]
    loader = dict(dataset=images, batch_size=4, collate_fn="default_collate")
    lora = dict(type="LoRA", r=4, target_modules=targets)
    options = {"exclude_frozen_parameters": False}
    runner, _ = adapted_run(
        folder, "single", 1, model=Convolutions, transforms=[lora], train_dataloader=loader, options=options
    )
    return runner.train()


def test_adapters_of_convolutions_are_merged(tmp_path: Path) -> None:
    from flextrain.core.checkpoint.export.peft_adapters import merged
    from flextrain.core.checkpoint.load import reading

    model = of_convolutions(tmp_path / "run", ["narrow", "wide"])
    image, plain = torch.randn(2, 4, 5, 5), Convolutions()
    before = model(image)["loss"]
    with merged(tmp_path / "run" / "epoch_1") as source, reading(source) as reader:
        plain.load_state_dict({key.removeprefix("model."): reader.read(key) for key in source.entries})
    assert (plain(image)["loss"] - before).abs() < 1e-6
    of_convolutions(tmp_path / "groups", ["apart"])
    told = pytest.raises(CheckpointError, match="apart.base_layer.weight: is of a convolution with groups; such a")
    with merged(tmp_path / "groups" / "epoch_1") as source, reading(source) as reader, told:
        reader.read("model.apart.weight")


def test_a_model_wrapped_by_peft_itself(tmp_path: Path) -> None:
    base = base_in(tmp_path)
    options = {key: value for key, value in LORA.items() if key != "type"}

    def wrapped() -> Any:
        return peft.get_peft_model(llama(), peft.LoraConfig(**options))

    runner, _ = adapted_run(tmp_path / "run", "single", 1, model=wrapped, transforms=None, load_from=str(base))
    expected = logits(runner.train())
    checkpoint = str(tmp_path / "run" / "epoch_1")
    main(["checkpoint", "export", checkpoint, str(tmp_path / "adapter"), "--peft"])
    loaded = peft.PeftModel.from_pretrained(built(base), str(tmp_path / "adapter"))
    assert (logits(loaded) - expected).abs().max() < 1e-6
    main(["checkpoint", "export", checkpoint, str(tmp_path / "merged.pth"), "--merge", "--base", str(base)])
    assert (logits(built(tmp_path / "merged.pth")) - expected).abs().max() < 1e-6


def under(folder: Path, strategy: str) -> None:
    adapted(folder / strategy, strategy, 1, load_from=str(folder / "base.pth"))


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.distributed
def test_of_every_strategy(tmp_path: Path, workers2: WorkerGroup) -> None:
    base = base_in(tmp_path)
    expected = trained(tmp_path, LORA)
    for strategy in STRATEGIES:
        if strategy != "single":
            workers2.run(under, tmp_path, strategy)
            checkpoint = str(tmp_path / strategy / "epoch_1")
            main(["checkpoint", "export", checkpoint, str(tmp_path / f"{strategy}_adapter"), "--peft"])
            loaded = peft.PeftModel.from_pretrained(built(base), str(tmp_path / f"{strategy}_adapter"))
            ours = logits(loaded)
            assert (ours - expected).abs().max() < 2e-4, strategy
            out = tmp_path / f"{strategy}.safetensors"
            main(["checkpoint", "export", checkpoint, str(out), "--merge", "--base", str(base)])
            plain = llama()
            plain.load_state_dict(load_file(out))
            assert (logits(plain) - ours).abs().max() < 1e-6, strategy


def test_what_cannot_be_exported(tmp_path: Path, capsys: Any) -> None:
    base = base_in(tmp_path)
    trained(tmp_path, LORA, exclude_frozen_parameters=True)
    checkpoint = str(tmp_path / "run" / "epoch_1")
    torch.manual_seed(8)
    torch.save(llama().state_dict(), other := str(tmp_path / "other.pth"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "adapter_model.safetensors").touch()
    out = str(tmp_path / "out")
    for arguments, message in (
        ([checkpoint, out, "--peft", "--merge"], "--peft writes the adapter alone and --merge has none in the result"),
        ([checkpoint, out, "--base", str(base)], "--base has no effect without --merge"),
        ([checkpoint, out, "--adapter", "default"], "--adapter has no effect without --peft or --merge"),
        ([checkpoint, out, "--peft", "--tied-once"], "--tied-once has no effect with --peft, leave it out"),
        (
            [checkpoint, out, "--peft", "--adapter", "defautl"],
            'adapter: "defautl" is not allowed, give default, did you mean',
        ),
        ([str(base), out, "--peft"], "has no adapters; give a checkpoint of a run with LoRA in transforms"),
        ([checkpoint, str(tmp_path / "full"), "--peft"], "adapter_model.safetensors: is there already, give another"),
        ([checkpoint, str(base), "--peft"], "base.pth: is a file, give a folder"),
        (
            [checkpoint, out, "--merge"],
            "was saved without 21 frozen parameters, give the weights that the run began with",
        ),
        ([checkpoint, out, "--merge", "--base", other], "is not as in the run that saved"),
    ):
        assert main(["checkpoint", "export", *arguments]) != 0
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_base_of_another_dtype_is_compared_too(tmp_path: Path, capsys: Any, dtype: torch.dtype) -> None:
    base = base_in(tmp_path)
    torch.save({name: value.to(dtype) for name, value in torch.load(base).items()}, base)
    trained(tmp_path, LORA, exclude_frozen_parameters=True)
    torch.manual_seed(8)
    torch.save({name: value.to(dtype) for name, value in llama().state_dict().items()}, tmp_path / "other.pth")
    export = [
        "checkpoint",
        "export",
        str(tmp_path / "run" / "epoch_1"),
        str(tmp_path / "merged.pth"),
        "--merge",
        "--base",
    ]
    assert main([*export, str(tmp_path / "other.pth")]) != 0
    assert "is not as in the run that saved" in capsys.readouterr().err
    assert main([*export, str(base)]) == 0


def test_dora_is_left_to_peft(tmp_path: Path) -> None:
    runner, _ = adapted_run(tmp_path / "run", "single", 1, transforms=[{**LORA, "use_dora": True}])
    expected = logits(runner.train())
    from flextrain.core.checkpoint.export.peft_adapters import export_adapter, merged

    source = Checkpoint.open(tmp_path / "run" / "epoch_1")
    with pytest.raises(CheckpointError, match="an adapter with use_dora is not merged here"), merged(source):
        pass
    export_adapter(source, tmp_path / "adapter")
    base = llama()
    state = runner.strategy.module.state_dict()
    base.load_state_dict({name_in_base(name): value for name, value in state.items() if "lora_" not in name})
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert (logits(loaded) - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    "name, plain",
    [
        ("base_model.model.a.q.base_layer.weight", "a.q.weight"),
        ("a.q.lora_A.default.weight", "a.q.lora_A.weight"),
        ("base_model.model.a.q.lora_A.weight", "a.q.lora_A.weight"),
        ("a.lora_embedding_A.mine", "a.lora_embedding_A"),
        ("head.modules_to_save.default.weight", "head.weight"),
        ("head.original_module.weight", "head.weight"),
        ("llm.base_model.model.a.q.base_layer.weight", "llm.a.q.weight"),
        ("a.weight", "a.weight"),
    ],
)
def test_name_in_bases(name: str, plain: str) -> None:
    assert name_in_base(name) == plain


def test_of_a_copied_module_the_copy_is_what_a_model_without_adapters_gets() -> None:
    there = ["head.original_module.weight", "head.modules_to_save.default.weight"]
    assert sources_of(["head.weight"], there) == {"head.weight": there[1]}
    assert sources_of([there[0]], there) == {there[0]: there[0]}
