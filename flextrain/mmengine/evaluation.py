"""MMEngine's Evaluator and metrics as an Evaluator of flextrain."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import mmengine.dist.utils
from mmengine.evaluator import BaseMetric, DumpResults
from mmengine.evaluator import Evaluator as Theirs
from mmengine.registry import EVALUATOR, METRICS, DefaultScope

from ..core.base.config import check_call
from ..core.base.errors import ConfigError
from ..core.base.registry import METRICS as OUR_METRICS
from ..core.comm.agreement import told_by_rank_0
from ..core.comm.topology import Topology
from ..runner.metrics.base import gather_results
from ..runner.metrics.evaluator import Evaluator, build_evaluator
from .registries import factory, found_in_scope, refuse_unknown, without


def adapted_evaluator(cfg: Any, where: str, scope: str | None) -> Any:
    """``cfg`` with MMEngine's metrics adapted: an Evaluator if there are any; otherwise ``cfg`` as it is.

    Raises:
        ConfigError: an argument that a metric does not have.
    """
    if isinstance(cfg, Theirs):
        return AdaptedEvaluator(lambda: cfg, None, scope)
    if isinstance(cfg, Evaluator) or cfg is None:
        return cfg
    if isinstance(cfg, Mapping) and "type" in cfg:
        kind = found_in_scope(cfg, EVALUATOR)
        if isinstance(kind, type) and issubclass(kind, Theirs):
            arguments = without(cfg, "type")
            check_call(factory(kind), arguments, where)
            return AdaptedEvaluator(lambda: kind(**arguments), None, scope)
    items = list(cfg) if isinstance(cfg, (list, tuple)) else [cfg]
    theirs: list[Any] = []
    others: list[Any] = []
    for i, item in enumerate(items):
        key = f"{where}[{i}]" if isinstance(cfg, (list, tuple)) else where
        if _is_theirs(item, key):
            theirs.append(item)
        else:
            others.append(without(item) if isinstance(item, Mapping) else item)
    if not theirs:
        return others if isinstance(cfg, (list, tuple)) else others[0]
    return AdaptedEvaluator(lambda: Theirs(theirs), build_evaluator(others, where) if others else None, scope)


def _is_theirs(item: Any, where: str) -> bool:
    if isinstance(item, BaseMetric):
        return True
    kind = item["type"] if isinstance(item, Mapping) and "type" in item else item
    found = found_in_scope(item, METRICS) if isinstance(kind, (str, type)) else None
    if found is None and isinstance(item, Mapping):
        refuse_unknown(kind, METRICS, OUR_METRICS, f"{where}.type")
    if not (isinstance(found, type) and issubclass(found, BaseMetric)):
        return False
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: {kind!r} is not allowed, give dict(type=...)")
    check_call(factory(found), without(item, "type"), where)
    return True


class AdaptedEvaluator(Evaluator):
    """An Evaluator that leaves everything but the communication to one of MMEngine.

    The results of all data shards come to rank 0 in the order of the samples, each sample once. There the metrics are
    evaluated as in a run of one process, because MMEngine gathers in a way that needs equally many samples on every
    process. Results are gathered by ``self.results`` of each metric.

    Args:
        build: makes MMEngine's Evaluator, when the loop is built.
        others: flextrain's or torchmetrics' metrics beside them.
        scope: the default scope for building.
    """

    def __init__(self, build: Any, others: Evaluator | None, scope: str | None) -> None:
        super().__init__(others.metrics if others is not None else ())
        self._build, self._scope = build, scope
        self._theirs: Theirs | None = None
        self.size = sys.maxsize
        """Number of samples in the dataset; MMEngine drops results beyond it."""

    @property
    def theirs(self) -> Theirs:
        """MMEngine's Evaluator; what it wraps has the results of this process."""
        if self._theirs is None:
            with DefaultScope.overwrite_default_scope(self._scope):
                self._theirs = self._build()
        return self._theirs

    _topology: Topology | None = None

    @property
    def topology(self) -> Topology | None:
        """See Evaluator."""
        return self._topology

    @topology.setter
    def topology(self, topology: Topology | None) -> None:
        self._topology = topology
        for metric in self.metrics:
            metric.topology = topology

    @property
    def dataset_meta(self) -> dict[str, Any] | None:
        """See Evaluator."""
        return self.theirs.dataset_meta  # type: ignore[no-any-return]

    @dataset_meta.setter
    def dataset_meta(self, meta: dict[str, Any] | None) -> None:
        if meta is not None:
            self.theirs.dataset_meta = meta
        for metric in self.metrics:
            metric.dataset_meta = meta

    @property
    def writes_files(self) -> bool:
        """See Evaluator."""
        return super().writes_files or any(isinstance(metric, DumpResults) for metric in self.theirs.metrics)

    def reset(self) -> None:
        """See Evaluator; metrics of MMEngine that were appended meanwhile join the others of MMEngine."""
        self.theirs.metrics += [metric for metric in self.metrics if isinstance(metric, BaseMetric)]
        self.metrics[:] = [metric for metric in self.metrics if not isinstance(metric, BaseMetric)]
        super().reset()
        for metric in self.theirs.metrics:
            metric.results.clear()
            metric._ends = []

    def process(self, data_samples: Any, data_batch: Any = None) -> None:
        """See Evaluator."""
        if self._topology is not None and not self._topology.reports:
            return
        self.theirs.process(data_samples=data_samples, data_batch=data_batch)
        for metric in self.theirs.metrics:
            self._end_batch(metric)
        super().process(data_samples, data_batch)

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """See Evaluator."""
        found = super().evaluate(size)
        gathered = gather_results(self.theirs.metrics, self.topology or Topology())
        compute = partial(self._evaluate_all, gathered or [])
        values = told_by_rank_0(compute, at=f"{type(self.theirs).__name__}.evaluate on rank 0", waits_long=True)
        self.reset()
        if twice := sorted(found.keys() & values.keys()):
            raise ConfigError(f'evaluator: two metrics are called "{twice[0]}", give one a prefix')
        return {**found, **values}

    def _evaluate_all(self, gathered: list[list[Any]]) -> dict[str, Any]:
        for metric, results in zip(self.theirs.metrics, gathered, strict=True):
            metric.results = results
        with _as_one_process():
            return dict(self.theirs.evaluate(self.size))


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Context in which mmengine.dist sees this process alone, so that its collectives do nothing."""
    module = mmengine.dist.utils
    original = module.is_distributed
    module.is_distributed = lambda: False
    try:
        yield
    finally:
        module.is_distributed = original
