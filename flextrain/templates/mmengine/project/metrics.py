"""Metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flextrain import METRICS, BaseMetric


@METRICS.register_module()
class PictureAccuracy(BaseMetric):
    """Percentage of pictures whose class is recognised."""

    def process(self, data_batch: Any, data_samples: tuple[Tensor, Tensor]) -> None:
        logits, labels = data_samples
        self.results.extend((logits.argmax(dim=1) == labels).tolist())

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": 100 * sum(results) / len(results)}
