"""The dry pass: a few validation batches through model and metrics before training, of which nothing stays."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ...core.base.errors import ConfigError, FlexTrainError, LaunchError, counted, one_line
from ...core.base.overriding import overridden
from ...core.base.snapshot import Snapshot
from ...core.comm import collectives as dist
from ...core.comm.agreement import roll_call
from ...core.comm.topology import gathering
from ...core.device.device import peak_apart
from ...core.model.module_state import modes_of
from ...core.random.generators import kept_random_state
from ...core.torch_compat.torch_private import without_compiling
from ..data.first_batches import first_batches, only_once, parts_of
from ..data.lockstep import until_all_end
from ..hooks.hook import HookDispatcher
from ..metrics.evaluator import Evaluator, add_metrics
from .base import EVALUATION

if TYPE_CHECKING:
    from ..run import Run

_OFF = "env_cfg=dict(dry_run=False) leaves the dry pass out"

PATIENCE_S = 10.0
"""Seconds that a process with an error waits for the others. It ends without them if they wait for it in a collective."""


class DryPass:
    """The first batches of the validation data through model, evaluator and metrics, before the first update.

    So a wrong key, batch or metric is known in seconds. Nothing stays of it: random numbers, samplers, datasets, metrics
    and buffers are as before, compiled models run uncompiled, and no hook is called. A dataset without workers is read
    in this process: what it changes inside large arrays, in variables of modules, or outside of Python, stays.

    An error in reading, in forward or in ``process`` is raised as it would be after the first epoch. An error of a
    metric's computation is a warning, because a metric may need more data than these, unless the data cannot be its
    cause. Hooks that need a certain metric say so (``Hook.check_metrics``) if all metrics could be computed.

    It is left out for data that can be read only once, and for loops with a ``run`` of their own. If hooks of the
    user's run before validation, or before its batches, every error is a warning, because the model may need them.

    Of several processes, one may fail while the others wait for it in a collective of the model or of a metric. It then
    raises its own error after ``PATIENCE_S`` seconds, and a warning is not possible. Nor is it if forward failed on some
    processes only, because the collectives of the others are still open.

    Args:
        runner: the run.
        dataloader: the validation data.
        evaluator: the metrics.
        forward: returns the model's outputs for a batch.
        mode: "val".
    """

    def __init__(
        self, runner: Run, dataloader: Any, evaluator: Evaluator, forward: Callable[[Any], Any], mode: str
    ) -> None:
        self._runner, self._dataloader, self._evaluator = runner, dataloader, evaluator
        self._forward, self._mode = forward, mode

    def make(self, num_batches: int) -> None:
        """Make the pass, on all processes or on none; a collective.

        Raises:
            ConfigError: a monitored metric is not among the metrics.
        """
        reasons = dist.all_gather_object(only_once(self._dataloader))
        if reason := next(filter(None, reasons), None):
            self._runner.logger.info(f"Dry pass: left out, {self._mode}_dataloader: {reason}")
            return
        with self._undisturbed():
            found = self._evaluate(num_batches)
        if found:
            for hook in self._runner.hooks:
                hook.check_metrics(self._runner, found)
            names = ", ".join([*found][:8]) + (", ..." if len(found) > 8 else "")
            self._runner.logger.info(
                f"Dry pass: {counted(num_batches, 'batch', 'batches')} of {self._mode}_dataloader went through the model and "
                f"{self._mode}_evaluator, which gives {names}"
            )

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Context after which the run is as it was before."""
        runner, strategy = self._runner, self._runner.strategy
        module = strategy.module
        self._evaluator.reset()
        self._evaluator.to(strategy.device)
        with ExitStack() as stack:
            stack.enter_context(kept_random_state(strategy.device))
            stack.enter_context(peak_apart(strategy.device))
            stack.enter_context(without_compiling())
            stack.enter_context(torch.no_grad())
            parts = [module, self._evaluator, *self._evaluator.metrics, *parts_of(self._dataloader)]
            apart = (runner, strategy, strategy.topology, runner.logger, runner.message_hub)
            stack.callback(Snapshot(parts, apart).restore)
            # Weights that an autocast around train() casts here would have no gradients in training.
            stack.callback(torch.clear_autocast_cache)
            stack.callback(modes_of(runner.model))
            runner.model.eval()
            yield

    def _evaluate(self, num_batches: int) -> dict[str, Any]:
        """Return the metrics of the first batches; none if one of them could not be computed, or gave nothing."""
        failure, reports = self._process(num_batches)
        said = next((text for text, _ in filter(None, reports)), None)
        if said is not None:
            in_forward = {report is not None and report[1] for report in reports}
            hooks = self._hooks_before()
            if not hooks or len(in_forward) > 1:
                raise failure or LaunchError(f"another process failed in the dry pass: {said}")
            self._warn(f"{said}; {', '.join(hooks)} may be needed before it, and was not called")
            return {}
        found: dict[str, Any] = {}
        is_whole = True
        evaluator = self._evaluator
        is_whole_one = type(evaluator).evaluate is not Evaluator.evaluate or overridden(evaluator, "evaluate")
        parts: list[Any] = [evaluator] if is_whole_one else [*evaluator.metrics]
        if evaluator.writes_files:  # such a metric has no value
            parts = [metric for metric in parts if metric is not evaluator and not metric.writes_files]
        for part in parts:
            metrics = self._compute(part)
            add_metrics(found, metrics)
            is_whole = is_whole and bool(metrics)
        return found if is_whole else {}

    def _process(self, num_batches: int) -> tuple[Exception | None, list[_Report | None]]:
        """Give the batches to model and metrics; return this process's error, and the reports of all processes."""
        strategy = self._runner.strategy
        topology = strategy.topology
        options: dict[str, Any] = {"seed": self._runner.seed, "epoch": EVALUATION, "shard": topology.shard}
        with first_batches(self._dataloader, num_batches, **options) as read:
            batches = _with_failure(read)
            pairs: Iterator[tuple[Any, bool]] = ((batch, True) for batch in batches)
            if not topology.is_alone:
                pairs = until_all_end(batches, float(strategy.config.timeout_s))
            for batch, is_own in pairs:
                failure: Exception | None = batch.error if isinstance(batch, _Unreadable) else None
                # Known to all before forward, whose collectives a process without a batch would not come to.
                if any(reports := _told(failure, False)):
                    return failure, reports
                in_forward = True
                try:
                    with nullcontext() if is_own else gathering(counts=False):
                        outputs = self._forward(batch)
                    in_forward = False
                    if is_own and topology.reports:
                        self._evaluator.process(data_samples=outputs, data_batch=batch)
                except Exception as error:  # raised when all processes know of it, so that none waits for this one
                    failure = error
                self._meet(failure)
                if any(reports := _told(failure, in_forward)):
                    return failure, reports
        return None, []

    def _meet(self, failure: Exception | None) -> None:
        """Wait until all processes have left model or metric, or raise this one's failure if they do not come.

        A collective that told of the failure would meet those in which the others may still be. The store cannot.
        """
        timeout_s = float(self._runner.strategy.config.timeout_s)
        # Shorter than the others' collectives may take, for their errors are only consequences of this one.
        problem = roll_call("the dry pass", timeout_s if failure is None else min(PATIENCE_S, timeout_s / 2))
        if problem is None:
            return
        if failure is not None:
            self._runner.logger.warning(f"Dry pass: {_in_words(failure)}; {problem}; {_OFF}")
        raise failure or LaunchError(f"the dry pass: {problem}; the log of the other processes says why")

    def _compute(self, part: Any) -> Mapping[str, Any]:
        """Return a metric's values; a failure for which the few data may be the cause is only a warning."""
        failure: Exception | None = None
        metrics: Mapping[str, Any] = {}
        try:
            metrics = part.evaluate(None)
        except Exception as error:
            failure = error
        self._meet(failure)
        own = None if failure is None else (_is_certain(failure), _in_words(failure))
        reports = dist.all_gather_object(own)
        certain = _first([report for report in reports if report and report[0]])
        if certain is not None:
            raise failure if failure is not None and own is not None and own[0] else LaunchError(certain[1])
        # Other processes only hear of the failure of rank 0.
        if report := _first(reports):
            self._warn(f"{type(part).__name__} cannot be computed from so few data, or not at all: {report[1]}")
            return {}
        return metrics or {}

    def _hooks_before(self) -> list[str]:
        """Hooks of the user's that a real validation calls before its first forward."""
        points = (f"before_{self._mode}", f"before_{self._mode}_epoch", f"before_{self._mode}_iter")
        names: list[str] = []
        for hook in self._runner.hooks:
            dispatcher = HookDispatcher([hook])
            calls = [call for point in points for call in dispatcher[point]]
            # The user's own are also functions set as attributes of one of this library's hooks.
            if any(_is_the_user_s(type(hook)) or _is_the_user_s(call) for call in calls):
                names.append(type(hook).__name__)
        return [*dict.fromkeys(names)]

    def _warn(self, what: str) -> None:
        self._runner.logger.warning(f"Dry pass: {self._mode}_evaluator: {what}; {_OFF}")


