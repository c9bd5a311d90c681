"""Layers that compute in float8, emulated: every strategy computes what one device does, and FSDP gathers their weights in float8."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from flextrain import BaseMetric, FlexibleRunner, StrategyError
from flextrain.core.checkpoint import export_weights
from flextrain.runner.hooks import Hook
from flextrain.strategies.fsdp.float8_weights import Float8Weights
from flextrain.testing import WorkerGroup
from flextrain.testing.sessions import whole_model

pytest.importorskip("torchao")
pytestmark = pytest.mark.distributed

WIDTH, SAMPLES, BATCH = 32, 36, 12
FLOAT8 = dict(type="Float8Training", emulate=True)
ROWWISE = dict(FLOAT8, recipe="rowwise")
ROUNDING = 2e-4
"""Of weights, after three updates. A sum in another order may round a value to the next float8; another scale rounds most of them."""
FORMAT = 1e-3, 2e-2
"""By how much float8 differs from float32 there."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(64, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, words: Tensor, after: Tensor) -> dict[str, Tensor]:
        found = self.head(self.blocks(self.table(words)))
        return {"loss": functional.cross_entropy(found.float().flatten(0, 1), after.flatten())}


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


class Sometimes(Net):
    """Which blocks it uses depends on the samples."""

    def forward(self, words: Tensor, after: Tensor) -> dict[str, Tensor]:
        found = self.blocks[int(words.sum() % 2)](self.table(words))
        return {"loss": functional.cross_entropy(self.head(found).flatten(0, 1), after.flatten())}


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences in such an order that one process's micro-batches are those of ``shards`` processes, one after the other.

    Args:
        shards: processes that are to get the same samples as this one.
        micro: micro-batches that each of them accumulates.
    """

    def __init__(self, shards: int = 1, micro: int = 1) -> None:
        words = torch.randint(0, 64, (SAMPLES, 4), generator=torch.Generator().manual_seed(1))
        self.words = words.view(-1, BATCH // shards // micro, shards, 4).transpose(1, 2).reshape(SAMPLES, 4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": self.words[index], "after": self.words[index].roll(1)}


def make(folder: Path, strategy: dict[str, Any], shards: int = 1, micro: int = 1, **changes: Any) -> FlexibleRunner:
    """A run, with as many ``shards`` of the data as ``strategy`` makes."""
    optim = dict(optimizer=dict(type="SGD", lr=0.5), clip_grad=dict(max_norm=1.0), accumulative_counts=micro)
    arguments: dict[str, Any] = dict(
        model=Net,
        strategy={**strategy, "device": "cpu"},
        work_dir=folder,
        train_dataloader=dict(
            dataset=changes.pop("data", None) or Texts(),
            batch_size=BATCH // shards // micro,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        train_cfg=dict(max_epochs=1),
        transforms=[FLOAT8],
        randomness=dict(seed=3),
        default_hooks=dict(checkpoint=None),
        optim_wrapper=optim | changes.pop("optim", {}),
    )
    return FlexibleRunner(**{**arguments, **changes})


def trained(folder: Path, strategy: dict[str, Any], shards: int = 1, **changes: Any) -> dict[str, Tensor]:
    runner = make(folder, strategy, shards, **changes)
    try:
        runner.train()
        return whole_model(runner.strategy)
    finally:
        runner.close()


def alone(folder: Path, shards: int = 1, micro: int = 1, **changes: Any) -> dict[str, Tensor]:
    """What one device trains with the micro-batches of all shards, each of which has scales of its own."""
    data = Texts(shards, micro)
    return trained(folder, dict(type="SingleDeviceStrategy"), micro=shards * micro, data=data, **changes)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[key] - expected[key]).abs().max()) for key in expected)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}
DDP: dict[str, Any] = dict(type="DDPStrategy")
FSDP: dict[str, Any] = dict(type="FSDPStrategy", wrap=["Block"])
TP: dict[str, Any] = dict(type="MeshStrategy", tp=2, plan=PLAN)
BFLOAT16 = dict(type="AmpOptimWrapper", dtype="bfloat16")


LORA = dict(type="LoRA", r=4, target_modules=["up", "down"], init_lora_weights=False)


PACKED = {"blocks.*.up": "packed_colwise:2", "blocks.*.down": "packed_rowwise:2"}
ADAPTED = [LORA, dict(FLOAT8, but="*.lora_*")]
INNER = {f"{name}.base_layer" if "blocks" in name else name: style for name, style in PLAN.items()}


def zero(stage: int) -> dict[str, Any]:
    return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage))


FULL, DEEPSPEED = pytest.mark.full, pytest.mark.deepspeed


@pytest.mark.parametrize(
    "processes, shards, strategy, changes",
    [
        pytest.param(2, 2, DDP, {}, id="ddp"),
        pytest.param(2, 2, FSDP, {}, id="fsdp"),
        pytest.param(2, 2, FSDP, dict(micro=2), id="fsdp, accumulation"),
        pytest.param(2, 2, dict(FSDP, activation_checkpointing=dict(classes=["Block"])), {}, id="fsdp, recomputation"),
        pytest.param(2, 2, dict(FSDP, compile=dict(backend="aot_eager")), {}, id="fsdp, compiled"),
        pytest.param(2, 2, FSDP, dict(model=Tied), id="fsdp, tied"),
        pytest.param(2, 2, FSDP, dict(transforms=[ROWWISE]), id="fsdp, rowwise"),
        pytest.param(2, 2, FSDP, dict(model=Sometimes), id="fsdp, unused"),
        pytest.param(2, 2, FSDP, dict(transforms=ADAPTED), marks=FULL, id="fsdp, adapters"),
        pytest.param(2, 1, dict(TP, plan=INNER), dict(transforms=ADAPTED), marks=FULL, id="tp, adapters"),
        pytest.param(3, 3, FSDP, {}, marks=FULL, id="fsdp, uneven shards"),
        pytest.param(4, 4, dict(FSDP, replicate_size=2), {}, marks=FULL, id="hsdp"),
        pytest.param(2, 1, TP, {}, id="tp"),
        pytest.param(2, 1, dict(TP, tp_kind="local"), {}, id="tp, local"),
        pytest.param(2, 1, dict(TP, plan=PACKED), {}, marks=FULL, id="tp, packed"),
        pytest.param(2, 1, dict(TP, sequence_parallel=True), {}, id="tp, sequences"),
        pytest.param(2, 1, TP, dict(transforms=[ROWWISE]), id="tp, rowwise"),
        pytest.param(2, 1, dict(type="MeshStrategy", pp=2), {}, id="pp"),
        pytest.param(4, 2, dict(TP, dp_shard=2, wrap=["Block"]), {}, marks=FULL, id="tp and fsdp"),
        pytest.param(2, 2, FSDP, dict(optim=BFLOAT16), id="fsdp, autocast"),
        pytest.param(1, 1, FSDP, {}, marks=FULL, id="fsdp, one process"),
        pytest.param(2, 1, dict(TP, compile=dict(backend="aot_eager")), {}, marks=FULL, id="tp, compiled"),
        pytest.param(2, 2, dict(DDP, compile=True), {}, marks=FULL, id="ddp, compiled"),
        pytest.param(2, 2, zero(2), {}, marks=DEEPSPEED, id="zero2"),
        pytest.param(2, 2, zero(3), {}, marks=DEEPSPEED, id="zero3"),
    ],
)
def test_a_strategy_computes_as_one_device(
    tmp_path: Path, workers: Callable[[int], WorkerGroup], processes: int, shards: int, strategy: Any, changes: Any
) -> None:
    expected = alone(tmp_path / "alone", shards, **changes)
    for found in workers(processes).run(trained, tmp_path / "several", strategy, shards, **changes):
        assert difference(found, expected) < ROUNDING
    others = [each for each in changes.get("transforms", []) if each["type"] != "Float8Training"]
    float32 = alone(tmp_path / "float32", shards, **{**changes, "transforms": others})
    assert FORMAT[0] < difference(expected, float32) < FORMAT[1]


class Seen:
    """A transform that notes which weights layers compute with, and how often scales are sent."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}
        self.messages = 0

    def __call__(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(partial(self._look, name))

    def _look(self, name: str, layer: nn.Module, args: Any) -> None:
        self.dtypes[name] = str(getattr(layer.weight, "_data", layer.weight).dtype).removeprefix("torch.")

    @contextmanager
    def counting(self) -> Iterator[None]:
        scale = Float8Weights.scale

        def counted(weights: Float8Weights) -> None:
            self.messages += 1
            scale(weights)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Float8Weights, "scale", counted)
            yield


