"""In-batch negatives: with gather_with_gradient every strategy trains as one device does with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flextrain import BaseMetric, FlexibleRunner, gather_with_gradient
from flextrain.testing import WorkerGroup
from flextrain.testing.sessions import whole_model

pytestmark = pytest.mark.distributed

SAMPLES, BATCH = 27, 12
"""Of one device; of the last three samples of an epoch two processes have two and one, of four the last has none."""


class Pairs(nn.Module):
    """Two towers and a temperature, as CLIP has them; the loss of all pairs, or the mean over those of this process."""

    def __init__(self, own_rows: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.images, self.texts = (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.own_rows, self.recomputes = own_rows, recomputes

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        if self.recomputes and mode == "loss":
            return {"loss": torch.utils.checkpoint.checkpoint(self.loss, x, y, use_reentrant=False)}
        return {"loss": self.loss(x, y)}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        images, texts = (functional.normalize(part, dim=-1) for part in (self.images(x), self.texts(y)))
        every_image, every_text = gather_with_gradient(images), gather_with_gradient(texts)
        if self.own_rows:  # their labels are where they are among all
            labels = (gather_with_gradient(x[:, :1]) == x[:, 0]).int().argmax(0)
            logits = self.scale.exp() * images @ every_text.T, self.scale.exp() * texts @ every_image.T
        else:
            labels = torch.arange(len(every_image), device=x.device)
            logits = self.scale.exp() * every_image @ every_text.T, self.scale.exp() * every_text @ every_image.T
        return sum(functional.cross_entropy(each, labels) for each in logits) / 2  # type: ignore[return-value]


class Loss(BaseMetric):
    """The losses of the batches of validation, each once."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(data_samples["loss"]))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"losses": sorted({round(loss, 6) for loss in results})}


def train(
    work_dir: str, strategy: Any, shards: int, dtype: str = "float64", **options: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        generator = torch.Generator().manual_seed(1)
        data = [
            {"x": torch.randn(6, generator=generator), "y": torch.randn(6, generator=generator)} for _ in range(SAMPLES)
        ]
        loader = dict(dataset=data, batch_size=BATCH // shards, collate_fn=dict(type="default_collate"))
        runner = FlexibleRunner(
            model=dict(type=Pairs, **options),
            work_dir=work_dir,
            strategy=strategy,
            train_dataloader={**loader, "sampler": dict(type="DefaultSampler", round_up=False)},
            val_dataloader=loader,
            val_cfg={},
            val_evaluator=dict(type=Loss),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.3, momentum=0.9)),
            train_cfg=dict(max_epochs=2),
            default_hooks=dict(checkpoint=None),
            randomness=dict(seed=3),
            visualizer=[],
        )
        runner.train()
        found = runner.val(), {key: value.clone() for key, value in whole_model(runner.strategy).items()}
        runner.close()
        return found[1], found[0]
    finally:
        torch.set_default_dtype(torch.float32)


FULL = pytest.mark.full
TP = dict(type="mesh", dp_replicate=2, tp=2, plan={"images.0": "colwise", "images.2": "rowwise"})


@pytest.mark.parametrize(
    "strategy, processes, options",
    [
        pytest.param("ddp", 4, {}, id="ddp_with_none_left"),
        pytest.param("ddp", 4, dict(own_rows=True), id="own_rows", marks=FULL),
        pytest.param("ddp", 2, dict(recomputes=True), id="recomputed", marks=FULL),
        pytest.param("fsdp", 2, {}, id="fsdp"),
        pytest.param("zero1", 2, {}, id="zero1", marks=FULL),
        pytest.param("zero2", 2, {}, id="zero2", marks=FULL),
        pytest.param("zero3", 2, {}, id="zero3"),
        pytest.param(dict(type="mesh", dp_replicate=2), 2, {}, id="dp_replicate", marks=FULL),
        pytest.param(dict(type="mesh", dp_shard=2), 2, {}, id="dp_shard", marks=FULL),
        pytest.param(dict(type="mesh", dp_replicate=2, dp_shard=2), 4, {}, id="dp_replicate_and_shard", marks=FULL),
        pytest.param(TP, 4, {}, id="dp_and_tp"),
    ],
)
def test_as_one_device_with_the_whole_batch(
    tmp_path: Path, workers: Any, workers1: WorkerGroup, strategy: Any, processes: int, options: dict[str, Any]
) -> None:
    """Also in the last update of an epoch and the last batch of validation, where processes have fewer samples, or none."""
    dtype, tolerance = ("float32", 1e-5) if str(strategy).startswith("zero") else ("float64", 1e-11)
    (expected, metrics), *_ = workers1.run(train, str(tmp_path / "one"), None, 1, dtype)
    shards = 2 if strategy is TP else processes
    for found, own in workers(processes).run(train, str(tmp_path / "some"), strategy, shards, dtype, **options):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)
        if not options.get("own_rows"):
            assert own["losses"] == pytest.approx(metrics["losses"], abs=2e-5)
