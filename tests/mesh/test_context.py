"""Context parallelism trains as one device does, and refuses what it could only do wrong."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from flextrain import BaseMetric, BaseModel, FlexibleRunner, Hook, MeshStrategy
from flextrain.core.base.errors import ConfigError, StrategyError
from flextrain.core.base.registry import STRATEGIES
from flextrain.core.comm import collectives as dist
from flextrain.strategies.mesh.context import transformers as adapting
from flextrain.strategies.mesh.context.attention import _Blocks
from flextrain.strategies.mesh.context.batches import CutBatch, SequenceBatches, SequenceShards
from flextrain.strategies.mesh.context.comparison import MixedPositions, OneProcessComparison
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone, train
from flextrain.testing.sessions import load, save, whole_model

from ..device import DEVICE
from .cutting import ENCODER, Weighed, adamw, same_training
from .models import LENGTH, VOCABULARY, Plain, PlainBlock, of_transformers, sample
from .models import MATRICES as PLAN
from .parity import RECIPES, compare, data, dtype_of, reference, started
from .tensor_models import TrainingBlock

pytestmark = pytest.mark.distributed

MESH = dict(type="MeshStrategy")
FULL = pytest.mark.full


def case(world_size: int, model: str, recipe: str = "accumulate-clip", *marks: Any, **options: Any) -> Any:
    """A training run to compare with one device."""
    named = (key if isinstance(value, dict) else f"{key}{value}" for key, value in options.items() if key != "plan")
    name = "-".join([*named, model, recipe])
    return pytest.param(world_size, {**MESH, **options}, model, recipe, id=name, marks=marks)


PARITY = [
    case(2, "llama", cp=2),
    case(2, "llama_tied", "frozen", FULL, cp=2, cp_kind="ring"),
    case(2, "gpt2", "adamw-clip", FULL, cp=2),
    case(2, "qwen3_moe", "accumulate-clip", FULL, cp=2, cp_kind="ring"),
    case(4, "llama", "accumulate-clip", FULL, cp=4, cp_kind="ring"),
    case(4, "llama", "accumulate-clip", FULL, cp=4, cp_kind="ulysses"),
    case(4, "plain", "frozen", FULL, cp=2, dp_replicate=2),
    case(4, "gpt2", "accumulate-clip", FULL, cp=2, cp_kind="ring"),
    case(2, "llama", "accumulate-clip", FULL, cp=2, compile=dict(backend="eager")),
    case(2, "gpt2", "adamw-clip", FULL, cp=2, cp_kind="ring", wrap="blocks", compile=dict(backend="eager")),
    case(
        4, "fused", "accumulate-clip", FULL, cp=2, tp=2, plan={"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
    ),
    case(8, "plain", "accumulate-clip", FULL, dp_shard=2, cp=4, wrap="blocks"),
    case(4, "gpt2", "frozen", FULL, cp=2, tp=2, cp_kind="ring"),
]


@pytest.mark.parametrize("world_size, spec, model, recipe", PARITY)
def test_parity(
    workers: Callable[[int], WorkerGroup], world_size: int, spec: dict[str, Any], model: str, recipe: str
) -> None:
    traces = workers(world_size).run(compare, spec, model, RECIPES[recipe])
    assert all(trace == traces[0] for trace in traces)
    assert sum(traces[0].losses[-5:]) < sum(traces[0].losses[:5])


# Batches that a cut may get wrong


@pytest.mark.parametrize(
    "world_size, name, options",
    [
        pytest.param(2, "uneven", dict(cp=2, cp_kind="ring"), id="uneven-ring"),
        pytest.param(2, "packed", dict(cp=2, cp_kind="ring"), id="packed-ring"),
        pytest.param(2, "uneven", dict(cp=2), id="uneven-ulysses", marks=FULL),
        pytest.param(2, "packed", dict(cp=2), id="packed-ulysses", marks=FULL),
        pytest.param(2, "padded", dict(cp=2), id="padded-ulysses", marks=FULL),
        pytest.param(2, "padded", dict(cp=2, cp_kind="ring"), id="padded-ring", marks=FULL),
        pytest.param(2, "window", dict(cp=2, cp_kind="ring"), id="window-ring", marks=FULL),
        pytest.param(2, "window", dict(cp=2, cp_kind="ulysses"), id="window-ulysses", marks=FULL),
        pytest.param(2, "encoder", dict(cp=2, **ENCODER), id="encoder-ring", marks=FULL),
        pytest.param(2, "encoder", dict(cp=2, cp_kind="ulysses", **ENCODER), id="encoder-ulysses", marks=FULL),
        pytest.param(2, "weighed", dict(cp=2), id="weighed"),
        pytest.param(2, "divided", dict(cp=2), id="divided", marks=FULL),
        pytest.param(2, "number", dict(cp=2), id="number", marks=FULL),
        pytest.param(4, "weighed", dict(cp=2), id="weighed-dp2", marks=FULL),
        pytest.param(4, "packed", dict(cp=4, cp_kind="ring"), id="packed-ring4", marks=FULL),
        pytest.param(4, "window", dict(cp=4, cp_kind="ring"), id="window-ring4", marks=FULL),
    ],
)
def test_what_a_cut_may_get_wrong(
    workers: Callable[[int], WorkerGroup], world_size: int, name: str, options: dict[str, Any]
) -> None:
    workers(world_size).run(same_training, name, options)


def of_wrong_key() -> str:
    """In a worker: the message of the first update with a key that no batch has."""
    torch.set_num_threads(1)
    with started(dict(MESH, cp=2, cp_keys={"input_idz": 1}), "plain", RECIPES["accumulate-clip"]) as session:
        try:
            train(session.strategy, session.model, session.optim, data("plain", RECIPES["accumulate-clip"], 1))
        except ConfigError as error:
            return str(error)
    return ""


def test_a_key_that_no_batch_has(workers2: WorkerGroup) -> None:
    for message in workers2.run(of_wrong_key):
        assert message.startswith('strategy.cp_keys: "input_idz" is not in the batch, which has "input_ids"')


# Checkpoints


def resumed(specs: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], name: str, folder: Path) -> None:
    """In a worker: for each pair, train a half under the first and the rest under each of the others."""
    recipe, updates = RECIPES["accumulate-clip"], 6
    _, weights = reference(name, recipe, updates, torch.float64)
    first, rest = (data(name, recipe, updates)[part] for part in (slice(0, 3), slice(3, None)))
    for number, (source, targets) in enumerate(specs):
        path = folder / str(number)
        with _half(source, name) as session:
            train(session.strategy, session.model, session.optim, first)
            save(session, path)
        for target in targets:
            with _half(target, name) as session:
                load(session, path)
                train(session.strategy, session.model, session.optim, rest)
                same_tensors(whole_model(session.strategy), weights, f"{source} to {target}", 1e-10)


@contextlib.contextmanager
def _half(spec: Mapping[str, Any], name: str) -> Iterator[Any]:
    is_one = spec["type"] == "SingleDeviceStrategy"
    where = alone() if is_one else contextlib.nullcontext()
    with where, dtype_of(torch.float64), started(spec, name, RECIPES["accumulate-clip"]) as session:
        yield session


ONE, SHARDED = dict(type="SingleDeviceStrategy"), dict(type="FSDPStrategy")
CP2 = dict(MESH, cp=2)


def test_checkpoints_of_two_processes(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(resumed, [(CP2, [ONE, SHARDED]), (SHARDED, [CP2])], "llama", tmp_path)


@FULL
def test_checkpoints_of_four_processes(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    both, tensor = dict(CP2, wrap="blocks"), dict(CP2, tp=2, plan=PLAN)
    specs = [(both, [tensor, dict(MESH, cp=4), ONE, SHARDED]), (tensor, [both, dict(MESH, cp=4, cp_kind="ring"), ONE])]
    workers(4).run(resumed, specs, "plain", tmp_path)


# The runner


class Modes(BaseModel):
    """A causal language model with MMEngine's modes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Plain()

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, mode: str = "loss") -> Any:
        if mode == "loss":
            return self.model(input_ids, labels, position_ids)
        logits = self.model(input_ids, None, position_ids)
        return {"predicted": logits.argmax(-1), "labels": labels, "loss": functional.cross_entropy(logits.mT, labels)}