_LIBRARY = __name__.partition(".")[0]

_Report = tuple[str, bool]  # a failure in words, and whether forward failed


class _Unreadable:
    """Stands for a batch whose reading failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:  # for a process without a batch of its own; not every exception can be pickled
        return _Unreadable, (LaunchError(_in_words(self.error)),)


def _with_failure(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except Exception as error:
        yield _Unreadable(error)


def _told(failure: Exception | None, in_forward: bool) -> list[_Report | None]:
    """Tell all processes of this one's failure, and return what each of them tells; a collective."""
    return dist.all_gather_object(None if failure is None else (_in_words(failure), in_forward))


def _is_the_user_s(kind: Any) -> bool:
    return getattr(kind, "__module__", "").partition(".")[0] != _LIBRARY


def _is_certain(error: Exception) -> bool:
    """Whether a metric's error does not come from too few data."""
    is_wrong_name = isinstance(error, (NameError, ImportError)) and not isinstance(error, UnboundLocalError)
    return is_wrong_name or isinstance(error, ConfigError)


def _in_words(error: Exception) -> str:
    text = one_line(error) or "without a message"
    if isinstance(error, FlexTrainError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {text} ({frames[-1].filename}:{frames[-1].lineno})"


def _first(reports: Collection[Any]) -> Any:
    return next((report for report in reports if report is not None), None)