def seen_in_training(
    folder: Path, strategy: dict[str, Any], transform: dict[str, Any] = FLOAT8, **changes: Any
) -> tuple[dict[str, str], int]:
    seen = Seen()
    with seen.counting():
        trained(folder, strategy, 2, transforms=[transform, seen], **changes)
    return seen.dtypes, seen.messages


LAYERS = {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}


def test_fsdp_gathers_float8_and_finds_scales_once_for_an_update(tmp_path: Path, workers2: WorkerGroup) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], set[str], int]] = [
        (FSDP, dict(micro=2), LAYERS, 3),
        (dict(FSDP, activation_checkpointing=dict(classes=["Block"])), {}, LAYERS, 3),
        (FSDP, dict(model=Tied), LAYERS - {"head"}, 3),  # its table is looked up in float32
        (FSDP, dict(transform=dict(FLOAT8, but=["blocks.0"])), {"blocks.1.up", "blocks.1.down", "head"}, 3),
        (FSDP, dict(transform=ROWWISE), set(), 0),
        (dict(FSDP, reshard_after_forward=1), {}, set(), 0),
    ]
    for strategy, changes, float8, messages in cases:
        for dtypes, sent in workers2.run(seen_in_training, tmp_path, strategy, **changes):
            assert dtypes == {name: "float8_e4m3fn" if name in float8 else "float32" for name in LAYERS}
            assert sent == messages