class Correct(BaseMetric):
    """How many predictions are right, their order, and the loss."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        assert torch.equal(data_batch["labels"].to(DEVICE), data_samples["labels"])
        right = (data_samples["predicted"] == data_samples["labels"]).double().cpu() @ torch.arange(
            1.0, LENGTH + 1
        ).double()
        self.results += [(value, float(data_samples["loss"])) for value in right.tolist()]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        correct, losses = zip(*results, strict=True)
        return {"correct": sum(correct), "loss": round(sum(losses) / len(losses), 4), "count": len(results)}


def ran(spec: Mapping[str, Any], shards: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    torch.manual_seed(3)
    batch = sample("plain", 20, 0)
    items = [{name: values[i] for name, values in batch.items()} for i in range(20)]
    collate = dict(type="default_collate")
    runner = FlexibleRunner(
        model=Modes,
        work_dir=folder,
        strategy=dict(spec, device=DEVICE),
        train_dataloader=dict(
            batch_size=4 // shards, dataset=items, sampler=dict(type="DefaultSampler", shuffle=True), collate_fn=collate
        ),
        val_dataloader=dict(
            batch_size=2, dataset=items[:11], sampler=dict(type="DefaultSampler", shuffle=False), collate_fn=collate
        ),
        val_cfg=dict(),
        val_evaluator=dict(type=Correct),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=2e-3), clip_grad=dict(max_norm=0.5)),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        randomness=dict(seed=7),
    )
    try:
        before = runner.val()
        runner.train()
        assert before != runner.val()
        loss = runner.message_hub.get_scalar("train/loss").mean()
        return whole_model(runner.strategy), runner.val(), loss
    finally:
        runner.strategy.leave()


def ran_alike(spec: Mapping[str, Any], shards: int, folder: Path) -> None:
    with alone(), tempfile.TemporaryDirectory() as own:
        weights, metrics, loss = ran(ONE, 1, Path(own))
    found_weights, found, found_loss = ran(spec, shards, folder)
    same_tensors(found_weights, weights, "final weights", 1e-4)
    assert metrics["count"] == 11
    assert found == metrics
    assert abs(found_loss - loss) < 1e-5


def test_runner(workers2: WorkerGroup, tmp_path: Path) -> None:
    workers2.run(ran_alike, CP2, 1, tmp_path)


@FULL
def test_runner_with_two_data_shards(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    workers(4).run(ran_alike, dict(CP2, cp_kind="ulysses"), 2, tmp_path)


class Sometimes(Modes):
    """Logs a value in every second update only, and from then on another one in the others."""

    update = 0

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, mode: str = "loss") -> Any:
        found = super().forward(input_ids, labels, position_ids, mode)
        if mode == "loss":
            found = {**found, "odd" if self.update % 2 else "even": found["loss"].detach() * 2}
        return found


class Logged(Hook):
    """What each update gives to the log."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append({name: float(value) for name, value in outputs.items()})
        runner.strategy.module.update += 1


