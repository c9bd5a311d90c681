"""Each token of an update counts the same, however the tokens are divided among batches and processes."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import ConfigError, FlexibleRunner, StrategyError
from flextrain.core.model.token_counts import TokenCount, count_tokens
from flextrain.runner.hooks import Hook
from flextrain.testing.sessions import whole_model
from tests.hugging_face.token_models import CLASSES, TOKEN_MODELS
from tests.mesh.models import LENGTH, MODELS, VOCABULARY, PlainBlock, of_transformers

from ..conftest import WorkerFactory
from .training import make_runner


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


SAMPLES = 16
"""Two updates of eight."""


def data(labelled: Callable[[int], int] = lambda i: LENGTH if i == 2 else (5 * i) % 13 + 1) -> list[dict[str, Tensor]]:
    """Sequences of which different numbers of labels count, from 1 to all, of which the first is no target."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(SAMPLES):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: LENGTH - labelled(i)] = -100
        found.append(dict(input_ids=ids, labels=labels))
    return found


def _classes(samples: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [s | {"labels": s["labels"].where(s["labels"] < 0, s["labels"] % CLASSES)} for s in samples]


class Sums(nn.Module):
    """A user's own model, which divides the sum of a batch by the number that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList([PlainBlock(16, 2, 0.0) for _ in range(2)])
        self.handed: list[Tensor | None] = []

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        self.handed.append(num_items_in_batch)
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.out(hidden).flatten(0, 1)
        # Without the number, as in evaluation and where a strategy tries the model, any loss will do.
        number = 1 if num_items_in_batch is None else num_items_in_batch
        text = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss_text": text / number, "loss_size": logits.square().sum() * 1e-3 / number}


class Watch(Hook):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(outputs["loss"])
        self.norms.append(outputs["grad_norm"])


OF_NAME: dict[str, Callable[[], nn.Module]] = {**TOKEN_MODELS, **MODELS, "sums": Sums}


def run(
    folder: Path,
    strategy: dict[str, Any],
    batch: int,
    accumulate: int,
    model: str | Callable[[], nn.Module] = "llama",
    samples: list[dict[str, Tensor]] | None = None,
    hooks: Sequence[Hook] = (),
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of two updates of eight samples."""
    torch.manual_seed(0)
    watch = Watch()
    runner = FlexibleRunner(
        model=OF_NAME[model]() if isinstance(model, str) else model(),
        work_dir=folder,
        strategy=strategy,
        train_dataloader=dict(
            dataset=(_classes(data()) if model == "bert tokens" else data()) if samples is None else samples,
            batch_size=batch,
            sampler=dict(type="DefaultSampler", shuffle=False),
            collate_fn="default_collate",
        ),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.2, momentum=0.9),
            accumulative_counts=accumulate,
            clip_grad=dict(max_norm=1.0),
        ),
        train_cfg=dict(max_epochs=1),
        custom_hooks=[watch, *hooks],
        default_hooks=dict(checkpoint=None),
        randomness=dict(seed=0),
        log_level="WARNING",
    )
    runner.train()
    weights = {name: value.float() for name, value in whole_model(runner.strategy).items()}
    found = dist_mean(runner, watch.losses), [float(norm) for norm in watch.norms], weights
    runner.strategy.leave()
    return found


def dist_mean(runner: Any, losses: list[Tensor]) -> list[float]:
    """As a line of the log has them: the mean over the processes that report."""
    from flextrain.core.comm import collectives

    found = []
    for loss in losses:
        own = float(loss) if runner.strategy.topology.reports else None
        reported = [value for value in collectives.all_gather_object(own) if value is not None]
        found.append(sum(reported) / len(reported))
    return found


@functools.cache
def reference(model: str) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), dict(type="SingleDeviceStrategy"), 8, 1, model)