@torch.no_grad()
def losses_of_changed_weights(folder: Path, strategy: dict[str, Any], shards: int = 1, **changes: Any) -> list[float]:
    """Of one batch, called by the user: as trained, with weights that somebody has changed, and by a part of the model."""
    runner = make(folder, strategy, shards, **changes)
    try:
        with torch.enable_grad():
            model = runner.train()
        words, after = Texts().words[:8], Texts().words[:8].roll(1, 1)
        found = [float(model(words, after)["loss"])]
        for _ in range(2):
            for parameter in model.parameters():
                parameter.mul_(4)
            found.append(float(model(words, after)["loss"]))
        return [*found, float(model.blocks[0](torch.ones(1, 4, WIDTH)).sum())]
    finally:
        runner.close()


def test_scales_are_those_of_changed_weights(tmp_path: Path, workers2: WorkerGroup) -> None:
    single = dict(type="SingleDeviceStrategy")
    expected = losses_of_changed_weights(tmp_path / "alone", single, micro=2, data=Texts(2))
    for found in workers2.run(losses_of_changed_weights, tmp_path / "fsdp", FSDP, 2):
        assert found == pytest.approx(expected, rel=1e-4)


class Double(Hook):
    """Changes weights around validation, as a hook that swaps averages in."""

    def before_val(self, runner: Any) -> None:
        self._scale(runner, 4)

    def after_val(self, runner: Any) -> None:
        self._scale(runner, 2)  # more than before, which the scales of before would not hold

    @torch.no_grad()
    def _scale(self, runner: Any, factor: float) -> None:
        for _, parameter in runner.strategy.parameters():
            parameter.mul_(factor)


def validating(folder: Path, strategy: dict[str, Any], shards: int = 1, **changes: Any) -> dict[str, Tensor]:
    loader = dict(dataset=Texts(), batch_size=6, collate_fn="default_collate")
    cfg = dict(max_epochs=2, val_interval=1)
    validation = dict(val_dataloader=loader, val_cfg=dict(), val_evaluator=dict(type=Loss), custom_hooks=[Double()])
    return trained(folder, strategy, shards, train_cfg=cfg, **validation, **changes)