def logged(spec: Mapping[str, Any], folder: Path) -> list[dict[str, float]]:
    torch.manual_seed(3)
    batch = sample("plain", 8, 0)
    items = [{name: values[i] for name, values in batch.items()} for i in range(8)]
    hook = Logged()
    runner = FlexibleRunner(
        model=Sometimes,
        work_dir=folder,
        strategy=dict(spec, device=DEVICE),
        train_dataloader=dict(batch_size=2, dataset=items, collate_fn=dict(type="default_collate")),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(max_epochs=1),
        custom_hooks=[hook],
        randomness=dict(seed=7),
    )
    try:
        runner.train()
    finally:
        runner.strategy.leave()
    return hook.seen


def test_what_a_model_logs_in_some_updates_only(workers2: WorkerGroup, tmp_path: Path) -> None:
    """A value is that of the whole sequences, or left out: no NaN, and none of a process's own positions."""
    found = workers2.run(logged, CP2, tmp_path / "two")[0]
    expected = logged(ONE, tmp_path / "one")
    for mine, other in zip(found, expected, strict=True):
        other.pop("odd", None)
        assert mine == pytest.approx(other, rel=1e-4)


class Pooling(Modes):
    """Tests by another method than it validates: of all positions."""

    def test_step(self, data: Any) -> Any:
        data = self.data_preprocessor(data, False)
        return {"loss": self(data["input_ids"], data["labels"], mode="predict")["loss"].square()}


def why_testing_is_refused(folder: Path) -> str:
    """In a worker: why testing is refused."""
    torch.manual_seed(3)
    batch = sample("plain", 4, 0)
    items = [{name: values[i] for name, values in batch.items()} for i in range(4)]
    loader = dict(batch_size=2, dataset=items, collate_fn=dict(type="default_collate"))
    own = {f"{mode}_dataloader": loader for mode in ("val", "test")} | dict(val_cfg=dict(), test_cfg=dict())
    own |= dict(val_evaluator=dict(type=Correct), test_evaluator=dict(type=Correct))
    runner = FlexibleRunner(model=Pooling, work_dir=folder, strategy=dict(CP2, device=DEVICE), **own)
    try:
        runner.val()
        with pytest.raises(StrategyError) as found:
            runner.test()
        return str(found.value)
    finally:
        runner.strategy.leave()


