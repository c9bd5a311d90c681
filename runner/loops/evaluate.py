"""Validation and test loops: every process runs forward equally often."""

from __future__ import annotations

import types
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from ...core.base.errors import ConfigError
from ...core.base.registry import LOOPS
from ...core.base.tensors import bytes_of
from ...core.comm.agreement import gather_differing
from ...core.comm.topology import gathering_refused
from ...core.model.base_model import class_name, overrides
from ...core.model.module_state import modes_of
from ...optim.adapters import swaps_weights
from ...strategies.base import Strategy
from ...strategies.parts import full_weights
from ...strategies.parts.whole_weights import buffers_kept
from ..data.samplers import ShardedSampler, dealt_by
from ..data.user_loaders import deals_batches, goes_its_own_way, is_divided, length_of, name_of, sampler_of
from ..metrics.base import BaseMetric
from ..metrics.evaluator import Evaluator, build_evaluator
from ..metrics.torchmetrics import TorchMetric
from .base import BaseLoop
from .dry_pass import DryPass
from .step import Stepper

if TYPE_CHECKING:
    from ..run import Run

# WholeEvaluation: an evaluation in which each process that reports has whole weights, for metrics and models that
# generate.


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
        memory_limit: see ``WholeModel.open``.
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
        self.stepper: Stepper | None = None  # of this process, while it predicts with whole weights
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
        with full_weights(strategy, ranks=ranks, memory_limit=self._limit) as model:
            self._tell(using, predicts)
            if model is not None:
                model.eval()
                self.stepper = Stepper(AsOneDevice(strategy, model), model)  # type: ignore[arg-type]
            merging = self._runner.stepper.merging

            @contextmanager
            def around_process() -> Iterator[None]:
                with buffers_kept(model), strategy.autocast():
                    yield

            try:
                for metric in using:
                    metric._lend(model, around_process)
                self.is_open = predicts
                if self.stepper is not None and merging is not None:
                    self.stepper.merge_with(merging)
                # The live model may be the one that predicts: what it writes to buffers while it generates is not to stay.
                with buffers_kept(model) if predicts and model is not None else nullcontext():
                    yield
            finally:
                self.is_open, self.stepper = False, None
                for metric in using:
                    metric._lend(None)
                if merging is not None:
                    self._runner.stepper.merge_with(merging)

    def predict(self, batch: Any, mode: str) -> Any:
        """Return the predictions for a batch; None on a process that does not report."""
        if self.stepper is None:
            return None
        with gathering_refused(
            f"processes predict apart, with whole weights; give {self._mode}_cfg=dict(full_weights=False)"
        ):
            return self.stepper.evaluate(batch, mode)

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