class Loss(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(data_samples["loss"]))

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"loss": sum(results) / len(results)}


def test_hooks_may_change_weights_around_validation(tmp_path: Path, workers2: WorkerGroup) -> None:
    expected = validating(tmp_path / "alone", dict(type="SingleDeviceStrategy"), micro=2, data=Texts(2))
    for found in workers2.run(validating, tmp_path / "fsdp", FSDP, 2):
        assert difference(found, expected) < ROUNDING * max(float(each.abs().max()) for each in expected.values())


def by_torchao(model: nn.Module, **options: Any) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    changed: nn.Module = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **options))
    return changed


def wrapped_by_torchao(folder: Path, strategy: dict[str, Any]) -> str:
    with pytest.raises(StrategyError) as caught:
        trained(folder, strategy, 2, transforms=None, model=by_torchao(Net(), enable_fsdp_float8_all_gather=True))
    return str(caught.value)


def test_models_that_torchao_has_changed(tmp_path: Path, workers2: WorkerGroup) -> None:
    for dtypes, _ in workers2.run(seen_in_training, tmp_path, FSDP, dict(type=by_torchao)):
        assert set(dtypes.values()) == {"float8_e4m3fn"}
    for strategy in (FSDP, DDP):
        for message in workers2.run(wrapped_by_torchao, tmp_path, strategy):
            assert message.startswith(
                "model.blocks.0.up.weight: is a WeightWithDynamicFloat8CastTensor, which torchao makes"
            )


def refused(folder: Path, strategy: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(StrategyError) as caught:
        trained(folder, strategy, **changes)
    return str(caught.value)


def test_parts_of_a_matrix_that_float8_cannot_multiply(tmp_path: Path, workers2: WorkerGroup) -> None:
    changes = dict(model=Narrow, transforms=[FLOAT8])
    for message in workers2.run(refused, tmp_path, TP, **changes):
        assert message.startswith(
            "strategy.tp: 2 processes leave model.blocks.0.up 32 inputs and 24 outputs on one, float8"
        )


class Narrow(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)


SAVED = dict(checkpoint=dict(type="CheckpointHook", interval=1))


def epochs(folder: Path, strategy: dict[str, Any], count: int, *args: Any, **changes: Any) -> dict[str, Tensor]:
    changes["optim"] = dict(optimizer=dict(type="SGD", lr=0.5, momentum=0.5))
    return trained(folder, strategy, *args, train_cfg=dict(max_epochs=count), default_hooks=SAVED, **changes)


def test_checkpoints_fit_every_precision_and_strategy(tmp_path: Path, workers2: WorkerGroup) -> None:
    """What is saved are the weights in high precision."""
    single = dict(type="SingleDeviceStrategy")
    saved = workers2.run(epochs, tmp_path / "run", FSDP, 1, 2)[0]
    assert {each.dtype for each in saved.values()} == {torch.float32}
    both = workers2.run(epochs, tmp_path / "both", FSDP, 2, 2)[0]
    for folder in ("fsdp", "float8", "float32", "tp"):
        shutil.copytree(tmp_path / "run", tmp_path / folder)
    assert difference(workers2.run(epochs, tmp_path / "fsdp", FSDP, 2, 2, resume=True)[0], both) == 0
    alike = dict(micro=2, data=Texts(2), resume=True)
    assert difference(epochs(tmp_path / "float8", single, 2, **alike), both) < ROUNDING
    assert FORMAT[0] < difference(epochs(tmp_path / "float32", single, 2, transforms=None, **alike), both) < FORMAT[1]
    found = workers2.run(epochs, tmp_path / "tp", TP, 2, 1, **alike)[0]
    assert difference(found, both) < ROUNDING


def test_exported_weights_are_ordinary(tmp_path: Path, workers2: WorkerGroup) -> None:
    saved = workers2.run(epochs, tmp_path, FSDP, 1, 2)[0]
    export_weights(tmp_path / "epoch_1", tmp_path / "model.safetensors")
    model = Net()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert difference({f"model.{name}": each.detach() for name, each in model.named_parameters()}, saved) == 0