def test_what_a_model_tests_with_is_compared_too(workers2: WorkerGroup, tmp_path: Path) -> None:
    assert "with strategy.cp=2 only attention" in workers2.run(why_testing_is_refused, tmp_path)[0]


# Refused before the hooks of the first update


class Noting(Hook):
    """Knows how many updates have begun."""

    begun = 0

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.begun += 1


class Borrowing(Plain):
    """Its last stage computes with what the first one has."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Any = None) -> Any:
        found: Any = super().forward(input_ids, labels)
        return {"loss": found["loss"] + self.embed.weight.mean()}


EARLY: dict[str, tuple[Any, Callable[[], nn.Module], str]] = {
    "cp": (CP2, lambda: Local("neighbours"), "model.mix (Conv1d): convolution combines positions"),
    "local": (
        dict(MESH, tp=2, tp_kind="local", plan=PLAN),
        lambda: Plain(TrainingBlock),
        'strategy.tp_kind: "local" is not possible',
    ),
    "pp": (dict(MESH, pp=2), Borrowing, "strategy.pp: what Borrowing returns was computed from embed.weight"),
}


def early(kind: str, folder: Path) -> tuple[str, int]:
    """In a worker: the error of a run, and how many updates had begun."""
    spec, make, _ = EARLY[kind]
    batch, hook = sample("plain", 8, 0), Noting()
    runner = FlexibleRunner(
        model=make(),
        work_dir=folder,
        strategy=dict(spec, device=DEVICE),
        train_dataloader=dict(
            batch_size=4,
            dataset=[{name: values[i] for name, values in batch.items()} for i in range(8)],
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn=dict(type="default_collate"),
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e-3)),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        custom_hooks=[hook],
    )
    try:
        runner.train()
    except StrategyError as error:
        return str(error), hook.begun
    finally:
        runner.strategy.leave()
    return "", hook.begun


@pytest.mark.parametrize("kind", EARLY)
def test_refused_before_the_first_update_begins(workers2: WorkerGroup, kind: str, tmp_path: Path) -> None:
    for message, begun in workers2.run(early, kind, tmp_path):
        assert message.startswith(EARLY[kind][2])
        assert begun == 0


# Random numbers


def dropped() -> tuple[list[Tensor], Tensor, Tensor]:
    """Masks of dropout of the first layer in two windows, and the state of the generator after them."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    strategy = MeshStrategy(device=DEVICE, cp=2, cp_kind="ulysses")
    strategy.join()
    model, optim = strategy.setup(Plain(dropout=0.5), adamw(1))
    masks: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training:
            masks.append(output.detach() == 0)

    model.layers[0].drop.register_forward_hook(note)  # type: ignore[union-attr, index]
    trace = train(strategy, model, optim, [[sample("plain", 4, seed)] for seed in range(2)])  # type: ignore[arg-type]
    strategy.leave()
    dist.destroy_process_group()
    assert not any(bool(mask.any()) for mask in masks[:-4])  # what is compared drops nothing
    return masks[-4:], torch.get_rng_state(), torch.tensor(trace.losses)


def test_dropout_differs_between_positions(workers2: WorkerGroup) -> None:
    (masks, state, losses), (others, other_state, _) = workers2.run(dropped)
    assert len(masks) == 4  # twice in a layer
    assert not any(torch.equal(mask, other) for mask, other in zip(masks, others, strict=True))
    assert not torch.equal(masks[0], masks[2])
    assert torch.equal(state, other_state)
    assert torch.equal(losses, workers2.run(dropped)[1][2])


# Attention that the first batch does not call


