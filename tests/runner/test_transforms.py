"""transforms=[...]: changes of a model before it is distributed, under every strategy, and what is said about them."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flextrain import TRANSFORMS, BaseModel, ConfigError, FlexibleRunner, StrategyError
from flextrain.cli import main
from flextrain.runner.hooks import EMAHook
from flextrain.runner.transforms.torchao import _Layers as Layers
from flextrain.testing import WorkerGroup
from flextrain.testing.sessions import whole_model

from .training import Net, Samples, make_runner, refuses

torchao = "torchao"


class Norm(nn.Module):
    """A norm of one's own, with the parameters of another."""

    def __init__(self, other: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias = other.weight, other.bias

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight + self.bias


class CopiedNorm(Norm):
    """The same, with copies of the values."""

    def __init__(self, other: nn.LayerNorm) -> None:
        super().__init__(other)
        self.weight, self.bias = (nn.Parameter(torch.empty_like(each)) for each in (other.weight, other.bias))
        with torch.no_grad():
            self.weight.copy_(other.weight)
            self.bias.copy_(other.bias)


class RandomNorm(nn.LayerNorm):
    """Its values tell whether they were drawn."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)
        nn.init.zeros_(self.bias)


class WithNorms(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), RandomNorm(width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(2)))
        self.last = nn.Linear(width, 2)

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.blocks(self.norm(self.first(x)).tanh())
        return {"loss": nn.functional.cross_entropy(self.last(hidden), y)}


def replace_norms(model: nn.Module, kind: type[Norm] = Norm) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, kind(child))


@TRANSFORMS.register_module()
def add_head(model: nn.Module, width: int = 4) -> nn.Module:
    return WithHead(model, width)


class WithHead(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.extra = inner, nn.Linear(6, width)

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(index, x, y)["loss"] + self.extra(x).square().mean()}


STRATEGIES: dict[str, dict[str, Any]] = {
    "single": dict(type="SingleDeviceStrategy"),
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy"),
    "zero2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
    "tp2": dict(type="MeshStrategy", tp=2, plan={"first": "colwise_gathered", "blocks.*.0": "colwise_gathered"}),
    "pp2": dict(type="MeshStrategy", pp=2),
}
CHANGES: list[Any] = [
    partial(replace_norms, kind=CopiedNorm),
    dict(type="add_head", width=3),
    dict(type="Freeze", patterns=["inner.first", "*.norm"], but="*.bias"),
]


def changed_run(folder: Path, under: str, transforms: Any, **changes: Any) -> FlexibleRunner:
    whole = under in ("single", "tp2", "pp2")
    arguments: dict[str, Any] = dict(
        model=WithNorms,
        strategy={**STRATEGIES[under], "device": "cpu"},
        train_dataloader=dict(
            dataset=Samples(16),
            batch_size=8 if whole else 4,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        train_cfg=dict(max_epochs=2),
        transforms=transforms,
        randomness=dict(seed=3),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.02)),
    )
    return make_runner(folder, **{**arguments, **changes})


def changed(folder: Path, under: str, transforms: Any = CHANGES, **changes: Any) -> dict[str, Tensor]:
    runner = changed_run(folder, under, transforms, **changes)
    try:
        runner.train()
        return dict(whole_model(runner.strategy))
    finally:
        runner.close()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("zero3", marks=pytest.mark.deepspeed),
        pytest.param("ddp", marks=pytest.mark.full),
        pytest.param("zero2", marks=[pytest.mark.full, pytest.mark.deepspeed]),
    ],
)
def test_every_strategy_changes_a_model_alike(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    # ZeRO-3 has divided the values by then, so that there is nothing to copy.
    changes = [replace_norms, *CHANGES[1:]] if strategy == "zero3" else CHANGES
    expected = changed(tmp_path / "alone", "single", changes)
    for found in workers2.run(changed, tmp_path / strategy, strategy, changes):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)


def test_in_their_order_and_said_in_the_log(tmp_path: Path) -> None:
    runner = changed_run(tmp_path, "single", CHANGES, log_level="INFO")
    runner.train()
    module: Any = runner.strategy.module
    assert isinstance(module, WithHead)
    assert isinstance(module.inner.norm, CopiedNorm)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {"inner.first.weight", "inner.norm.weight"}
    said = dict(runner.outline.transforms)
    assert next(iter(said.values())) == (
        "2 x LayerNorm to tests.CopiedNorm; 1 x tests.RandomNorm to tests.CopiedNorm; 6 parameters replaced (96 values)"
    )
    assert said["add_head(width=3)"].startswith("another model (tests.WithHead); 2 parameters added (21 values)")
    assert "2 parameters frozen (112 values)" in next(line for name, line in said.items() if name.startswith("Freeze"))
    log = next(tmp_path.rglob("*.log")).read_text()
    assert "Transforms:" in log
    record = json.loads(next(tmp_path.rglob("run.json")).read_text())
    assert [name for name, _ in record["start"]["transforms"]] == list(said)


def test_random_numbers_of_a_transform_are_its_own(tmp_path: Path) -> None:
    """They depend neither on what the model has drawn nor on the strategy, and what follows draws as without it."""

    class Wider(WithNorms):
        def __init__(self) -> None:
            torch.rand(5)
            super().__init__()

    heads, states = [], []
    for model in (WithNorms, Wider):
        runner = changed_run(tmp_path / model.__name__, "single", [add_head], model=model)
        heads.append(runner.model.extra.weight)
        states.append(torch.get_rng_state())
    assert torch.equal(*heads)
    assert not torch.equal(*states)
    changed_run(tmp_path / "without", "single", None).model  # noqa: B018 - builds it
    assert torch.equal(torch.get_rng_state(), states[0])


def from_a_base(folder: Path, strategy: str, kind: type[Norm], **options: Any) -> dict[str, Tensor]:
    return changed(
        folder,
        strategy,
        [partial(replace_norms, kind=kind), dict(type="add_head", width=3)],
        load_from=str(folder.parent / "base.pth"),
        strategy={**STRATEGIES[strategy], "device": "cpu", **options},
    )


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Norm, pytest.param(CopiedNorm, marks=pytest.mark.full)])
def test_what_is_left_to_load_from_is_loaded_and_what_is_new_initialised(
    tmp_path: Path, workers2: WorkerGroup, kind: type[Norm]
) -> None:
    torch.manual_seed(11)
    torch.save({f"inner.{name}": value for name, value in WithNorms().state_dict().items()}, tmp_path / "base.pth")
    expected = from_a_base(tmp_path / "alone", "single", kind)
    for found in workers2.run(from_a_base, tmp_path / "fsdp", "fsdp", kind, skip_init_weights=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)


def doubles(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.mul_(2)


def reads(model: Any) -> None:
    if model.first.weight.abs().max().item() > 0:
        doubles(model)


class NeedsValues:
    needs_values = True

    def __call__(self, model: nn.Module) -> None:
        reads(model)


def test_a_function_with_arguments_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_head, "needs_values", True, raising=False)
    monkeypatch.setattr(add_head, "changes", "the head is new", raising=False)
    runner = changed_run(tmp_path, "single", [dict(type=add_head, width=3)])
    assert runner.model is not None
    assert runner.outline.transforms[0][1].endswith("; the head is new")
    message = refused(tmp_path / "loaded", "single", dict(type=add_head, width=3), load_from=str(tmp_path))
    assert "add_head(width=3) computes with the model's values" in message


def refused(folder: Path, under: str, transform: Any, **changes: Any) -> str:
    try:
        changed_run(folder, under, [transform], **changes).model  # noqa: B018 - builds it
    except (ConfigError, StrategyError) as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_transform_that_needs_values_is_refused_where_there_are_none(tmp_path: Path, workers2: WorkerGroup) -> None:
    for message in workers2.run(refused, tmp_path, "fsdp", reads):
        assert message.startswith("transforms[0]: reads failed on a model that the strategy has built without memory (")
        assert message.endswith("; if it reads values, give the model as an instance")
    for message in workers2.run(refused, tmp_path, "fsdp", NeedsValues()):
        assert message == (
            "transforms[0]: NeedsValues computes with the model's values, and the strategy builds this model without them; give "
            "the model as an instance, with its weights"
        )
    assert workers2.run(refused, tmp_path, "fsdp", doubles) == ["", ""]  # done when the values are made
    options = dict(STRATEGIES["fsdp"], device="cpu", skip_init_weights=True)
    for message in workers2.run(refused, tmp_path, "fsdp", doubles, strategy=options):
        assert "needs the values of first.weight, which strategy.skip_init_weights leaves to load_from" in message


def doubled(folder: Path, strategy: str) -> Tensor:
    runner = changed_run(folder, strategy, [doubles])
    try:
        runner.model  # noqa: B018 - builds it
        return dict(whole_model(runner.strategy))["model.first.weight"]
    finally:
        runner.close()


@pytest.mark.distributed
def test_a_change_of_values_is_done_under_fsdp_too(tmp_path: Path, workers2: WorkerGroup) -> None:
    expected = doubled(tmp_path / "alone", "single")
    for found in workers2.run(doubled, tmp_path / "fsdp", "fsdp"):
        torch.testing.assert_close(found, expected)


def test_values_that_load_from_would_replace_are_refused(tmp_path: Path) -> None:
    torch.save(WithNorms().state_dict(), base := str(tmp_path / "base.pth"))
    assert refused(tmp_path, "single", NeedsValues(), load_from=base) == (
        "transforms[0]: NeedsValues computes with the model's values, which load_from would replace afterwards; give the model as "
        "an instance, with its weights, and leave load_from out"
    )
    assert refused(tmp_path, "single", NeedsValues(), model=WithNorms()) == ""


class Quantity(BaseModel):
    """Has init_weights, which comes before the transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def init_weights(self) -> None:
        nn.init.ones_(self.layer.weight)

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return {"loss": nn.functional.cross_entropy(self.layer(x), y)}


def test_after_init_weights_and_before_everything_else(tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(model: Any) -> None:
        seen.append(bool((model.layer.weight == 1).all()))
        model.layer = nn.Sequential(model.layer, nn.Tanh())

    runner = changed_run(
        tmp_path,
        "single",
        [look],
        model=Quantity,
        strategy=dict(STRATEGIES["single"], device="cpu", activation_checkpointing=dict(classes=["Tanh"])),
    )
    runner.train()
    assert seen == [True]


# Built-in ones


class Tied(nn.Module):
    """Its head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight


def test_freezing_by_regular_expression() -> None:
    from flextrain.runner.transforms.freeze import Freeze

    model = WithNorms()
    Freeze(r"blocks\.\d\.1\..*", regex=True)(model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        f"blocks.{block}.1.{key}" for block in (0, 1) for key in ("weight", "bias")
    }


def test_what_is_not_to_be_frozen_is_not_frozen_by_another_name_either() -> None:
    from flextrain.runner.transforms.freeze import Freeze

    model = Tied()
    Freeze("*", but="head")(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["embed.weight"]


def test_float8_is_emulated_on_any_device(tmp_path: Path) -> None:
    pytest.importorskip("torchao")

    class Wide(WithNorms):
        def __init__(self) -> None:
            super().__init__(width=32)

    transform = dict(type="Float8Training", patterns=["blocks.*"], emulate=True)
    found = changed(tmp_path / "float8", "single", [transform], model=Wide)
    expected = changed(tmp_path / "float32", "single", None, model=Wide)
    assert found.keys() == expected.keys()
    difference = (found["model.blocks.0.0.weight"] - expected["model.blocks.0.0.weight"]).abs().max()
    assert 0 < difference < 0.1


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def float8(model: nn.Module, **options: Any) -> nn.Module:
    from flextrain.runner.transforms.torchao import Float8Training

    Float8Training(emulate=True, **options)(model)
    return model


def test_a_layer_in_float8_keeps_its_hooks_and_its_modules() -> None:
    pytest.importorskip("torchao")
    layer, seen = nn.Linear(16, 16), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    model = nn.Sequential(layer, nn.Sequential(layer))
    x = torch.randn(4, 16)
    float32 = model(x)
    assert isinstance(float8(model), nn.Sequential)
    assert model[0] is model[1][0] is layer
    found = model(x)
    assert len(seen) == 4
    assert 0 < (found - float32).abs().max() < 0.2
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), found)
    assert type(copied[0]) is type(layer)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (16,), (3, 5, 16), (2, 16, 16)])
def test_float8_of_any_number_of_rows(recipe: str, shape: tuple[int, ...]) -> None:
    torchao = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 32), torch.randn(shape, requires_grad=True)
    config = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = torchao.convert_to_float8_training(copy.deepcopy(layer), config=config)
    ours = cast(nn.Linear, float8(layer, recipe=recipe))
    found = ours(x)
    assert found.shape == (*shape[:-1], 32)
    weight, given = torch.autograd.grad(found.square().sum(), (ours.weight, x))
    assert given.shape == shape
    assert weight.isfinite().all()
    if x.numel():
        expected = theirs(x)
        for one, other in zip(
            (weight, given), torch.autograd.grad(expected.square().sum(), (theirs.weight, x)), strict=True
        ):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(found, expected)


def test_float8_heeds_autocast_of_any_device() -> None:
    pytest.importorskip("torchao")
    layer = float8(nn.Linear(16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(torch.randn(16, 16))
    assert found.dtype is torch.bfloat16
    found.sum().backward()
    assert next(layer.parameters()).grad.dtype is torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: nn.Sequential(Doubled(16, 16)), "0 is a Doubled, float8 takes the place of the forward of torch.nn.Linear only"),
        (lambda: nn.TransformerEncoderLayer(16, 2), "self_attn.out_proj is a NonDynamicallyQuantizableLinear, float8 takes"),
        (lambda: nn.Sequential(nn.Linear(16, 8)), "0 has 16 inputs and 8 outputs, float8 needs multiples of 16; leave it out "),
    ],
)  # fmt: skip
def test_layers_that_cannot_compute_in_float8(model: Callable[[], nn.Module], message: str) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError) as caught:
        float8(model())
    assert str(caught.value).startswith(f"Float8Training: {message}")


def test_quantising_leaves_the_precision_of_other_products() -> None:
    """torchao 0.13 lets all products of float32 be computed in TF32."""
    pytest.importorskip("torchao")
    from flextrain.runner.transforms.torchao import Quantize

    before = torch.get_float32_matmul_precision()
    Quantize("Int8WeightOnlyConfig")(nn.Sequential(nn.Linear(64, 64)))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("but, warns", [(None, True), ("head", False)])
def test_quantising_one_side_of_a_tie_is_told(but: str | None, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchao")
    from flextrain.runner.transforms.torchao import Quantize

    with caplog.at_level(logging.WARNING, "flextrain"):
        Quantize("Int8WeightOnlyConfig", but=but)(Tied())
    assert any("head.weight is also embed.weight, which stays as it is" in line for line in caplog.messages) == warns
    caplog.clear()
    shared = nn.Linear(64, 64)
    with caplog.at_level(logging.WARNING, "flextrain"):
        Quantize("Int8WeightOnlyConfig")(nn.ModuleDict(dict(first=shared, second=shared)))
    assert not caplog.messages


def test_a_quantised_base_under_adapters(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("peft", minversion="0.20")  # earlier ones want the quantiser of transformers
    torch.manual_seed(0)
    model = WithNorms(width=64)
    average = EMAHook(momentum=0.4)
    transforms = [
        dict(type="Quantize", config="Int8WeightOnlyConfig", patterns=["blocks.*"]),
        dict(type="LoRA", r=2, target_modules=["0.0", "1.0"]),
    ]
    runner = changed_run(
        tmp_path,
        "single",
        transforms,
        model=model,
        strategy=dict(STRATEGIES["single"], device="cpu", exclude_frozen_parameters=True),
        custom_hooks=[average],
    )
    runner.train()
    averaged = average.state_dict().keys()
    assert "averaged.blocks.0.0.lora_A.default.weight" in averaged
    assert "averaged.blocks.0.0.base_layer.weight" not in averaged  # no quantised number has an average
    assert (
        "Int8Tensor"
        in dict(runner.outline.transforms)["Quantize(config='Int8WeightOnlyConfig', patterns=['blocks.*'])"]
    )
    assert type(runner.strategy.module.blocks[0][0].base_layer.weight).__name__ == "Int8Tensor"


# The command line


CONFIG = """\
model = dict(type="tests.runner.test_transforms:WithNorms")
train_dataloader = dict(dataset=dict(type="tests.runner.training:Samples", length=16), batch_size=4, collate_fn="default_collate")
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=1e-3))
train_cfg = dict(max_epochs=1)
transforms = [
    dict(type="tests.runner.test_transforms:replace_norms"),
    dict(type="Freeze", patterns={pattern!r}),
]
"""


def test_config_check_says_what_they_change(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(pattern="first"))
    assert main(["config", "check", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "transforms[0] replace_norms: 2 x LayerNorm to tests.Norm; 1 x tests.RandomNorm to tests.Norm" in out
    assert "transforms[1] Freeze(patterns='first'): 2 parameters frozen (112 values)" in out
    path.write_text(CONFIG.format(pattern="frist"))
    assert main(["config", "check", str(path)]) == 1
    error = capsys.readouterr().err
    assert 'transforms[1].patterns: "frist" matches no parameter, did you mean "first"?' in error
    assert f"{path}:" in error
    assert error.count("\n") == 1


# What is wrong


class Silent:
    """Takes no module."""


def lora(**options: Any) -> dict[str, Any]:
    return {"type": "LoRA", "r": 4, "target_modules": ["first"], **options}


def gives_five(model: nn.Module) -> Any:
    return 5


def needs_more(model: nn.Module, width: int) -> None:
    pass


def nothing() -> None:
    pass


WRONG: list[tuple[Any, str]] = [
    ("Freeze", 'transforms: "Freeze" is not allowed, give a list of functions, names, or dict(type=...)'),
    (dict(type="Freeze"), "transforms: dict is not allowed, give a list of functions"),
    (5, "transforms: int is not allowed, give a list"),
    ([5], "transforms[0]: 5 is not allowed, give a function, a name, or dict(type=...)"),
    ([nn.Linear(1, 1)], "transforms[0]: is a module (Linear), give a function that takes the model"),
    (["Freez"], 'transforms[0]: "Freez" is no known transform, did you mean "Freeze"?'),
    ([dict(type="Lora", r=4)], 'transforms[0].type: "Lora" is no known transform, did you mean "LoRA"?'),
    ([dict(patterns=["a"])], "transforms[0].type: missing, say which transform"),
    ([dict(type="no.such.module:f")], "transforms[0].type"),
    ([Silent], "transforms[0].type: Silent is not callable, define __call__(self, module)"),
    ([nn.Linear], "transforms[0].type: Linear is a module, give a function that takes the model"),
    ([nothing], "transforms[0]: nothing takes no argument, it must take the model"),
    ([gives_five], "transforms[0]: gives_five gave int, return a torch.nn.Module, or None if it was changed in place"),
    ([dict(type="add_head", width="4")], 'transforms[0].width: "4" is not allowed, give an integer'),
    ([dict(type="add_head", wdith=4)], 'transforms[0].wdith: unknown key, did you mean "width"?'),
    ([dict(type="add_head", model=4)], "transforms[0].model: is filled in by flextrain, leave it out"),
    ([needs_more], "transforms[0]: needs_more needs width beside the model, give dict(type=function, width=...)"),
    (
        [dict(type="Freeze", patterns=["blocks"], but=["blocks"])],
        "transforms[0].but: leaves out all that patterns match, nothing is frozen",
    ),
    (["Freeze"], "transforms[0].patterns: missing, it must be given"),
    ([dict(type="Freeze", patterns=[])], "transforms[0].patterns: [] is not allowed, give a pattern of names"),
    ([dict(type="Freeze", patterns="(", regex=True)], 'transforms[0].patterns: "(" is not allowed'),
    (
        [dict(type="Freeze", patterns=["blocks", "frist*"])],
        'transforms[0].patterns: "frist*" matches no parameter, did you',
    ),
    ([dict(type="Freeze", patterns="blocks", but="first")], 'transforms[0].but: "first" matches no parameter'),
    ([lora(rank=4)], 'transforms[0].rank: unknown key, did you mean "r"?'),
    ([lora(alpha=4)], 'transforms[0].alpha: unknown key, did you mean "lora_alpha"?'),
    ([lora(dropout=0.1)], 'transforms[0].dropout: unknown key, did you mean "lora_dropout"?'),
    ([lora(targets=["up"])], 'transforms[0].targets: unknown key, did you mean "target_modules"?'),
    ([lora(lora_aplha=4)], 'transforms[0].lora_aplha: unknown key, did you mean "lora_alpha"?'),
    ([lora(r=0)], "transforms[0].r: 0 is not allowed, give an integer of 1 or more"),
    ([lora(lora_alpha=-1)], "transforms[0].lora_alpha: -1 is not allowed, give a number above 0"),
    ([lora(lora_dropout=1.0)], "transforms[0].lora_dropout: 1.0 is not allowed, give a number from 0 to below 1"),
    ([lora(bias="some")], 'transforms[0].bias: \'some\' is not allowed, choose "none", "all" or "lora_only"'),
    ([lora(inference_mode=True)], "transforms[0].inference_mode: is filled in by flextrain, leave it out"),
    (
        [lora(target_modules=["frist"])],
        'transforms[0].target_modules: the model has no module "frist", did you mean "first"?',
    ),
    (
        [lora(target_modules=["first", "q_proj"])],
        'transforms[0].target_modules: the model has no module "q_proj"; the model',
    ),
    ([lora(target_modules="x.*")], 'transforms[0].target_modules: "x.*" matches no module'),
    (
        [lora(target_modules=[], target_parameters=["first.weight", "first.wight"])],
        'transforms[0].target_parameters: the model has no parameter "first.wight", did you mean "first.weight"?',
    ),
    ([lora(target_modules=[])], "transforms[0].target_modules: [] is not allowed, give names of modules"),
    (
        [lora(target_modules="0,1")],
        'transforms[0].target_modules: "0,1" matches no module, it is a regular expression of whole names; give a list, ["0", "1"]',
    ),
    ([lora(rank_pattern={"last": 2})], 'transforms[0].rank_pattern: "last" matches no module with an adapter, these'),
    ([lora(alpha_pattern={"frist": 2})], 'transforms[0].alpha_pattern: "frist" matches no module with an adapter'),
    ([lora(modules_to_save=["head"])], 'transforms[0].modules_to_save: the model has no module "head"'),
    ([lora(adapter_name="a.b")], 'transforms[0].adapter_name: "a.b" is not allowed, give letters'),
    ([lora(init_lora_weights="loftq")], "transforms[0]: "),
    ([lora(), lora()], "transforms[1]: the model has adapters already (default), LoRA adds one adapter"),
    ([dict(type="Float8Training", recipe="tensorwize")], 'transforms[0].recipe: "tensorwize" is not allowed, choose'),
    *(
        (
            [dict(type="Float8Training", recipe=recipe)],
            f'transforms[0].recipe: "{recipe}" is not allowed, choose tensorwise, rowwise or rowwise_with_gw_hp; torchao trains so by '
            "prototypes only, on GPUs of compute capability 10.0",
        )
        for recipe in ("mxfp8", "NVFP4", "mxfp8_cublas")
    ),
    (
        [dict(type="Float8Training", emulate=True)],
        "transforms[0]: first has 6 inputs and 16 outputs, float8 needs multiples",
    ),
    ([dict(type="Float8Training", patterns="nrom")], 'transforms[0].patterns: "nrom" matches no linear layer'),
    ([dict(type="Quantize", config="Int8WeightOnly")], 'transforms[0].config: "Int8WeightOnly" is not allowed, choose'),
    ([dict(type="Quantize", group=3)], "transforms[0].group: unknown key"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, number: int) -> None:
    transforms, message = WRONG[number]
    names = str(transforms)
    for package, users in (("peft", ("LoRA",)), ("torchao", ("Float8Training", "Quantize"))):
        if any(name in names for name in users):
            pytest.importorskip(package)
    with refuses(ConfigError, begins=message):
        changed_run(tmp_path, "single", transforms).model  # noqa: B018 - builds it


def test_layers_are_chosen_by_their_names_or_those_of_modules_around_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    chosen = {
        ("0", "0.1"): ["0.0"],
        ("*.1", None): ["0.1"],
        (None, "0"): ["1"],
    }
    for (patterns, but), names in chosen.items():
        assert list(Layers(patterns, but, "transforms[0]").of(model)) == names
    with pytest.raises(ConfigError, match=r"^transforms\[0\]: the model has no linear layer to change$"):
        Layers(None, "*", "transforms[0]").of(model)


def test_float8_needs_a_gpu_that_has_it(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    message = refused(tmp_path, "single", dict(type="Float8Training"))
    assert message.startswith(
        "transforms[0]: Float8Training needs a GPU of compute capability 8.9 or newer; emulate=True"
    )


@pytest.mark.parametrize("name, extra", [("LoRA", "peft"), ("Float8Training", "torchao"), ("Quantize", "torchao")])
def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == extra]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigError) as caught:
        changed_run(tmp_path, "single", [dict(type=name)])
    assert str(caught.value).startswith(f"transforms[0]: needs the package {extra} (")
    assert str(caught.value).endswith(f"pip install flextrain[{extra}]")


def quantised(folder: Path, under: str) -> str:
    torch.manual_seed(0)
    transforms = [dict(type="Quantize", patterns=["blocks.*"])]
    return refused(folder, under, transforms[0], model=WithNorms(width=64))


@pytest.mark.distributed
@pytest.mark.parametrize("under, name", [("fsdp", "FSDPStrategy"), ("ddp", "DDPStrategy")])
def test_a_quantised_model_is_refused(tmp_path: Path, workers2: WorkerGroup, under: str, name: str) -> None:
    pytest.importorskip("torchao")
    for message in workers2.run(quantised, tmp_path, under):
        kind = message.removeprefix("model.blocks.0.0.weight: is quantised (").partition(")")[0]
        assert kind in ("Int8Tensor", "AffineQuantizedTensor")  # the latter before torchao 0.14
        assert message.startswith(f"model.blocks.0.0.weight: is quantised ({kind}), which {name} cannot share")


def test_other_arguments_are_not_taken_for_it() -> None:
    with pytest.raises(ConfigError, match='transform: unknown key, did you mean "transforms"'):
        FlexibleRunner(Net(), transform=[])  # type: ignore[call-arg]
