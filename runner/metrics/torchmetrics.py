"""TorchMetric: a metric of the torchmetrics package as one of ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...core.base.registry import METRICS
from ...core.comm import collectives as dist
from .base import BaseMetric


class TorchMetric(BaseMetric):
    """A torchmetrics metric or collection; torchmetrics keeps its state on the device and combines it over processes.

    The model's predictions are passed to ``update``: a tuple or list as positional arguments, a dict by name,
    one tensor as it is.
    """

    def __init__(self, metric: Any, prefix: str | None = None) -> None:
        super().__init__(prefix=prefix)
        self.metric = metric
        self._updates = 0

    def to(self, device: torch.device) -> None:
        """See BaseMetric."""
        self.metric.to(device)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Update the metric with the predictions of one batch."""
        self._updates += 1
        if isinstance(data_samples, Mapping):
            self.metric.update(**data_samples)
        elif isinstance(data_samples, torch.Tensor):  # not its rows
            self.metric.update(data_samples)
        else:
            self.metric.update(*data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the value under the metric's class name, or the values of a collection under their own names."""
        value = self.metric.compute()
        return dict(value) if isinstance(value, Mapping) else {type(self.metric).__name__: value}

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """See BaseMetric."""
        counts = dist.all_gather_object(self._updates)
        ranks = [rank for rank, count in enumerate(counts) if count]
        if 0 < len(ranks) < len(counts):
            metrics = self._evaluate_on(ranks)
        else:
            metrics = self._named(self.compute_metrics([]))
        self.reset()
        return metrics

    def reset(self) -> None:
        """See BaseMetric."""
        self.metric.reset()
        self._updates = 0

    def _evaluate_on(self, ranks: list[int]) -> dict[str, Any]:
        """Compute the metrics on the ranks that have seen a batch, and broadcast them.

        A metric that keeps predictions in lists does not join a collective if its list is empty (torchmetrics 1.9), and
        the other ranks would wait for it forever.
        """
        # Of a collection and of a wrapper of other metrics, those inside combine their own state.
        parts = [part for part in self.metric.modules() if hasattr(part, "process_group")]
        before = [part.process_group for part in parts]
        metrics: dict[str, Any] = {}
        with dist.group_of(ranks) as group:
            if group is not None:
                for part in parts:
                    part.process_group = group
                metrics = self._named(self.compute_metrics([]))
        for part, own in zip(parts, before, strict=True):
            part.process_group = own
        return dist.broadcast_object(metrics, ranks[0])


def is_torchmetric(value: Any) -> bool:
    return is_torchmetric_class(type(value))


def is_torchmetric_class(kind: type) -> bool:
    # torchmetrics' metrics are modules with these three methods; this test does not import torchmetrics.
    return issubclass(kind, nn.Module) and all(hasattr(kind, name) for name in ("update", "compute", "reset"))


def _torchmetric(name: str) -> Any:
    try:
        import torchmetrics
        import torchmetrics.classification
        import torchmetrics.regression
        import torchmetrics.text
    except ModuleNotFoundError:
        return None
    for module in (torchmetrics, torchmetrics.classification, torchmetrics.regression, torchmetrics.text):
        found = getattr(module, name, None)
        if inspect.isclass(found) and issubclass(found, torchmetrics.Metric):
            return found
    return None


METRICS.add_lookup(_torchmetric)
