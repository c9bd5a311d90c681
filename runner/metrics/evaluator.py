"""Evaluator: the metrics of validation or testing, and how they are built."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ...core.base.config import refuse_foreign
from ...core.base.errors import ConfigError
from ...core.base.registry import EVALUATOR, METRICS
from ...core.comm.topology import Topology
from ..data.collate import pseudo_collate
from ..data.user_loaders import length_of
from .base import BaseMetric
from .torchmetrics import TorchMetric, is_torchmetric, is_torchmetric_class


@EVALUATOR.register_module()
class Evaluator:
    """Evaluates several metrics together.

    Args:
        metrics: a metric, one of torchmetrics, or ``dict(type=...)``; or a list of them.

    Raises:
        ConfigError: one of them is no metric, or its arguments are invalid.
    """

    deals_batches = False
    """Whether processes have whole batches in turn, and not samples; set by the loop. Results are in that order then."""

    def __init__(self, metrics: Any, *, where: str = "evaluator") -> None:
        self.metrics: list[BaseMetric] = [_built(item, key) for item, key in _items(metrics, f"{where}.metrics")]

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

    @property
    def writes_files(self) -> bool:
        """True if one of the metrics writes a file when it is evaluated."""
        return any(metric.writes_files for metric in self.metrics)

    def to(self, device: torch.device) -> None:
        """Move the state of all metrics to ``device``."""
        for metric in self.metrics:
            metric.to(device)

    def reset(self) -> None:
        """Reset every metric, also those that were appended to ``metrics`` meanwhile; called before every evaluation."""
        self.metrics[:] = [_built(metric, f"evaluator.metrics[{i}]") for i, metric in enumerate(self.metrics)]
        self.topology = self.topology
        for metric in self.metrics:
            metric.reset()
            metric._ends = []

    def process(self, data_samples: Any, data_batch: Any = None) -> None:
        """Pass one batch to every metric; of a process whose outputs do not count, nothing is passed.

        Args:
            data_samples: what the model predicted. Samples in a list or tuple that have ``to_dict`` (MMEngine's data
                elements) are passed as dicts.
            data_batch: the batch as the dataloader gave it.
        """
        topology = self.topology
        if topology is not None and not topology.reports:
            return
        samples = as_dicts(data_samples)
        for metric in self.metrics:
            with metric._around_process():
                metric.process(data_batch, samples)
            self._end_batch(metric)

    def _end_batch(self, metric: Any) -> None:
        if self.deals_batches:
            metric._ends.append(len(metric.results))

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """Return all metrics by name, on every process; a collective.

        Raises:
            ConfigError: two metrics have the same name.
        """
        found: dict[str, Any] = {}
        for metric in self.metrics:
            add_metrics(found, metric.evaluate(size))
        return found

    def offline_evaluate(
        self, data_samples: Iterable[Any], data: Iterable[Any] | None = None, chunk_size: int = 1
    ) -> dict[str, Any]:
        """Return all metrics of predictions that were made before; a collective.

        Args:
            data_samples: predictions, one for each sample. Several processes each give their own.
            data: the samples they belong to, as the dataset gives them; without it metrics get None.
            chunk_size: number of samples that are passed to the metrics at once.

        Raises:
            ConfigError: ``data`` has more or fewer samples than ``data_samples``.
        """
        if chunk_size < 1:
            raise ConfigError(f"offline_evaluate.chunk_size: {chunk_size} is not allowed, give 1 or more")
        given, predicted = length_of(data), length_of(data_samples)
        if None not in (given, predicted) and given != predicted:
            raise ConfigError(f"offline_evaluate.data: has {given} samples for {predicted} predictions, give as many")
        self.reset()
        batches = None if data is None else _chunks(data, chunk_size)
        for chunk in _chunks(data_samples, chunk_size):
            batch = None if batches is None else next(batches, [])
            if batch is not None and len(batch) != len(chunk):
                raise ConfigError("offline_evaluate.data: has fewer samples than data_samples, give as many")
            self.process(chunk, None if batch is None else pseudo_collate(batch))
        if batches is not None and next(batches, None):
            raise ConfigError("offline_evaluate.data: has more samples than data_samples, give as many")
        return self.evaluate()


def as_dicts(data_samples: Any) -> Any:
    """Return predictions with samples that have ``to_dict`` as dicts; anything but a list or tuple as it is."""
    if type(data_samples) not in (list, tuple) or not any(map(_has_to_dict, data_samples)):
        return data_samples
    return [sample.to_dict() if _has_to_dict(sample) else sample for sample in data_samples]


def _has_to_dict(sample: Any) -> bool:
    return callable(getattr(sample, "to_dict", None)) and not isinstance(sample, type)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    source = iter(items)
    while chunk := list(islice(source, size)):
        yield chunk


def add_metrics(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the metrics of ``more`` to ``found``.

    Raises:
        ConfigError: two metrics have the same name.
    """
    for name, value in more.items():
        if name in found:
            raise ConfigError(f'evaluator: two metrics are called "{name}", give one a prefix')
        if name in ("time", "data_time", "step"):
            raise ConfigError(f'evaluator: a metric is called "{name}", as a figure of the log is, give it a prefix')
        found[name] = value