class Late(nn.Module):
    """A model of transformers, behind which attention of another kind begins when its trainer says so."""

    attends = False

    def __init__(self) -> None:
        super().__init__()
        self.body = of_transformers("llama").model
        self.block, self.head = PlainBlock(32, 4, 0.0), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        x = self.body(input_ids, position_ids=position_ids).last_hidden_state
        logits = self.head(self.block(x) if self.attends else x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def late_losses(spec: dict[str, Any]) -> list[float]:
    """In a worker: the losses of two updates before the other attention and two with it."""
    torch.manual_seed(5)
    strategy = STRATEGIES.build(dict(spec, device=DEVICE), "strategy")
    strategy.join()
    whole = Late()
    model, optim = strategy.setup(whole, adamw(1))
    losses: list[float] = []
    for whole.attends in (False, True):
        batches = [sample("plain", 4, seed) for seed in range(2)]
        given = [[dict(input_ids=batch["input_ids"], targets=batch["labels"])] for batch in batches]
        losses += train(strategy, model, optim, given).losses
    strategy.leave()
    dist.destroy_process_group()
    return losses


def test_attention_that_the_first_batch_does_not_call(workers2: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = late_losses(dict(type="SingleDeviceStrategy"))
    assert workers2.run(late_losses, dict(CP2, cp_keys=dict(targets=1)))[0] == pytest.approx(expected, rel=1e-5)


# Models that a cut would make silently wrong


class ByHand(PlainBlock):
    """Attention that no one sees: softmax of products, in one of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.mT * self.head**-0.5).masked_fill(later, -torch.inf).softmax(-1)
        return super().forward(x + self.out((weights @ v).transpose(1, 2).flatten(2)))


class Turning(PlainBlock):
    """Rotary positions that are counted from 0."""

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], device=x.device)[:, None] / 10 ** torch.arange(4, device=x.device)
        turn = torch.polar(torch.ones_like(angle), angle)
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class PathDrop(PlainBlock):
    """A block that is left out for some samples."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, 1, device=x.device).bernoulli_(0.9)
        return x + (super().forward(x) - x) * kept / 0.9


class LayerDrop(PlainBlock):
    """A block that is left out at some times, as layers of BART are."""

    rate = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand((), device=x.device) < self.rate else super().forward(x)


class LayerDrop0(LayerDrop):
    """It draws, and is never left out, as by default."""

    rate = 0.0


class Repeating(PlainBlock):
    """A block that is repeated in backward by torch's older way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class Local(nn.Module):
    """Something on single positions only, and what is between neighbours."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model, self.kind = Plain(layers=1), kind
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        if kind == "silent neighbours":
            for parameter in self.mix.parameters():
                nn.init.zeros_(parameter)
        if kind == "alone":
            self.model.layers = nn.ModuleList()
        if kind.endswith("neighbours"):
            self.model.norm.register_forward_hook(lambda module, args, output: output + self.mix(output.mT).mT)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Any:
        position_ids = None if self.kind == "counting" else position_ids
        logits = self.model(input_ids, None, position_ids)
        if self.kind == "shifting":
            return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}
        if self.kind == "likelihood":
            chances = functional.log_softmax(logits, -1)
            return {"loss": functional.nll_loss(chances.flatten(0, 1), labels.flatten(), ignore_index=0)}
        options: dict[str, Any] = dict(total=dict(reduction="sum"), others=dict(ignore_index=0)).get(self.kind, {})
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)
        return {"loss": loss}


class Added(nn.Module):
    """A transformer, something small that is added to its last hidden states, and a small term of the loss in training."""

    def __init__(self, made: Callable[[], nn.Module], hidden: Any = None, loss: Any = None) -> None:
        super().__init__()
        self.model, self.own, self.hidden, self.loss = Plain(layers=1), made(), hidden, loss
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        if self.training:
            self.calls, self.seen = self.calls + 1, self.seen + 1
        x = self.model.embed(input_ids) + self.model.position(position_ids)
        x = self.model.norm(self.model.layers[0](x))
        if self.hidden is not None:
            x = x + 1e-6 * self.hidden(self.own, x)
        logits = self.model.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 1e-6 * self.loss(logits, labels) if self.training and self.loss is not None else loss}


def _jamba() -> nn.Module:
    import transformers

    config: Any = transformers.JambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=2,
        use_mamba_kernels=False, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


class Gate(nn.Module):
    """A causal convolution of almost no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv1d(32, 32, 4, groups=32), nn.Parameter(torch.full((32,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.conv(functional.pad(x.mT, (3, 0))).mT


def _memory(x: Tensor) -> Any:
    """A contiguous tensor as an array; the memory of the simulated device is the host's too."""
    memory = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    return numpy.frombuffer(memory, str(x.dtype).removeprefix("torch.")).reshape(x.shape)


