"""WholeEvaluation: an evaluation in which each process that reports has whole weights, for metrics and models that generate."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from ...core.comm.gather_with_gradient import gathering_refused
from ...core.comm.joint_errors import gather_differing
from ...core.errors import ConfigError
from ...core.model import class_name, overrides
from ...strategies.base import Strategy
from ...strategies.whole.shared_buffers import buffers_kept
from ..metrics.base import BaseMetric
from .step import Stepper

if TYPE_CHECKING:
    from ..run import Run

_LIBRARIES = ("torch", "transformers", "peft", __name__.partition(".")[0])


class AsOneDevice:
    """A strategy as the Stepper of a model with whole weights sees it: every process evaluates alone.

    Args:
        strategy: everything else is asked of it.
        module: the model with whole weights.
    """

    run_window, evaluate, split, grad_sync = Strategy.run_window, Strategy.evaluate, Strategy.split, Strategy.grad_sync

    def __init__(self, strategy: Strategy, module: nn.Module) -> None:
        self._strategy, self.module = strategy, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


class WholeEvaluation:
    """Gathers the weights for an evaluation, if a metric uses the model, or if the model generates to predict.

    Args:
        runner: the run.
        metrics: those of the evaluation.
        mode: "val" or "test".
        predicts: whether predictions are made with whole weights, by the processes that report; None: if the model calls
            a method ``generate``.
        memory_limit: see ``Strategy.full_weights``.
    """

    def __init__(
        self,
        runner: Run,
        metrics: list[BaseMetric],
        mode: str,
        predicts: bool | None,
        memory_limit: int | str | None,
    ) -> None:
        self._runner, self._metrics, self._mode, self._limit = runner, metrics, mode, memory_limit
        self._given = predicts
        self._stepper: Stepper | None = None
        self._has_told = False
        self.is_open = False
        """Whether predictions are made with whole weights now."""

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Context of a pass over the data, for which the weights are gathered where they are needed; a collective."""
        strategy = self._runner.strategy
        using = [metric for metric in self._metrics if metric.uses_model]
        predicts = self._given
        if predicts is None:  # a process may have other parts of the model than the next
            predicts = any(gather_differing(calls_generate(strategy.module, self._mode)))
        if not using and not predicts:
            if self._limit is not None:
                raise ConfigError(
                    f"{self._mode}_cfg.memory_limit: has no effect, no metric has uses_model = True and the model generates "
                    "nothing; leave it out, or give full_weights=True"
                )
            yield
            return
        ranks = [rank for rank, reports in enumerate(gather_differing(strategy.topology.reports)) if reports]
        with strategy.full_weights(ranks=ranks, memory_limit=self._limit) as model:
            self._tell(using, predicts)
            if model is not None:
                model.eval()
                self._stepper = Stepper(AsOneDevice(strategy, model), model)  # type: ignore[arg-type]
            merging = self._runner.stepper.merging

            @contextmanager
            def around_process() -> Iterator[None]:
                with buffers_kept(model), strategy.autocast():
                    yield

            try:
                for metric in using:
                    metric._lend(model, around_process)
                self.is_open = predicts
                if self._stepper is not None and merging is not None:
                    self._stepper.merge_with(merging)
                # The live model may be the one that predicts: what it writes to buffers while it generates is not to stay.
                with buffers_kept(model) if predicts and model is not None else nullcontext():
                    yield
            finally:
                self.is_open, self._stepper = False, None
                for metric in using:
                    metric._lend(None)
                if merging is not None:
                    self._runner.stepper.merge_with(merging)

    def predict(self, batch: Any, mode: str) -> Any:
        """Return the predictions for a batch; None on a process that does not report."""
        if self._stepper is None:
            return None
        with gathering_refused(
            f"processes predict apart, with whole weights; give {self._mode}_cfg=dict(full_weights=False)"
        ):
            return self._stepper.evaluate(batch, mode)

    def _tell(self, using: list[BaseMetric], predicts: bool) -> None:
        if not self._has_told:
            self._has_told = True
            model = class_name(self._runner.strategy.module)
            why = f"{model} generates" if predicts else f"{type(using[0]).__name__} uses the model"
            self._runner.logger.info(f"{self._mode}: with whole weights on every process that reports, because {why}")


def calls_generate(model: nn.Module, mode: str) -> bool:
    """Return whether the user's own code calls a method ``generate`` to predict: in a step, forward, or what these call.

    The model or a part of it, with parameters, has to have such a method: others generate anchors, or data.
    """
    kind: Any = type(model)
    if not any(hasattr(type(part), "generate") and any(True for _ in part.parameters()) for part in model.modules()):
        return False
    names = [f"{mode}_step" if overrides(model, f"{mode}_step") else "forward"]
    seen: set[str] = set()
    while names:
        name = names.pop()
        function = _own_function(kind, name)
        if name in seen or function is None:
            continue
        seen.add(name)
        called = set(_names(function.__code__))
        if "generate" in called:
            return True
        names += called
    return False


def _own_function(kind: type, name: str) -> types.FunctionType | None:
    """Return a method that a user's class defines."""
    found = getattr(kind, name, None)
    found = getattr(found, "__wrapped__", found)
    is_users = isinstance(found, types.FunctionType) and found.__module__.partition(".")[0] not in _LIBRARIES
    return found if is_users else None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
