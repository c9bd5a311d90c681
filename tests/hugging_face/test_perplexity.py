"""Perplexity is that of one device, whatever the batches, the processes and the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from flextrain import BaseModel, FlexibleRunner
from flextrain.core.base.errors import ConfigError
from flextrain.runner.metrics.perplexity import Perplexity
from flextrain.testing import WorkerGroup

from .folders import model_of, runner_of, tokens
from .token_models import TOKEN_MODELS, token_batch


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def llama() -> Any:
    torch.manual_seed(2)
    return model_of("llama")


def evaluate(work_dir: Path, strategy: Any, batch_size: int, source: str | None = None) -> float:
    runner = runner_of(
        work_dir,
        dict(type=llama),
        strategy=strategy,
        val_dataloader=dict(dataset=tokens(13), batch_size=batch_size, collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator=dict(type="Perplexity", source=source),
    )
    found = runner.val()["perplexity"]
    runner.close()
    return float(found)


def expected() -> float:
    """Token by token."""
    model = llama().eval()
    total, count = 0.0, 0
    for sample in tokens(13):
        with torch.no_grad():
            logits = model(sample["input_ids"][None], attention_mask=sample["attention_mask"][None]).logits[0]
        for position in range(1, len(sample["labels"])):
            if (label := sample["labels"][position]) != -100:
                total += float(functional.cross_entropy(logits[position - 1], label))
                count += 1
    return math.exp(total / count)


@pytest.mark.parametrize("source", [None, "logits"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_token_counts_once(tmp_path: Path, batch_size: int, source: str | None) -> None:
    assert evaluate(tmp_path, "single", batch_size, source) == pytest.approx(expected(), rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "count, strategy",
    [
        pytest.param(2, dict(type="fsdp", wrap="blocks"), id="fsdp"),
        pytest.param(2, dict(type="mesh", pp=2), id="pp2"),
        pytest.param(3, "ddp", id="ddp3", marks=pytest.mark.full),
        pytest.param(2, "zero3", id="zero3", marks=pytest.mark.full),
        pytest.param(2, dict(type="mesh", tp=2), id="tp2", marks=pytest.mark.full),
        pytest.param(4, dict(type="mesh", dp_shard=2, tp=2), id="dp2xtp2", marks=pytest.mark.full),
    ],
)
def test_over_processes(workers: Callable[[int], WorkerGroup], tmp_path: Path, count: int, strategy: Any) -> None:
    if "zero" in str(strategy):
        pytest.importorskip("deepspeed")
    wanted = expected()
    for found in workers(count).run(evaluate, tmp_path, strategy, 4):
        assert found == pytest.approx(wanted, rel=1e-5)


class LossOfModel(Perplexity):
    """Computes the loss itself, with whole weights."""

    uses_model = True

    def process(self, data_batch: Any, data_samples: Any) -> None:
        super().process(data_batch, {"loss": self.model(**data_batch).loss})


@pytest.mark.distributed
@pytest.mark.parametrize("given", [{}, {"source": "logits"}, {"type": LossOfModel}], ids=["loss", "logits", "model"])
def test_over_the_processes_of_a_sequence(workers2: WorkerGroup, tmp_path: Path, given: dict[str, Any]) -> None:
    wanted = of_kind("causal", tmp_path / "one", "single", 3)
    for found in workers2.run(of_kind, "causal", tmp_path, dict(type="mesh", cp=2), 1, **given):
        assert found == pytest.approx(wanted, rel=1e-5)


def of_kind(
    name: str, work_dir: Path, strategy: Any, batch_size: int, source: str | None = None, **given: Any
) -> float:
    """The perplexity of three sequences, of which different numbers of labels count, under a model of some kind."""
    torch.manual_seed(4)
    model, batch = TOKEN_MODELS[name](), token_batch(name)
    samples = [{key: value[row] for key, value in batch.items()} for row in range(3)]
    runner = FlexibleRunner(
        model=Wrapped(model) if given.pop("wrapped", False) else model,
        work_dir=work_dir,
        log_level="WARNING",
        strategy=strategy,
        val_dataloader=dict(dataset=samples, batch_size=batch_size, collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator={"type": "Perplexity", "source": source, **given},
    )
    found = runner.val()["perplexity"]
    runner.close()
    return float(found)


def of_every_label(name: str) -> float:
    """The same, token by token, of a model whose logits stand at the positions of their labels."""
    torch.manual_seed(4)
    model, batch = TOKEN_MODELS[name]().eval(), token_batch(name)
    with torch.no_grad():
        logits = model(**batch).logits
    return math.exp(functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


class Wrapped(BaseModel):
    """A user's model with one of transformers in it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.net = model

    def forward(self, mode: str = "tensor", **batch: Any) -> Any:
        return self.net(**batch)


