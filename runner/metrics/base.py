"""Metrics over all processes, with every sample counted once."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.comm import collectives as dist
from ...core.comm.topology import Topology
from ...core.device import to_device
from ...core.errors import ConfigError
from ...core.registry import METRICS

_NOTHING = object()


class BaseMetric(ABC):
    """Base class of metrics: ``process`` stores results of each batch, ``compute_metrics`` gets those of all processes.

    Args:
        collect_device: "cpu" or "gpu", accepted for MMEngine's configurations; results are always gathered on the CPU.
        prefix: prefix of every name, as in ``prefix/accuracy``; default: the class's ``default_prefix``.
    """

    default_prefix: ClassVar[str | None] = None
    topology: Topology | None = None
    """The strategy's, set by the loop: one process of each data shard has results. None: every process has results."""

    def __init__(self, collect_device: Literal["cpu", "gpu"] = "cpu", prefix: str | None = None) -> None:
        self.prefix = prefix or self.default_prefix
        self.results: list[Any] = []
        self.dataset_meta: dict[str, Any] | None = None

    @abstractmethod
    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        """Append to ``self.results`` what the metric needs of a batch's data and of the model's predictions."""

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the metrics by name, from the results of all processes; runs on rank 0."""

    def to(self, device: torch.device) -> None:  # noqa: B027 - optional
        """Move the metric's state to ``device``; a BaseMetric has no state on a device."""

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """Return the metrics of everything processed since the last reset, on every process, then reset; a collective.

        Args:
            size: number of samples, if a sampler repeats some at the end to make all processes even. Results beyond it,
                fewer than there are data shards, are dropped. None keeps all. Results are in the sampler's order if
                there is one for each sample.
        """
        topology = self.topology or Topology()
        if topology.reports and not self.results:
            warnings.warn(
                f"{type(self).__name__}: got no results, process() appended nothing to self.results", stacklevel=2
            )
        own = (topology.data.index, to_device(self.results, torch.device("cpu"))) if topology.reports else None
        gathered = dist.gather_object(own)
        metrics: dict[str, Any] = {}
        if gathered is not None:
            parts = [results for _, results in sorted(filter(None, gathered), key=lambda part: part[0])]
            in_turn = chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING))
            results = [result for result in in_turn if result is not _NOTHING]
            if size is not None and len(results) - size < len(parts):
                results = results[:size]
            metrics = self._named(self.compute_metrics(results))
        self.reset()
        return dist.broadcast_object(metrics)

    def reset(self) -> None:
        """Drop all results, also those of an evaluation that an exception ended; called before every evaluation."""
        self.results.clear()

    def _named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self.prefix}/{name}" if self.prefix else name: _number(value) for name, value in metrics.items()}


class TorchMetric(BaseMetric):
    """A torchmetrics metric or collection; torchmetrics keeps its state on the device and combines it over processes.

    The model's predictions are passed to ``update``: a tuple or list as positional arguments, a dict by name.
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
        parts = list(self.metric.values()) if isinstance(self.metric, nn.ModuleDict) else [self.metric]
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
        if not isinstance(item, BaseMetric) and not _is_torchmetric(item):
            kind = METRICS.check(item, key)
            if inspect.isclass(kind) and not issubclass(kind, BaseMetric) and not _is_torchmetric_class(kind):
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
        metric = item if isinstance(item, BaseMetric) or _is_torchmetric(item) else METRICS.build(item, key)
        if _is_torchmetric(metric):
            metric = TorchMetric(metric)
        if not isinstance(metric, BaseMetric):
            raise ConfigError(f"{key}.type: {type(metric).__name__} is no metric")
        built.append(metric)
    return Evaluator(built)


def _as_list(cfg: Any) -> list[Any]:
    return list(cfg) if isinstance(cfg, (list, tuple)) else [cfg]


def _is_torchmetric(value: Any) -> bool:
    return _is_torchmetric_class(type(value))


def _is_torchmetric_class(kind: type) -> bool:
    # torchmetrics' metrics are modules with these three methods; this test does not import torchmetrics.
    return issubclass(kind, nn.Module) and all(hasattr(kind, name) for name in ("update", "compute", "reset"))


def _number(value: Any) -> Any:
    """Return a metric as a plain number if it is one."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value


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


METRICS.add_lookup(_torchmetric, lambda: ())