class Unseen(torch.autograd.Function):
    """A kernel of one's own, whose result is written where torch does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        found = torch.empty_like(x)
        _memory(found)[...] = _memory(x).cumsum(1)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _by_capacity(_: nn.Module, x: Tensor) -> Tensor:
    """Experts that take two tokens each."""
    flat = x.flatten(0, 1)
    chosen = functional.one_hot(flat[:, :4].argmax(-1), 4)
    token = ((chosen.cumsum(0) * chosen).sum(-1) <= 2).nonzero()[:, 0]
    return torch.zeros_like(flat).index_add(0, token, flat[token]).view_as(x)


def _by_expert(_: nn.Module, x: Tensor) -> Tensor:
    """Experts that take the tokens that choose them, one expert after the other."""
    flat = x.flatten(0, 1)
    order = flat[:, :4].argmax(-1).argsort()
    return torch.zeros_like(flat).index_copy(0, order, flat[order] * 2).view_as(x)


def _late(_: nn.Module, x: Tensor) -> Tensor:
    """What backward alone combines."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad.cumsum(1))  # type: ignore[no-untyped-call]
    return x


def _alike(_: nn.Module, x: Tensor) -> Tensor:
    """Numbers for samples that all processes draw alike."""
    generator = torch.Generator(x.device).manual_seed(len(x))
    return x * torch.rand(len(x), 1, 1, generator=generator, device=x.device)


HIDDEN: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "layer scale": (Gate, lambda own, x: own(x), "model.own.conv (Conv1d): convolution combines positions"),
    "recurrence": (lambda: nn.GRU(32, 32, batch_first=True), lambda own, x: own(x)[0], "model.own (GRU): add combines"),
    "statistics": (lambda: nn.GroupNorm(2, 32), lambda own, x: own(x.mT).mT, "model.own (GroupNorm): native_group_norm"),
    "pooling": (nn.Identity, lambda _, x: functional.max_pool1d(x.mT, 3, 1, 1).mT, "model: max_pool2d_with_indices combines"),
    "scan": (nn.Identity, lambda _, x: x.cumsum(1), "model: cumsum combines positions"),
    "centre": (nn.Identity, lambda _, x: (x - x.mean(1, keepdim=True)).tanh(), "model: tanh combines positions"),
    "roll": (nn.Identity, lambda _, x: x * x.roll(1, 1), "model: mul combines positions"),
    "expert choice": (nn.Identity, lambda _, x: x * x.topk(8, 1).values, "model: topk combines positions"),
    "capacity": (nn.Identity, _by_capacity, "model: cumsum combines positions"),
    "kernel": (nn.Identity, lambda _, x: Unseen.apply(x), "model: a kernel that cannot be followed may combine"),  # type: ignore[no-untyped-call]
    "own positions": (nn.Identity, lambda _, x: x * torch.linspace(0, 1, x.shape[1], device=x.device)[:, None], "model: mul takes numbers by position"),
}  # fmt: skip
LOSSES: dict[str, tuple[Any, str]] = {
    "neighbours": (lambda logits, _: (logits[:, 1:] - logits[:, :-1]).square().mean(), "model: slice combines positions"),
    "pairs": (lambda logits, _: (logits - logits.roll(1, 1)).square().mean(), "model: sub combines positions"),
    "square of a mean": (lambda logits, _: logits.mean((0, 1)).square().sum(), "model: pow combines positions"),
    "variance": (lambda logits, _: logits.var(1).mean(), "model: var combines positions"),
    "last position": (lambda logits, _: logits[:, -1].square().mean(), "model: select combines positions"),
}  # fmt: skip
RIGHT: dict[str, Callable[[], nn.Module]] = {
    "each position": lambda: Added(lambda: nn.Conv1d(32, 32, 1), lambda own, x: own(x.mT).mT),
    "by expert": lambda: Added(nn.Identity, _by_expert),
    "mean of squares": lambda: Added(nn.Identity, None, lambda logits, _: logits.logsumexp(-1).square().mean()),
    "mean over a mask": lambda: Added(
        nn.Identity, None, lambda logits, y: (logits.square().mean(-1) * (y != -100) / (y != -100).float().sum()).sum()
    ),
    "dropout": lambda: Plain(dropout=0.5, layers=1),
    "noise by position": lambda: Added(nn.Identity, lambda _, x: x * torch.rand_like(x)),
    "no layer drop": lambda: Plain(LayerDrop0),
    "numbers of its own generator": lambda: Added(nn.Identity, _alike),
    "mixtral": lambda: of_transformers("mixtral", layers=1),
    "qwen3_moe": lambda: of_transformers("qwen3_moe", layers=1),
}


