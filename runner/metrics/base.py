"""Metrics over all processes, with every sample counted once."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, pairwise, zip_longest
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.base.errors import ConfigError, counted
from ...core.comm import collectives as dist
from ...core.comm.agreement import told_by_rank_0
from ...core.comm.topology import Topology
from ...core.device.device import to_device

# Results of all processes on rank 0.


_NOTHING = object()


def gather_results(metrics: Sequence[Any], topology: Topology) -> list[list[Any]] | None:
    """Return the results of all data shards on rank 0, in the order of the samples, and None elsewhere; a collective.

    Args:
        metrics: each has this process's ``results``, and their number after each batch (``_ends``) if whole batches were dealt.
        topology: says which processes have results.
    """
    own = [(to_device(each.results, torch.device("cpu")), getattr(each, "_ends", [])) for each in metrics]
    gathered = dist.gather_object((topology.data.index, own) if topology.reports else None)
    if gathered is None:
        return None
    shards = [own for _, own in sorted(filter(None, gathered), key=lambda shard: shard[0])]
    return [_in_their_order([own[i] for own in shards]) for i in range(len(metrics))]


def _in_their_order(parts: Sequence[tuple[list[Any], list[int]]]) -> list[Any]:
    """Results of several shards in the order of the samples, which were dealt to them in turn, one by one or in batches."""
    if not all((ends or [0])[-1] == len(results) for results, ends in parts):
        return _in_turn([results for results, _ in parts])
    batches = [[results[begin:end] for begin, end in pairwise((0, *ends))] for results, ends in parts]
    return [*chain.from_iterable(_in_turn(batches))]


def _in_turn(parts: Sequence[list[Any]]) -> list[Any]:
    return [item for item in chain.from_iterable(zip_longest(*parts, fillvalue=_NOTHING)) if item is not _NOTHING]


_logger = logging.getLogger("flextrain")


class _Model:
    """``BaseMetric.model``; a metric that sets an attribute of this name has its own."""

    def __get__(self, metric: Any, kind: type[Any]) -> Any:
        if metric is None:
            return self
        name = type(metric).__name__
        if not metric.uses_model:
            raise ConfigError(
                f"evaluator: {name} reads self.model, which is there if the class says so; set uses_model = True in the class"
            )
        found = None if metric._lent is None else metric._lent()
        if found is None:
            raise ConfigError(f"evaluator: {name}.model is there in process() only, while an evaluation is under way")
        return found


class BaseMetric(ABC):
    """Base class of metrics: ``process`` stores results of each batch, ``compute_metrics`` gets those of all processes.

    Args:
        collect_device: "cpu" or "gpu", accepted for MMEngine's configurations; results are always gathered on the CPU.
        prefix: prefix of every name, as in ``prefix/accuracy``; default: the class's ``default_prefix``.
        collect_dir: a folder, accepted for MMEngine's configurations; results are gathered through the process group.
    """

    default_prefix: ClassVar[str | None] = None
    writes_files: ClassVar[bool] = False
    """True if ``compute_metrics`` writes files; it is then called after real evaluations only, not in the dry pass."""
    uses_model: ClassVar[bool] = False
    """True if ``process`` calls ``self.model``. Its weights are then whole on every process that reports, as long as an
    evaluation takes; see ``val_cfg.memory_limit``."""
    model = _Model()
    """In ``process``, if ``uses_model``: the user's model with whole weights, in evaluation mode. Each process calls it on
    its own, under every strategy, without gradients and under the strategy's autocast. Weights are the averages of an EMAHook,
    if there is one."""
    _has_told = False  # of samples that are counted again
    _lent: Callable[[], Any] | None = None
    _autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    topology: Topology | None = None
    """The strategy's, set by the loop: one process of each data shard has results. None: every process has results."""

    def __init__(
        self,
        collect_device: Literal["cpu", "gpu"] = "cpu",
        prefix: str | None = None,
        collect_dir: str | None = None,
    ) -> None:
        self.collect_device = collect_device
        self.prefix = prefix or self.default_prefix
        self.results: list[Any] = []
        self._ends: list[int] = []
        self.dataset_meta: dict[str, Any] | None = None

    @abstractmethod
    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        """Append to ``self.results`` what the metric needs of a batch's data and of the model's predictions."""

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the metrics by name, from the results of all processes; runs on rank 0."""

    def _lend(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Give the metric the model for ``process``, or take it back with None; called by the loop."""
        # Not the model itself: what a metric has is copied before the dry pass.
        self._lent, self._autocast = None if model is None else weakref.ref(model), autocast

    def _look_at(self, model: nn.Module) -> None:  # noqa: B027 - optional
        """Find out what the metric has to know about the user's model; called by the loop before an evaluation."""

    def _around_process(self) -> AbstractContextManager[Any]:
        """Return the context for ``process``: that of forward, if the metric uses the model."""
        return self._autocast()

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
            _logger.warning(f"{type(self).__name__}: got no results, process() appended nothing to self.results")
        gathered, self._ends = gather_results([self], topology), []
        compute = partial(self._compute, gathered[0] if gathered else [], size, topology.data.count)
        self.reset()
        return told_by_rank_0(compute, at=f"{type(self).__name__}.compute_metrics on rank 0", waits_long=True)

    def _compute(self, results: list[Any], size: int | None, shards: int) -> dict[str, Any]:
        if size is not None and 0 <= len(results) - size < shards:
            results = results[:size]
        elif size is not None and results and not self._has_told:
            self._has_told = True
            _logger.warning(
                f"{type(self).__name__}: has {counted(len(results), 'result')} for {size} samples, so those that the sampler repeats to "
                "make all processes even are counted again; give dict(type='DefaultSampler')"
            )
        self.results = results  # some metrics read it in compute_metrics; in MMEngine it has this process's alone
        try:
            return self._named(self.compute_metrics(results))
        finally:
            self.results = []  # the list itself may be the metric's to keep

    def reset(self) -> None:
        """Drop all results, also those of an evaluation that an exception ended; called before every evaluation."""
        self.results.clear()

    def _named(self, metrics: Any) -> dict[str, Any]:
        if not isinstance(metrics, Mapping):
            given = "None" if metrics is None else type(metrics).__name__
            raise ConfigError(
                f"evaluator: {type(self).__name__}.compute_metrics gave {given}, return a dict of metrics by name"
            )
        if strange := [name for name in metrics if not isinstance(name, str)]:
            raise ConfigError(
                f"evaluator: {type(self).__name__}.compute_metrics gave a metric named {strange[0]!r}, names have to be text"
            )
        return {f"{self.prefix}/{name}" if self.prefix else name: _number(value) for name, value in metrics.items()}


def _number(value: Any) -> Any:
    """Return a metric as a plain number if it is one."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