def check_evaluator(cfg: Any, where: str) -> None:
    """Raise ConfigError if an evaluator's configuration is invalid; nothing is built."""
    if isinstance(cfg, Evaluator):
        return
    if (spec := _evaluator_config(cfg, where)) is not None:
        EVALUATOR.check(spec, where)
        if "metrics" in spec:
            _check_metrics(spec["metrics"], f"{where}.metrics")
        return
    _check_metrics(cfg, where)


def _check_metrics(cfg: Any, where: str) -> None:
    for item, key in _items(cfg, where):
        if not isinstance(item, BaseMetric) and not is_torchmetric(item):
            _refuse_other_classes(item.get("type") if isinstance(item, Mapping) else item, key)
            kind = METRICS.check(item, key)
            _refuse_other_classes(kind, key)
            if inspect.isclass(kind) and not issubclass(kind, BaseMetric) and not is_torchmetric_class(kind):
                raise ConfigError(f"{key}.type: {kind.__name__} is no metric, subclass flextrain.BaseMetric")
            if inspect.isabstract(kind):
                missing = " and ".join(sorted(getattr(kind, "__abstractmethods__", ())))
                raise ConfigError(f"{key}.type: {kind.__name__} does not define {missing}")
    if not _items(cfg, where):
        raise ConfigError(f"{where}: is empty, give at least one metric")


def _refuse_other_classes(given: Any, key: str) -> None:
    """Raise ConfigError if ``given`` is a metric or evaluator of another library, or its class."""
    refuse_foreign(given, key, "flextrain.BaseMetric", EVALUATOR)
    if hasattr(given, "process") and not inspect.isclass(given):
        raise ConfigError(f"{key}: {type(given).__name__} is no metric, subclass flextrain.BaseMetric")


def build_evaluator(cfg: Any, where: str) -> Evaluator:
    """Build an Evaluator.

    Args:
        cfg: an Evaluator, or ``dict(type="Evaluator", metrics=...)`` with a subclass's name or class as ``type`` too;
            otherwise what Evaluator takes as ``metrics``.
        where: the configuration key, for messages.
    """
    if isinstance(cfg, Evaluator):
        return cfg
    if (spec := _evaluator_config(cfg, where)) is None:
        return Evaluator([_built(item, key) for item, key in _items(cfg, where)])
    built = EVALUATOR.build(spec, where)
    if not isinstance(built, Evaluator):
        raise ConfigError(f"{where}.type: gave {type(built).__name__}, which is no Evaluator")
    return built


def _evaluator_config(cfg: Any, where: str) -> dict[str, Any] | None:
    """Return the configuration of an evaluator with its ``type``; None if ``cfg`` is one of metrics."""
    if isinstance(cfg, Mapping):
        kind = cfg.get("type", Evaluator if "metrics" in cfg else None)
    else:
        kind = cfg
    if isinstance(kind, str) and kind not in EVALUATOR:
        kind = METRICS.resolve(kind, f"{where}.type") if set(kind) & set(":.") else None
    if isinstance(kind, str) or (inspect.isclass(kind) and issubclass(kind, Evaluator)):
        return {**(cfg if isinstance(cfg, Mapping) else {}), "type": kind}
    return None


def _built(item: Any, where: str) -> BaseMetric:
    refuse_foreign(item, where, "flextrain.BaseMetric")
    metric = item if isinstance(item, BaseMetric) or is_torchmetric(item) else METRICS.build(item, where)
    if is_torchmetric(metric):
        metric = TorchMetric(metric)
    if not isinstance(metric, BaseMetric):
        raise ConfigError(f"{where}.type: {type(metric).__name__} is no metric, subclass flextrain.BaseMetric")
    if not hasattr(metric, "results"):
        raise ConfigError(f"{where}: {type(metric).__name__}.__init__ has to call super().__init__()")
    return metric


def _items(cfg: Any, where: str) -> Sequence[tuple[Any, str]]:
    """Return the metrics of a configuration, each with its key."""
    if isinstance(cfg, (list, tuple)):
        return [(item, f"{where}[{i}]") for i, item in enumerate(cfg)]
    return [(cfg, where)]