class OwnLoss(Weighed):
    """A model of transformers whose loss is computed outside of it."""

    def forward(self, labels: Tensor, mode: str = "loss", **batch: Tensor) -> Any:
        logits = self.model(**batch).logits
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "by hand": (lambda: Plain(ByHand), "model.layers.0 (ByHand): bmm combines positions of a sequence"),
    "neighbours": (lambda: Local("neighbours"), "model.mix (Conv1d): convolution combines positions of a sequence"),
    "mamba": (_jamba, "model.model.layers.0.mamba (JambaMambaMixer): convolution combines positions"),
    "late": (lambda: Added(nn.Identity, _late), "its gradient differs by"),
    **{name: (functools.partial(Added, made, hidden), error) for name, (made, hidden, error) in HIDDEN.items()},
    **{name: (functools.partial(Added, nn.Identity, None, loss), error) for name, (loss, error) in LOSSES.items()},
    "counting": (
        lambda: Local("counting"),
        "model.model (Plain): add takes numbers by position that are not the batch's",
    ),
    "drop path": (lambda: Plain(PathDrop), "model: draws random numbers of shape (4, 1, 1) in forward"),
    "layer drop": (lambda: Plain(LayerDrop), "model: draws random numbers of shape () in forward"),
    "turning": (
        lambda: Plain(Turning),
        "model.layers.0 (Turning): mul takes numbers by position that are not the batch's",
    ),
    "alone": (lambda: Local("alone"), "model: calls neither scaled_dot_product_attention nor transformers' attention"),
    "shifting": (
        lambda: Local("shifting"),
        "model: its cross_entropy has 7 targets of 8 positions, as if it shifted labels",
    ),
    "total": (
        lambda: Local("total"),
        "model: its cross_entropy has reduction=sum, so that strategy.cp cannot tell how many",
    ),
    "others": (
        lambda: Local("others"),
        "model: its cross_entropy has ignore_index=0, so that strategy.cp cannot tell how",
    ),
    "silent neighbours": (lambda: Local("silent neighbours"), "model.mix (Conv1d): convolution combines positions"),
    "likelihood": (
        lambda: Local("likelihood"),
        "model: its nll_loss has ignore_index=0, so that strategy.cp cannot tell",
    ),
    "own loss": (
        lambda: OwnLoss(of_transformers("llama")),
        "model: its loss_function is not called for the batch's labels",
    ),
    "repeating": (
        lambda: Plain(Repeating),
        "model: checkpoint(use_reentrant=True) would repeat attention over this process's",
    ),
}


def test_the_first_batch_is_compared_at_both_ends() -> None:
    """Padding may be at either end, and a mask without any may have some in another batch."""
    where = torch.arange(40).expand(3, 40)
    batches = SequenceBatches(
        {"where": 1, "mask": 1, "ends": 1}, None, lambda length: SequenceShards(length, 2, False), 0
    )
    found = batches.excerpt(dict(where=where, mask=torch.ones(3, 40), ends=where < 35, other=where), 16)
    assert found["where"][1].tolist() == [*range(8), *range(32, 40)]
    assert found["mask"][0].tolist() == [1.0] * 12 + [0.0, 1.0] * 2
    assert found["mask"][1].tolist() == [1.0] * 8 + [0.0, 1.0] * 4
    assert found["ends"].sum(1).tolist() == [9, 7, 9]
    assert found["other"] is where


def test_an_excerpt_has_something_of_a_mask_in_the_middle() -> None:
    mask = torch.zeros(3, 40)
    mask[:, 20:30] = 1
    batches = SequenceBatches({"ids": 1, "mask": 1}, None, lambda length: SequenceShards(length, 2, True), 0)
    found = batches.excerpt(dict(ids=torch.arange(2, 42).expand(3, 40), mask=mask), 16)
    assert found["ids"][0].tolist() == [*range(21, 29), *range(34, 42)]
    assert found["mask"][0].tolist() == [0.0, *[1.0] * 3, 0.0, 1.0, 0.0, 1.0, *[0.0] * 8]


