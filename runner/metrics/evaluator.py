"""Evaluator: the metrics of validation or testing, and how they are built."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from ...core.comm.topology import Topology
from ...core.errors import ConfigError
from ...core.registry import METRICS
from .base import BaseMetric
from .torchmetrics import TorchMetric, is_torchmetric, is_torchmetric_class


class Evaluator:
    """Evaluates several metrics together.

    Args:
        metrics: built metrics.
    """

    def __init__(self, metrics: Iterable[BaseMetric]) -> None:
        self.metrics = list(metrics)

    @property
    def dataset_meta(self) -> dict[str, Any] | None:
        """The dataset's ``metainfo``, such as class names, for metrics that need it."""
        return self.metrics[0].dataset_meta if self.metrics else None

    @dataset_meta.setter
    def dataset_meta(self, meta: dict[str, Any] | None) -> None:
        for metric in self.metrics:
            metric.dataset_meta = meta

    @property
    def topology(self) -> Topology | None:
        """The processes that have results; set by the loop, for all metrics."""
        return self.metrics[0].topology if self.metrics else None

    @topology.setter
    def topology(self, topology: Topology | None) -> None:
        for metric in self.metrics:
            metric.topology = topology

    def to(self, device: torch.device) -> None:
        """Move the state of all metrics to ``device``."""
        for metric in self.metrics:
            metric.to(device)

    def reset(self) -> None:
        """Reset every metric; called before every evaluation."""
        for metric in self.metrics:
            metric.reset()

    def process(self, data_samples: Any, data_batch: Any = None) -> None:
        """Pass one batch to every metric."""
        for metric in self.metrics:
            metric.process(data_batch, data_samples)

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """Return all metrics by name, on every process; a collective.

        Raises:
            ConfigError: two metrics have the same name.
        """
        found: dict[str, Any] = {}
        for metric in self.metrics:
            for name, value in metric.evaluate(size).items():
                if name in found:
                    raise ConfigError(f'evaluator: two metrics are called "{name}", give one a prefix')
                found[name] = value
        return found


def check_evaluator(cfg: Any, where: str) -> None:
    """Raise ConfigError if an evaluator's configuration is invalid; nothing is built."""
    if isinstance(cfg, Evaluator):
        return
    for i, item in enumerate(_as_list(cfg)):
        key = f"{where}[{i}]" if isinstance(cfg, (list, tuple)) else where
        if not isinstance(item, BaseMetric) and not is_torchmetric(item):
            kind = METRICS.check(item, key)
            if inspect.isclass(kind) and not issubclass(kind, BaseMetric) and not is_torchmetric_class(kind):
                raise ConfigError(f"{key}.type: {kind.__name__} is no metric, subclass flextrain.BaseMetric")
    if not _as_list(cfg):
        raise ConfigError(f"{where}: is empty, give at least one metric")


def build_evaluator(cfg: Any, where: str) -> Evaluator:
    """Build the Evaluator from ``dict(type=...)``, a metric or torchmetrics metric, a list of them, or an Evaluator."""
    if isinstance(cfg, Evaluator):
        return cfg
    built = []
    for i, item in enumerate(_as_list(cfg)):
        key = f"{where}[{i}]" if isinstance(cfg, (list, tuple)) else where
        metric = item if isinstance(item, BaseMetric) or is_torchmetric(item) else METRICS.build(item, key)
        if is_torchmetric(metric):
            metric = TorchMetric(metric)
        if not isinstance(metric, BaseMetric):
            raise ConfigError(f"{key}.type: {type(metric).__name__} is no metric")
        built.append(metric)
    return Evaluator(built)


def _as_list(cfg: Any) -> list[Any]:
    return list(cfg) if isinstance(cfg, (list, tuple)) else [cfg]