@pytest.mark.parametrize("source", [None, "logits"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["t5", "bert masked"])
def test_every_label_counts_where_none_is_shifted(
    tmp_path: Path, name: str, batch_size: int, source: str | None
) -> None:
    assert of_kind(name, tmp_path, "single", batch_size, source) == pytest.approx(of_every_label(name), rel=1e-5)


@pytest.mark.parametrize("name", ["t5", "prompt tuning", "causal"])
def test_the_loss_of_a_model_in_a_model_is_followed(tmp_path: Path, name: str) -> None:
    if "tuning" in name:
        pytest.importorskip("peft")
    one, three = (of_kind(name, tmp_path, "single", size, wrapped=True) for size in (1, 3))
    assert one == pytest.approx(three, rel=1e-5)
    assert of_kind(name, tmp_path, "single", 2) == pytest.approx(three, rel=1e-5)


def test_a_given_shift_stands(tmp_path: Path) -> None:
    assert of_kind("t5", tmp_path, "single", 1, shift=True) != pytest.approx(of_every_label("t5"), rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "count, strategy",
    [
        pytest.param(2, "fsdp", id="fsdp"),
        pytest.param(2, "ddp", id="ddp", marks=pytest.mark.full),
        pytest.param(2, "zero3", id="zero3", marks=pytest.mark.full),
    ],
)
def test_of_t5_over_processes(workers: Callable[[int], WorkerGroup], tmp_path: Path, count: int, strategy: Any) -> None:
    if "zero" in str(strategy):
        pytest.importorskip("deepspeed")
    wanted = of_every_label("t5")
    for source in (None, "logits"):
        for found in workers(count).run(of_kind, "t5", tmp_path, strategy, 1, source):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_labels_that_are_shifted_already() -> None:
    metric = Perplexity()
    labels, shifted = torch.tensor([[3, 1, 2]]), torch.tensor([[1, 2, -100]])
    logits = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    metric.process({"labels": labels}, {"logits": logits})
    wanted = metric.evaluate()["perplexity"]
    metric.process({"labels": labels, "shift_labels": shifted}, {"logits": logits})
    assert metric.evaluate()["perplexity"] == pytest.approx(wanted)


@pytest.mark.parametrize("given", [0.5, 0.0])
def test_the_auxiliary_loss_of_experts_is_no_loss_of_tokens(given: float) -> None:
    """With ``output_router_logits``, which trains with it, the model's loss contains it in evaluation too."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    small = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=given, **small
        )
    ).eval()
    ids = torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids)
    metric = Perplexity()
    metric._look_at(model)
    metric.process({"labels": ids}, outputs)
    wanted = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert metric.evaluate()["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-5)


def test_an_auxiliary_loss_without_logits_is_told(caplog: pytest.LogCaptureFixture) -> None:
    metric, outputs = Perplexity(), {"loss": torch.tensor(1.5), "aux_loss": torch.tensor(1.0)}
    metric.process({"labels": torch.ones(1, 3)}, outputs)
    assert "auxiliary loss and no logits" in caplog.text
    caplog.clear()
    metric.process({"labels": torch.ones(1, 3)}, outputs)
    assert not caplog.messages
    assert metric.evaluate()["perplexity"] == pytest.approx(math.exp(1.5))


def test_of_masked_models_every_label_counts() -> None:
    metric = Perplexity(shift=False)
    labels = torch.tensor([[3, -100, 2], [-100, -100, -100]])
    metric.process({"labels": labels}, {"loss": torch.tensor(1.5)})
    metric.process({"labels": labels[1:]}, {"loss": torch.tensor(math.nan)})  # has no token
    metric.process({"labels": labels[:, :1]}, {"loss": torch.tensor(3.0)})
    assert metric.evaluate()["perplexity"] == pytest.approx(math.exp((1.5 * 2 + 3.0) / 3))
    assert math.isnan(metric.evaluate()["perplexity"])


def test_the_mean_of_no_tokens_counts_nothing() -> None:
    """Labels on a device are not looked at before the end."""
    found = Perplexity()._sum({"loss": torch.tensor(math.nan)}, torch.empty(0), torch.tensor(0))
    assert float(found) == 0


def test_samples_that_a_sampler_repeats_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    metric = Perplexity()
    metric.process({"labels": torch.tensor([[3, 1, 2]])}, {"loss": torch.tensor(1.5)})
    with caplog.at_level("WARNING", "flextrain"):
        metric.evaluate(1)
    assert "Perplexity: the sampler of the evaluation repeats samples" in caplog.text


@pytest.mark.parametrize(
    "batch, outputs, message",
    [
        ([1], {}, 'needs a batch with a tensor "labels", this one is no dict'),
        ({"input_ids": 1, "label": 2}, {}, "this one has input_ids, label"),
        ({"labels": torch.ones(1, 2)}, {"scores": 1}, "dict has neither loss nor logits"),
        ({"labels": torch.ones(1, 2)}, torch.ones(2), "Tensor has neither loss nor logits"),
        ({"labels": torch.ones(1, 2)}, {"logits": torch.ones(1, 5, 3)}, r"logits of shape \[1, 4, 3\] for labels of"),
    ],
)
def test_what_it_cannot_read_is_told_in_a_line(batch: Any, outputs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Perplexity().process(batch, outputs)
    assert "\n" not in str(raised.value)


def test_another_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source.*logit"):
        evaluate(tmp_path, "single", 1, "logit")
