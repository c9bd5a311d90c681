"""A language model with MMEngine's modes, dense or a mixture of experts, its variants, and runs of it on meshes and on one device."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flextrain import BaseDataPreprocessor, BaseMetric, BaseModel, BaseTTAModel, FlexibleRunner
from flextrain.testing.loop import alone
from flextrain.testing.sessions import whole_model

from ..device import DEVICE
from .models import MATRICES, VOCABULARY, Mixture, Plain, PlainBlock, sample

Data = dict[str, Tensor]
SAMPLES, EVALUATED, BATCH = 36, 21, 8  # five micro-batches, the last one of half the samples, in windows of two


class Graded(Plain):
    """Gives a loss, or its predictions beside the targets; parameters whose name begins with one of ``frozen`` are frozen."""

    def __init__(self, sparse: bool = False, frozen: Sequence[str] = (), tied: bool = False) -> None:
        super().__init__(Mixture if sparse else PlainBlock, tied=tied)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None, mode: str = "loss"
    ) -> Any:
        if mode == "loss":
            return super().forward(input_ids, labels, position_ids)
        logits = super().forward(input_ids, None, position_ids)
        return logits if mode == "tensor" else (logits.argmax(-1), labels)

    def loss_weight(self, data_batch: Data) -> Tensor:
        """Samples of the last micro-batch count as the others."""
        return (data_batch["labels"] != -100).sum().float()


class Steps(Graded):
    """Evaluates with steps of its own, and asks a parameter for the device."""

    def val_step(self, data: Data) -> Any:
        return self(**data, mode="tensor").argmin(-1), data["labels"]

    test_step = val_step

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids.to(next(self.parameters()).device), *args, **kwargs)


class CallsForward(Graded):
    def val_step(self, data: Data) -> Any:
        predicted, labels = self.forward(**data, mode="predict")
        return predicted, labels


class CallsTwice(Graded):
    def val_step(self, data: Data) -> Any:
        other = {**data, "input_ids": (data["input_ids"] + 1) % VOCABULARY}
        return (self(**data, mode="tensor") + self(**other, mode="tensor")).argmax(-1), data["labels"]


class CallsParts(Graded):
    """It is updated and evaluated by its parts."""

    loss_weight = None  # type: ignore[assignment]

    def _logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def train_step(self, data: Data, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            logits = self._logits(data["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
        optim_wrapper.update_params(loss)
        return {"loss": loss}

    def val_step(self, data: Data) -> Any:
        return self._logits(data["input_ids"]).argmax(-1), data["labels"]


class RunsForward(BaseModel, Graded):
    """Changes what its forward gives."""

    def __init__(self, sparse: bool = False) -> None:
        Graded.__init__(self, sparse)
        self.data_preprocessor = BaseDataPreprocessor()

    forward = Graded.forward

    def _run_forward(self, data: Data, mode: str) -> Any:
        found = self(**data, mode=mode)
        return {"loss": found["loss"] * 2, "single": found["loss"].detach()} if mode == "loss" else found

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        total, values = super().parse_losses(losses)
        return total * 0.5, values


class Separate(Graded):
    """Its predictions are a dict, of which a BaseTTAModel merges samples."""

    def forward(self, *args: Any, mode: str = "loss", **kwargs: Any) -> Any:
        found = super().forward(*args, mode=mode, **kwargs)
        return dict(predicted=found[0], labels=found[1]) if mode == "predict" else found


class Merge(BaseTTAModel):
    def merge_preds(self, data_samples_list: list[tuple[Any, ...]]) -> Any:
        agreed = [torch.maximum(a["predicted"], b["predicted"]) for a, b in data_samples_list]
        return torch.stack(agreed), torch.stack([a["labels"] for a, _ in data_samples_list])


class Correct(BaseMetric):
    """How many predictions are right, and of how many samples."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        predicted, target = data_samples
        self.results += (predicted == target).double().mean(1).tolist()

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"correct": round(sum(results) / len(results), 10), "count": len(results)}


def with_another(items: list[Data]) -> dict[str, list[Tensor]]:
    """A batch of two augmentations."""
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    ids = (batch["input_ids"] + 1) % VOCABULARY
    return {"input_ids": [batch["input_ids"], ids], "labels": [batch["labels"]] * 2}