def same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-5, atol=1e-6)
    for name, value in found[2].items():
        torch.testing.assert_close(
            value, expected[2][name], rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


ALONE = dict(type="SingleDeviceStrategy")


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("batch, accumulate", [(2, 4), (4, 2), (1, 8)])
def test_micro_batches_of_one_process(tmp_path: Path, batch: int, accumulate: int, model: str) -> None:
    same(run(tmp_path, ALONE, batch, accumulate, model), reference(model))


@pytest.mark.parametrize("model", ["t5", "bert tokens", "prompt tuning", "sums"])
def test_micro_batches_of_models_that_do_not_shift(tmp_path: Path, model: str) -> None:
    if model == "prompt tuning":
        pytest.importorskip("peft")
    for accumulate in (4, 8):
        same(run(tmp_path / str(accumulate), ALONE, 8 // accumulate, accumulate, model), reference(model))


def test_the_logged_loss_is_the_mean_over_tokens(tmp_path: Path) -> None:
    losses, _, _ = run(tmp_path, ALONE, 1, 8)
    torch.manual_seed(0)
    model: Any = MODELS["llama"]()
    total = count = 0.0
    for sample in data()[:8]:
        own = float((sample["labels"][1:] != -100).sum())
        total += own * float(model(**{name: value[None] for name, value in sample.items()}).loss.detach())
        count += own
    assert losses[0] == pytest.approx(total / count, rel=1e-5)


class Parts(Hook):
    """The parts of the loss that are logged."""

    def __init__(self) -> None:
        self.found: list[list[Tensor]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.found.append([outputs["loss"], outputs["loss_text"], outputs["loss_size"]])


def test_the_parts_of_a_loss_that_divides_sums_add_up_to_it(tmp_path: Path) -> None:
    """Their share is that of the sum, not the one by which means are weighed."""
    found = []
    for batch, accumulate in ((8, 1), (2, 4)):
        parts = Parts()
        run(tmp_path / str(batch), ALONE, batch, accumulate, "sums", hooks=[parts])
        found.append(torch.tensor(parts.found))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found[1][:, 0], found[1][:, 1:].sum(1), rtol=1e-5, atol=1e-6)


def test_without_weights_the_batches_count_the_same(tmp_path: Path) -> None:
    def unweighed() -> nn.Module:
        model = MODELS["llama"]()
        model.loss_weight = None  # type: ignore[assignment]
        return model

    losses, _, _ = run(tmp_path, ALONE, 1, 8, unweighed)
    assert losses[0] != pytest.approx(reference("llama")[0][0], rel=1e-3)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap=["LlamaDecoderLayer"]),
    "zero1": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1)),
    "zero2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
    "tp2": dict(type="MeshStrategy", tp=2),
    "pp2": dict(type="MeshStrategy", pp=2),
    "cp2": dict(type="MeshStrategy", cp=2),
}
TWO, FOUR = 2, 4
SPLITS = [(name, processes) for name in LAYOUTS for processes in (TWO, FOUR)]
QUICK = {("fsdp", TWO), ("cp2", TWO)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout, processes",
    [
        pytest.param(
            name,
            processes,
            marks=[pytest.mark.full] * ((name, processes) not in QUICK)
            + [pytest.mark.deepspeed] * name.startswith("zero"),
        )
        for name, processes in SPLITS
    ],
)
def test_processes_and_micro_batches(workers: WorkerFactory, tmp_path: Path, layout: str, processes: int) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    shards = processes // 2 if layout in ("tp2", "pp2", "cp2") else processes
    for accumulate in (2, 8 // shards):
        batch = 8 // shards // accumulate
        for found in workers(processes).run(run, tmp_path / str(accumulate), LAYOUTS[layout], batch, accumulate):
            same(found, reference("llama"))


OTHERS = [("t5", "fsdp"), ("sums", "ddp"), ("bert tokens", "zero3"), ("prompt tuning", "ddp"), ("t5", "zero2"),
          ("sums", "fsdp"), ("sums", "zero3"), ("sums", "tp2"), ("sums", "pp2")]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize(
    "model, layout", [pytest.param(*pair, marks=[pytest.mark.full] * (i > 0)) for i, pair in enumerate(OTHERS)]
)
def test_processes_of_models_that_do_not_shift(workers: WorkerFactory, tmp_path: Path, layout: str, model: str) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    strategy = LAYOUTS[layout] | (dict(wrap=None) if layout == "fsdp" else {})
    batch = 4 if layout in ("tp2", "pp2") else 2
    for found in workers(2).run(run, tmp_path, strategy, batch, 2, model):
        same(found, reference(model))


def test_the_number_of_one_process(tmp_path: Path) -> None:
    model = Sums()
    run(tmp_path, ALONE, 2, 4, lambda: model)
    counted = [sum(int((sample["labels"] != -100).sum()) for sample in part) for part in (data()[:8], data()[8:])]
    assert [float(number) for number in model.handed if number is not None] == [*[counted[0]] * 4, *[counted[1]] * 4]


def test_a_number_of_items_under_context_parallelism() -> None:
    from flextrain.strategies.mesh.context.context_parallel import Context

    model = Sums()
    assert count_tokens(model)
    axis = Context.__new__(Context)
    axis.size, axis.config = 2, types.SimpleNamespace(cp_positions=None)
    with pytest.raises(StrategyError, match=r"^model: Sums.forward divides by num_items_in_batch, and cp needs a mean"):
        axis.check(model, None)


@pytest.mark.distributed
@pytest.mark.full
def test_processes_without_any_token(workers: WorkerFactory, tmp_path: Path) -> None:
    """The second process's batches have no label that counts."""
    samples = data(lambda i: 0 if i % 2 else 5)
    expected = run(tmp_path / "one", ALONE, 8, 1, samples=samples)
    for found in workers(2).run(run, tmp_path / "two", LAYOUTS["fsdp"], 2, 2, samples=samples):
        same(found, expected)


# Which models are counted


def labels(*rows: list[int]) -> dict[str, Tensor]:
    return {"labels": torch.tensor(rows)}


def test_a_causal_model_leaves_out_the_first_label() -> None:
    model: Any = MODELS["llama"]()
    assert count_tokens(model)
    assert int(model.loss_weight(labels([1, 2, -100, 4], [-100, -100, -100, 3]))) == 3
    assert int(model.loss_weight({**labels([1, 2]), "shift_labels": torch.tensor([[2, -100]])})) == 1


@pytest.mark.processes  # with torch 2.6 the model is compiled
def test_a_masked_model_counts_all_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = transformers.ModernBertForMaskedLM(config)
    assert count_tokens(model)
    assert int(model.loss_weight(labels([1, 2, -100, 4]))) == 3


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = MODELS["llama"]()

    def forward(self, **batch: Tensor) -> Any:
        return {"loss": self.net(**batch).loss}


def own_loss(loss: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        found = of_transformers("llama")
        found.loss_function = loss  # type: ignore[assignment]
        return found

    return model


def summed(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def classifier() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy(of_transformers("llama").config)
    config.pad_token_id = 0
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.parametrize(
    "model", [Wrapped, own_loss(summed), classifier, MODELS["plain"]], ids=["wrapped", "a sum", "a classifier", "own"]
)
def test_models_that_are_not_counted(model: Callable[[], nn.Module]) -> None:
    found = model()
    assert not count_tokens(found)
    assert not hasattr(found, "loss_weight")


def test_a_models_own_weight_stays() -> None:
    model: Any = MODELS["llama"]()
    model.loss_weight = None
    assert not count_tokens(model)
    assert model.loss_weight is None


@pytest.mark.parametrize("batch", [[torch.ones(1)], {"input_ids": torch.ones(1)}, {"labels": torch.ones(3)}])
def test_what_cannot_be_counted_counts_once(batch: Any, caplog: pytest.LogCaptureFixture) -> None:
    count = TokenCount(True)
    assert [count(batch), count(batch), count(labels([1, 2]))] == [1, 1, 1]
    assert len({id(record) for record in caplog.records}) == 1
    count = TokenCount(True)
    assert count(labels([1, 2, 3])) == 2
    with pytest.raises(ConfigError, match="batch: has no labels to count, and others had some"):
        count(batch)


def test_a_number_of_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch: has num_items_in_batch, but the tokens of an update are"):
        TokenCount(True)({**labels([1, 2]), "num_items_in_batch": 3})


class Divides(nn.Module):
    """Sums its losses if it is told the items of an update; its batches have no labels of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, targets: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.logits(input_ids), targets, reduction="sum")
        return {"loss": loss / (len(targets) if num_items_in_batch is None else num_items_in_batch)}


def test_a_number_that_cannot_be_counted_is_not_given(tmp_path: Path) -> None:
    ids = torch.arange(6) % VOCABULARY
    data = [dict(input_ids=ids[i], targets=ids[i]) for i in range(6)]
    found = []
    for size, accumulate in ((2, 3), (6, 1)):
        torch.manual_seed(0)
        runner = make_runner(
            tmp_path / str(size), model=Divides(), train_cfg=dict(max_epochs=1),
            train_dataloader=dict(dataset=data, batch_size=size, shuffle=False, collate_fn="default_collate"),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.5), accumulative_counts=accumulate),
        )  # fmt: skip
        runner.train()
        found.append(runner.model.logits.weight.detach())
    torch.testing.assert_close(*found)


class Means(nn.Module):
    """A user's own model, which gives the mean over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())}


class OwnStep(Means):
    """With a step of its own; so it would be for a model of transformers."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(**data)
        optim_wrapper.update_params(losses["loss"])
        return losses


@pytest.mark.parametrize("model, way_out", [(Means, "define loss_weight"), (OwnStep, "unless train_step weighs them")])
def test_a_model_that_gives_means_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any, way_out: str
) -> None:
    run(tmp_path, ALONE, 1, 8, model)
    said = "".join(capsys.readouterr())
    assert said.count("micro-batches with 1 and 16 labels that count have the same weight") == said.count(way_out) == 1


class MeantMeans(Means):
    """Says that it means it so."""

    loss_weight = None


@pytest.mark.parametrize(
    "model, batch, accumulate, labelled",
    [(Means, 8, 1, None), (Means, 1, 8, lambda i: 5), (MeantMeans, 1, 8, None)],
    ids=["one batch", "equal", "meant so"],
)
def test_a_model_that_gives_means_is_not_told_in_vain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any, batch: int, accumulate: int, labelled: Any
) -> None:
    run(tmp_path, ALONE, batch, accumulate, model, data(labelled) if labelled else None)
    assert "labels that count" not in "".join(capsys.readouterr())
