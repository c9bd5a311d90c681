"""Training with LoRA equals one device under every strategy, saves little, resumes anywhere, and starts from a base."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain import CheckpointError, ConfigError
from flextrain.core.checkpoint import Checkpoint
from flextrain.core.comm.agreement import told_by_rank_0
from flextrain.testing import WorkerGroup

from .adapted import LORA, STRATEGIES, adapted, adapted_run, llama, means
from .training import log_lines

peft = pytest.importorskip("peft", reason="needs pip install flextrain[peft]")
pytest.importorskip("transformers")

MARKS: dict[str, Any] = {
    "fsdp": (),
    "tp2": (),
    **dict.fromkeys(("ddp", "pp2"), pytest.mark.full),
    **dict.fromkeys(("zero1", "zero2", "zero3"), (pytest.mark.deepspeed, pytest.mark.full)),
}
SEVERAL = [
    pytest.param(name, marks=[pytest.mark.distributed, *_marks])
    for name, marks in MARKS.items()
    for _marks in [marks if isinstance(marks, tuple) else (marks,)]
]
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, *adapted(folder, "single", options={"exclude_frozen_parameters": True})


@pytest.mark.parametrize("strategy", SEVERAL)
def test_losses_and_adapters_are_those_of_one_device(
    tmp_path: Path, workers2: WorkerGroup, alone: Any, strategy: str
) -> None:
    _, losses, adapters = alone
    results = workers2.run(adapted, tmp_path, strategy)
    assert means(results) == pytest.approx(losses, abs=TOLERANCE)
    found = {name: tensor for _, own in results for name, tensor in own.items()}
    assert found.keys() == adapters.keys()
    for name, tensor in adapters.items():
        assert tensor.abs().sum() > 0
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)
    saved = Checkpoint.open(tmp_path / "epoch_2")
    assert {key for key in saved.entries if key.startswith("model.")} == {f"model.{name}" for name in adapters}
    assert all(
        "lora_" in key for key in (*saved.entries, *saved.values) if key.startswith(("optim.state.", "optim.group."))
    )
    assert "model.layers.0.mlp.up_proj.weight" in saved.values["frozen"]


PAIRS = list(itertools.product(STRATEGIES, STRATEGIES))


def first_epoch(folder: Path, strategy: str) -> None:
    adapted(folder / strategy, strategy, 1)


def second_epochs(folder: Path, saved: str) -> dict[str, list[float]]:
    """The losses of the second epoch under every strategy of several processes, from what one has saved."""
    path = str(folder / saved / "epoch_1")
    return {
        name: adapted(folder / f"{saved}_{name}", name, 2, resume=path)[0] for name in STRATEGIES if name != "single"
    }


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.distributed
def test_every_strategy_goes_on_from_every_other(tmp_path: Path, workers2: WorkerGroup, alone: Any) -> None:
    expected = alone[1][4:]
    first_epoch(tmp_path, "single")
    for saved in STRATEGIES:
        if saved != "single":
            workers2.run(first_epoch, tmp_path, saved)
        results = workers2.run(second_epochs, tmp_path, saved)
        for name in results[0]:
            both = means([(result[name], None) for result in results])
            assert both == pytest.approx(expected, abs=5e-6), (saved, name)
        found, _ = adapted(tmp_path / f"{saved}_single", "single", 2, resume=str(tmp_path / saved / "epoch_1"))
        assert found == pytest.approx(expected, abs=5e-6), (saved, "single")


# From a base


def save_base(path: Path, seed: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state: dict[str, torch.Tensor] = llama().state_dict()
    torch.save(state, path)
    return state


def from_base(folder: Path, strategy: str, **changes: Any) -> tuple[list[float], Any]:
    return adapted(folder, strategy, 1, load_from=str(folder.parent / "base.pth"), **changes)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy, options",
    [
        ("fsdp", {"skip_init_weights": True}),
        pytest.param("fsdp", {}, marks=pytest.mark.full),
        pytest.param("ddp", {}, marks=pytest.mark.full),
        pytest.param("tp2", {"skip_init_weights": True}, marks=pytest.mark.full),
        pytest.param("pp2", {}, marks=pytest.mark.full),
        pytest.param("zero1", {}, marks=[pytest.mark.full, pytest.mark.deepspeed]),
        pytest.param("zero3", {}, marks=[pytest.mark.full, pytest.mark.deepspeed]),
    ],
)
def test_a_base_is_loaded_under_the_names_of_the_layers_inside(
    tmp_path: Path, workers2: WorkerGroup, strategy: str, options: dict[str, Any]
) -> None:
    save_base(tmp_path / "base.pth")
    expected, _ = from_base(tmp_path / "alone", "single")
    other, _ = adapted(tmp_path / "other", "single", 1)
    assert expected[0] != pytest.approx(other[0], abs=1e-3)
    assert means(workers2.run(from_base, tmp_path / strategy, strategy, options=options)) == pytest.approx(
        expected, abs=TOLERANCE
    )


def test_a_base_is_told_apart_from_a_file_that_does_not_fit(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base.pth")
    runner, _ = adapted_run(tmp_path / "run", "single", load_from=str(tmp_path / "base.pth"), log_level="INFO")
    runner.train()
    log = next((tmp_path / "run").rglob("*.log")).read_text()
    assert "holds nothing of adapters; 12 parameters of adapters keep their values" in log
    assert "does not fit" not in log
    module = runner.strategy.module
    inside = module.model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(inside, base["model.layers.0.self_attn.q_proj.weight"])
    del base["model.layers.0.self_attn.q_proj.weight"]
    torch.save(base, tmp_path / "less.pth")
    again, _ = adapted_run(tmp_path / "again", "single")
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.0\.self_attn\.q_proj\.base_layer\.weight"):
        again.load_checkpoint(tmp_path / "less.pth", strict=True)
    again.load_checkpoint(tmp_path / "base.pth", strict=True)


def test_a_copied_module_gets_the_base_twice(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base.pth")
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    runner, _ = adapted_run(tmp_path / "run", "single", transforms=[lora], load_from=str(tmp_path / "base.pth"))
    runner.load_checkpoint(tmp_path / "base.pth", strict=True)
    head = runner.strategy.module.lm_head
    assert torch.equal(head.original_module.weight, base["lm_head.weight"])
    assert torch.equal(head.modules_to_save["default"].weight, base["lm_head.weight"])


def copied_under_fsdp(folder: Path) -> tuple[list[float], Any]:
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    return from_base(folder, "fsdp", transforms=[lora], options={"skip_init_weights": True})


@pytest.mark.full
@pytest.mark.distributed
def test_a_copied_module_that_was_built_without_values_is_loaded(tmp_path: Path, workers2: WorkerGroup) -> None:
    save_base(tmp_path / "base.pth")
    expected, _ = from_base(tmp_path / "alone", "single", transforms=[{**LORA, "modules_to_save": ["lm_head"]}])
    assert means(workers2.run(copied_under_fsdp, tmp_path / "fsdp")) == pytest.approx(expected, abs=TOLERANCE)


# A run that goes on


def test_a_resumed_run_gets_the_base_first(tmp_path: Path) -> None:
    save_base(tmp_path / "base.pth")
    given = dict(load_from=str(tmp_path / "base.pth"))
    whole, _ = adapted(tmp_path / "whole", "single", 2, **given)
    adapted(tmp_path / "run", "single", 1, **given)
    for resume in (True, str(tmp_path / "run" / "epoch_1")):
        again, _ = adapted(tmp_path / "run", "single", 2, resume=resume, randomness=dict(seed=5), **given)
        assert again == whole[4:]
    fresh, _ = adapted(tmp_path / "fresh", "single", 2, resume=True, **given)
    assert fresh == whole
    save_base(tmp_path / "base.pth", seed=8)
    with pytest.raises(CheckpointError, match="not as in that run; build the model with the same weights or seed"):
        adapted(tmp_path / "run", "single", 2, resume=True, **given)


def test_what_comes_before_training_has_the_base_too(tmp_path: Path) -> None:
    state = save_base(tmp_path / "base.pth")
    given = dict(load_from=str(tmp_path / "base.pth"))
    _, trained = adapted(tmp_path / "run", "single", 1, **given)
    runner, _ = adapted_run(tmp_path / "run", "single", 2, resume=True, randomness=dict(seed=5), **given)
    runner.generate(torch.tensor([[3, 4]]), max_new_tokens=1, pad_token_id=0)
    found = {name.replace("base_layer.", ""): value for name, value in runner.strategy.module.state_dict().items()}
    runner.close()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert all(torch.equal(found[name], value) for name, value in trained.items())


def said_of_the_base(folder: Path, path: Path, strategy: str, seed: int, strict: bool) -> str:
    """What rank 0 says first when a checkpoint of adapters is loaded into a model with the base of a seed."""
    given: dict[str, Any] = dict(options={"exclude_frozen_parameters": None}, log_level="INFO")
    runner, _ = adapted_run(folder, strategy, randomness=dict(seed=seed), **given)
    with runner, log_lines(logging.INFO) as lines:
        try:
            runner.load_checkpoint(path, strict=strict)
        except CheckpointError as error:
            lines.append(str(error))
        return told_by_rank_0(lambda: next(line for line in lines if line.startswith(f"{path}: ")))


def check_what_is_said(folder: Path, path: Path, strategy: str) -> None:
    for strict in (False, True):
        assert said_of_the_base(folder, path, strategy, 3, strict).startswith(f"{path}: holds nothing of the base; ")
        wrong = said_of_the_base(folder, path, strategy, 5, strict)
        assert wrong.startswith(f"{path}: was saved without its frozen parameters, and "), wrong
        assert " and 15 others are not as in that run" in wrong


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        *(pytest.param(name, marks=[pytest.mark.distributed, pytest.mark.full]) for name in ("fsdp", "tp2", "pp2")),
    ],
)
def test_a_checkpoint_of_adapters_knows_its_base(tmp_path: Path, request: Any, strategy: str) -> None:
    adapted(tmp_path / "run", "single", 1)
    path = tmp_path / "run" / "epoch_1"
    if strategy == "single":
        check_what_is_said(tmp_path / "again", path, strategy)
    else:
        request.getfixturevalue("workers2").run(check_what_is_said, tmp_path / "again", path, strategy)


def test_a_restart_gets_the_base_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path / "base.pth")
    given = dict(load_from=str(tmp_path / "base.pth"))
    whole, _ = adapted(tmp_path / "whole", "single", 2, **given)
    monkeypatch.setenv("FLEXTRAIN_JOB", "lora")
    adapted(tmp_path / "run", "single", 1, **given)
    monkeypatch.setenv("FLEXTRAIN_RESUME", "1")
    again, _ = adapted(tmp_path / "run", "single", 2, randomness=dict(seed=5), **given)
    assert again == whole[4:]


def test_a_checkpoint_and_a_base_need_that_something_is_left_out(tmp_path: Path) -> None:
    save_base(tmp_path / "base.pth")
    with pytest.raises(ConfigError, match="resume: names a checkpoint and load_from another, give one of them"):
        adapted_run(
            tmp_path / "run",
            "single",
            load_from=str(tmp_path / "base.pth"),
            resume=str(tmp_path),
            options={"exclude_frozen_parameters": False},
        )


@pytest.mark.parametrize("given, advises", [(None, True), (False, False), (True, False)])
def test_advice_to_leave_frozen_parameters_out(tmp_path: Path, given: bool | None, advises: bool) -> None:
    adapted(tmp_path, "single", 1, options={"exclude_frozen_parameters": given}, log_level="INFO")
    log = next(tmp_path.rglob("*.log")).read_text()
    assert (" % of the parameters are frozen, and in every checkpoint" in log) is advises


# From a folder of transformers


def save_base_folder(folder: Path) -> None:
    """The base as a file, and as a folder of transformers."""
    model = llama()
    model.load_state_dict(save_base(folder / "base.pth"))
    model.save_pretrained(folder / "folder")


def from_folder(folder: Path, strategy: str, lora: dict[str, Any]) -> tuple[list[float], Any]:
    model = dict(type="transformers:AutoModelForCausalLM", pretrained=str(folder.parent / "folder"))
    return adapted(folder, strategy, 1, model=model, transforms=[lora])


@pytest.mark.parametrize("copies", [[], ["lm_head"]])
def test_adapters_on_a_model_from_a_folder(tmp_path: Path, copies: list[str]) -> None:
    save_base_folder(tmp_path)
    lora = {**LORA, "modules_to_save": copies or None}
    expected, _ = from_base(tmp_path / "base", "single", transforms=[lora])
    found, _ = from_folder(tmp_path / "single", "single", lora)
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", "tp2", "ddp", pytest.param("zero3", marks=pytest.mark.deepspeed)])
def test_adapters_on_a_divided_model_from_a_folder(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    save_base_folder(tmp_path)
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    expected, _ = from_base(tmp_path / "base", "single", transforms=[lora])
    assert means(workers2.run(from_folder, tmp_path / strategy, strategy, lora)) == pytest.approx(
        expected, abs=TOLERANCE
    )


@pytest.mark.parametrize("transform", [dict(type="Quantize"), {**LORA, "trainable_token_indices": [0, 1]}])
def test_what_needs_values_waits_for_no_folder(tmp_path: Path, transform: dict[str, Any]) -> None:
    pytest.importorskip("torchao")
    llama().save_pretrained(tmp_path / "folder")
    message = rf"transforms\[0\]: {transform['type']}.* computes with the model's values, which are read from"
    with pytest.raises(ConfigError, match=message):
        from_folder(tmp_path / "run", "single", transform)


def test_a_norm_of_ones_own_takes_over_what_is_read_later(tmp_path: Path) -> None:
    class Norm(torch.nn.Module):
        def __init__(self, other: Any, copies: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(other.weight.detach().clone()) if copies else other.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def replace(model: Any, copies: bool = False) -> None:
        model.model.norm = Norm(model.model.norm, copies)

    state = save_base(tmp_path / "base.pth")
    state["model.norm.weight"] = torch.rand(32)
    model = llama()
    model.load_state_dict(state)
    model.save_pretrained(tmp_path / "folder")
    given = dict(type="transformers:AutoModelForCausalLM", pretrained=str(tmp_path / "folder"))
    runner, _ = adapted_run(tmp_path / "run", "single", 1, model=given, transforms=[replace])
    runner.model  # noqa: B018 - builds it
    assert torch.equal(runner.strategy.module.model.norm.weight, state["model.norm.weight"])
    runner, _ = adapted_run(
        tmp_path / "copy", "single", 1, model=given, transforms=[lambda model: replace(model, True)]
    )
    with pytest.raises(
        ConfigError, match=r"replaces model\.norm\.weight, whose values are read from model\.pretrained"
    ):
        runner.model  # noqa: B018 - builds it