def loader(count: int, seed: int, batch_size: int, *, collate: Any = None, shuffle: bool = False) -> dict[str, Any]:
    batch = sample("plain", count, seed)
    items = [{name: values[i] for name, values in batch.items()} for i in range(count)]
    sampler = dict(type="DefaultSampler", shuffle=shuffle)
    collate = collate or dict(type="default_collate")
    return dict(batch_size=batch_size, dataset=items, sampler=sampler, collate_fn=collate)


OF_MIXTURES = {rule.replace("*.", "*.attention.", 1): style for rule, style in MATRICES.items()}
EXPERTS = {"layers.*.experts": "experts"}
MESH = dict(type="MeshStrategy", device=DEVICE, timeout_s=300)
ONE = dict(type="SingleDeviceStrategy", device=DEVICE)
# Processes, of which so many read different samples; whether the model is a mixture of experts; and options.
MESHES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "dp2": (2, 2, False, dict(MESH)),
    "tp2": (2, 1, False, dict(MESH, tp=2, plan=MATRICES)),
    "cp2": (2, 1, False, dict(MESH, cp=2)),
    "ep2": (2, 2, True, dict(MESH, ep=2, plan=EXPERTS)),
    "pp2": (2, 1, False, dict(MESH, pp=2)),
    "dp2xtp2": (4, 2, False, dict(MESH, tp=2, plan=MATRICES)),
    "dp2xcp2": (4, 2, False, dict(MESH, cp=2)),
    "pp2xdp2": (4, 2, False, dict(MESH, pp=2)),
    "pp2xtp2": (4, 1, False, dict(MESH, pp=2, tp=2, plan=MATRICES)),
    "pp2xep2": (4, 2, True, dict(MESH, pp=2, ep=2, plan=EXPERTS)),
    "ep2xtp2": (2, 1, True, dict(MESH, tp=2, ep=2, plan={**EXPERTS, **OF_MIXTURES})),
}


def optim(**options: Any) -> dict[str, Any]:
    """A wrapper that accumulates two micro-batches, and clips each time."""
    # With its usual eps, AdamW makes one bit of the initial weights 5e-12 of the final ones, where a gradient is almost zero.
    adamw = dict(type="AdamW", lr=1e-2, weight_decay=0.05, eps=1e-6)
    return dict(optimizer=adamw, clip_grad=dict(max_norm=0.1), accumulative_counts=2) | options


def runner(
    strategy: Mapping[str, Any],
    folder: Path,
    shards: int,
    sparse: bool,
    *,
    kind: type[Graded] = Graded,
    graded: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    **options: Any,
) -> FlexibleRunner:
    """A run; ``graded`` are further arguments of the model, ``more`` further options of the strategy."""
    given: dict[str, Any] = dict(
        model=functools.partial(kind, sparse, **graded or {}),  # built without memory where the strategy can
        work_dir=folder,
        strategy={**strategy, **(more or {})},
        train_dataloader=loader(SAMPLES, 0, BATCH // shards, shuffle=True),
        val_dataloader=loader(EVALUATED, 1, 2),
        val_cfg=dict(),
        val_evaluator=dict(type=Correct),
        optim_wrapper=optim(),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        randomness=dict(seed=7),
        default_hooks=dict(checkpoint=dict(interval=1)),
    )
    return FlexibleRunner(**given | options)


Outcome = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any], int]
"""Final weights, metrics of validation and of testing, updates."""


def run(strategy: Mapping[str, Any], folder: Path, shards: int, sparse: bool, **options: Any) -> Outcome:
    made = runner(strategy, folder, shards, sparse, **options)
    try:
        made.train()
        validates, tests = options.get("val_cfg", {}) is not None, "test_dataloader" in options
        metrics = made.val() if validates else {}, made.test() if tests else {}
        return whole_model(made.strategy), *metrics, made.iter
    finally:
        made.strategy.leave()


def on_one_device(sparse: bool, *, more: Any = None, folder: Path | None = None, **options: Any) -> Outcome:
    """The same by one process, without options that only a mesh has; in ``folder``, or in one that is deleted."""
    with alone(), tempfile.TemporaryDirectory() as other:
        return run(ONE, folder or Path(other), 1, sparse, **options)