class EvalLoop(BaseLoop):
    """Evaluates the metrics over one pass of validation or test data.

    Every process runs forward equally often, because forward may run collectives: a process with fewer batches repeats
    its last one and ignores the result. With whole weights no call waits for another process, so it repeats nothing. One
    process of each data shard gives its predictions to the metrics.

    A subclass may define ``run`` or ``run_iter(idx, data_batch)`` anew, see BaseLoop; ``run_iter`` then runs forward
    once for each batch.

    Args:
        evaluator: metrics, or their configuration.
        fp16: run forward under float16 autocast, whatever the precision of training.
        full_weights: True: predict with whole weights, on the processes that report, as one device does; None: if the model's
            own code calls a method ``generate``; see ``WholeModel.open``.
        memory_limit: most bytes of whole weights on a process, as a number or "2GiB", also for metrics that use the model;
            None: no limit.
    """

    _has_told = False  # of an optimizer in training mode

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        evaluator: Any,
        fp16: bool = False,
        full_weights: bool | None = None,
        memory_limit: int | str | None = None,
    ) -> None:
        super().__init__(runner, dataloader)
        self.evaluator: Evaluator = build_evaluator(evaluator, f"{self.mode}_evaluator")
        self._topology = self.evaluator.topology = runner.strategy.topology
        self.evaluator.deals_batches = deals_batches(self.loader)
        self.fp16 = fp16
        if memory_limit is not None:
            bytes_of(memory_limit, f"{self.mode}_cfg.memory_limit")
        self._pass: Generator[Any, None, None] | None = None
        self._whole = WholeEvaluation(runner, self.evaluator.metrics, self.mode, full_weights, memory_limit)
        self.evaluator.dataset_meta = getattr(getattr(self.loader, "dataset", None), "metainfo", None)

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Evaluate the data, and return the metrics by name, on every process."""
        runner = self._runner
        runner.stepper.check_prediction(self.mode)
        runner.call_hook(f"before_{self.mode}")
        runner.call_hook(f"before_{self.mode}_epoch")
        self._check_weights()
        back_to_training = modes_of(runner.model)
        runner.model.eval()
        try:
            metrics = self._evaluate_all()
        finally:  # a hook of the user's may go on after an error
            back_to_training()
        runner.call_hook(f"after_{self.mode}_epoch", metrics=metrics)
        runner.call_hook(f"after_{self.mode}")
        return metrics

    def _check_weights(self) -> None:
        """Warn once if the optimizer would swap other weights in for an evaluation, and nobody has asked it to."""
        advice = f"call its eval() in before_{self.mode}_epoch of a hook, and train() in after_{self.mode}_epoch"
        self._has_told = self._has_told or tell_training_mode(self._runner, advice)

    def _evaluate_all(self) -> dict[str, Any]:
        idx = -1
        with closing(self.batches()) as batches:
            for idx, batch in enumerate(batches):
                self.run_iter(idx, batch)
        if idx < 0 and self._topology.is_alone:  # of several processes, another one may have batches
            raise ConfigError(
                f"{self.mode}_dataloader: {name_of(self.dataloader)} gives no batch, evaluation needs one"
            )
        return self.evaluator.evaluate(self._num_kept())

    def batches(self) -> Generator[Any, None, None]:
        """See BaseLoop; the metrics begin again."""
        self.evaluator.reset()
        self.evaluator.to(self._runner.strategy.device)
        if self._pass is not None:  # a loop that defines its own run may have left it in the middle
            self._pass.close()
        self._pass = self._with_weights(super().batches())
        return self._pass

    def _with_weights(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        self._show_model()
        with self._whole.weights():
            yield from batches

    def _show_model(self) -> None:
        for metric in self.evaluator.metrics:
            metric._look_at(self._runner.strategy.module)

    def run_iter(self, idx: int, data_batch: Any) -> None:
        """Evaluate one batch, with its hooks."""
        runner = self._runner
        for hook in runner.hook_calls[f"before_{self.mode}_iter"]:
            hook(runner, idx, data_batch)
        outputs = self._forward(data_batch)
        self.evaluator.process(data_samples=outputs, data_batch=data_batch)
        for hook in runner.hook_calls[f"after_{self.mode}_iter"]:
            hook(runner, idx, data_batch, outputs)

    def dry_run(self, num_batches: int) -> None:
        """See BaseLoop."""
        if self.has_own_methods:
            super().dry_run(num_batches)
            return
        self._show_model()
        with self._whole.weights():
            DryPass(self._runner, self.loader, self.evaluator, self._forward, self.mode).make(num_batches)

    def _forward(self, batch: Any, mode: str | None = None) -> Any:
        stepper = self._whole.stepper if self._whole.is_open else self._runner.stepper
        if not self.fp16 or stepper is None:
            return self._predicted(batch, mode)
        stepper.predicts_in_half = True
        try:
            with torch.autocast(self._runner.strategy.device.type, torch.float16):
                return self._predicted(batch, mode)
        finally:
            stepper.predicts_in_half = False

    def _keep_in_step(self, batch: Any) -> None:
        if not self._whole.is_open:  # otherwise each process predicts alone, and may do so unequally often
            super()._keep_in_step(batch)

    def _predicted(self, batch: Any, mode: str | None) -> Any:
        if not self._whole.is_open:
            return super()._forward(batch, mode)
        with torch.no_grad():
            return self._whole.predict(batch, mode or self.mode)

    def _num_kept(self) -> int | None:
        """Return the number of samples if the user's sampler repeats some to make processes even; otherwise None."""
        if self._topology.data.count == 1:
            return None
        dataset, sampler = getattr(self.loader, "dataset", None), sampler_of(self.loader)
        if goes_its_own_way(self.loader) or isinstance(dataset, IterableDataset):
            return None
        if is_divided(self.loader) or isinstance(sampler, ShardedSampler) or dealt_by(sampler) is None:
            return None
        size = length_of(dataset) or 0
        seen = int(self._topology.data.sum(torch.tensor(length_of(sampler) or 0, device="cpu")))
        if seen <= size:
            return None
        # Of another class, or in batches of its own order, nobody knows which results are those of repeated samples.
        in_turn = getattr(type(sampler), "__iter__", None) is DistributedSampler.__iter__
        is_known = in_turn and type(self.loader.batch_sampler) in (BatchSampler, type(None))
        whose = "torchmetrics' " if is_known else ""
        if not is_known or any(isinstance(metric, TorchMetric) for metric in self.evaluator.metrics):
            self._runner.logger.warning(
                f"{self.mode}_dataloader: its {type(sampler).__name__} repeats {seen - size} samples, which {whose}metrics count "
                "again; give dict(type='DefaultSampler')"
            )
        return size if is_known else None


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """Validates; see EvalLoop."""


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """Tests; see EvalLoop."""

    mode = "test"


def tell_training_mode(run: Run, advice: str) -> bool:
    """Warn if an optimizer has other weights to evaluate than the model has now, see ``swaps_weights``; return whether one has."""
    for wrapper in run.optim_wrapper.wrappers.values() if run.optim_wrapper is not None else ():
        is_swapping = wrapper.is_built and swaps_weights(wrapper.optimizer)
        if is_swapping and any(group.get("train_mode") for group in wrapper.param_groups):
            run.logger.warning(
                f"{wrapper.where}.optimizer: {type(wrapper.optimizer).__name__} is in training mode, in which the weights are not those to "
                f"evaluate; {advice}"
            )
            return True
    return False