def refused(models: Mapping[str, Callable[[], nn.Module]]) -> dict[str, str]:
    """In a worker: what is raised for each of the models, before any update."""
    torch.set_num_threads(1)
    found = {}
    for name, make in models.items():
        torch.manual_seed(7)
        strategy = MeshStrategy(device=DEVICE, cp=2, cp_kind="ulysses")
        strategy.join()
        model, optim = strategy.setup(make(), adamw(1))
        try:
            train(strategy, model, optim, [[sample("plain", 4, 0)]] * 2)  # type: ignore[arg-type]
            if isinstance(model, Added):
                assert (model.calls, float(model.seen)) == (2, 2.0)
        except StrategyError as error:
            found[name] = str(error)
        strategy.leave()
        dist.destroy_process_group()
    return found


RELATIVES = ("recurrence", "statistics", "pooling", "scan", "centre", "roll", "expert choice", "own positions", "pairs", "variance",
             "last position")  # fmt: skip


def _refused_wrong(names: Sequence[str]) -> dict[str, str]:
    return refused({name: WRONG[name][0] for name in names})


def _refused_right() -> dict[str, str]:
    return refused(RIGHT)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in WRONG if name not in RELATIVES], id="causes"),
        pytest.param(RELATIVES, id="relatives", marks=FULL),
    ],
)
def test_refused_at_the_first_batch(workers2: WorkerGroup, names: Sequence[str]) -> None:
    for found in workers2.run(_refused_wrong, names):
        assert {
            name: message in found.get(name, "") for name, message in ((name, WRONG[name][1]) for name in names)
        } == dict.fromkeys(names, True)
        assert not any("\n" in message for message in found.values())


def test_what_treats_each_position_alone_is_accepted(workers2: WorkerGroup) -> None:
    assert workers2.run(_refused_right) == [{}, {}]


# Broken on purpose


def _positions_from_zero(self: SequenceBatches, batch: Any, **options: Any) -> CutBatch:
    cut = _CUT(self, batch, **options)
    cut["position_ids"] = torch.arange(cut["input_ids"].shape[1])[None]
    return cut


def _without_last_step(blocks: _Blocks, step: int, device: Any) -> Iterator[Any]:
    return _OF_STEP(blocks, step, device) if step == 0 else iter(())


_CUT, _OF_STEP = SequenceBatches.cut, _Blocks.of_step
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "unshifted labels at a cut": (adapting, "shifts_labels", lambda *_: False),
    "wrong positions": (SequenceBatches, "cut", _positions_from_zero),
    "unweighed means": (CutBatch, "factor", property(lambda _: 1.0)),
    "a ring step missing": (_Blocks, "of_step", _without_last_step),
}


def broken(fault: str, is_compared: bool) -> str:
    """In a worker: the error of a training run with a fault, with the comparison of the first batch or without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault])
        if not is_compared:
            patch.setattr(OneProcessComparison, "of_training", lambda *_: None)
            patch.setattr(OneProcessComparison, "of_evaluation", lambda *_: None)
        try:
            same_training("uneven", dict(cp=2, cp_kind="ring"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.destroy_process_group()
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_on_purpose(workers2: WorkerGroup, fault: str) -> None:
    for error in workers2.run(broken, fault, True):
        assert error.startswith("StrategyError: model")
        assert "strategy.cp=2" in error
    for error in workers2.run(broken, fault, False):
        assert error.startswith("CheckFailedError: the loss of update")


def found_after_gathering() -> list[str | None]:
    """In a worker: what is found in forwards that multiply rows of all processes, of equal and of other positions."""
    group, found = init_device_mesh(DEVICE, (2,)), []
    for shift in (0, 1):
        mixed = MixedPositions(nn.Module(), lambda: False)
        rows = torch.randn(2, 16, device=DEVICE, requires_grad=True)
        mixed.mark(rows, 1)
        with mixed.watching():
            everyones = functional_collectives.all_gather_tensor(rows * 2, 0, group)  # waited for by what reads it
            (everyones * everyones.roll(shift, 1)).exp()
        found.append(mixed.found)
    dist.destroy_process_group()
    return found


def test_positions_are_followed_through_collectives(workers2: WorkerGroup) -> None:
    for equal, shifted in workers2.run(found_after_gathering):
        assert equal is None
        assert shifted is not None


def test_following_positions_keeps_no_memory() -> None:
    mixed, rows = MixedPositions(nn.Module(), lambda: False), torch.randn(2, 16, requires_grad=True)
    mixed.mark(rows, 1)
    with mixed.watching():
        doubled = rows.detach() * 2
        memory: Any = StorageWeakRef(doubled.untyped_storage())  # type: ignore[no-untyped-call]
        assert not memory.expired()
        del doubled
        assert memory.expired()
