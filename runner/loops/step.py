"""Stepper: makes one update, or evaluates one batch, with any model under any strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.base.errors import ConfigError, StrategyError
from ...core.base.overriding import overridden
from ...core.base.trees import tree_map_only
from ...core.checkpoint.chunks import full_tensor
from ...core.comm.collectives import is_main
from ...core.comm.topology import gathering, gathering_refused
from ...core.device.device import to_device
from ...core.model.base_model import (
    BaseTTAModel,
    forget_averaged,
    has_forward,
    overrides,
    overrides_test_step,
    own_run_forward,
    parse_losses,
    run_forward,
    takes_mode,
)
from ...core.model.batch_keys import looking_at_keys, taken_keys
from ...core.model.module_state import leaving_buffers
from ...core.torch_compat.torch_private import is_compiled, is_recorded
from ...optim.gradients import giving_nothing
from ...optim.wrapper import OptimWrapper, StepInfo
from ...optim.wrapper_dict import OptimWrapperDict
from ...strategies.base import NOTHING, Strategy
from ...strategies.parts import check_window
from ..data.readers import Counted
from .losses import Weighing, kept, losses_left_out, losses_of, mean_of, of_filler, weighted_mean

# EvaluationStep: calls the model for one batch of validation or testing.


class EvaluationStep:
    """Evaluates one batch, see EvalStep.

    Args:
        stepper: calls the model.
        mode: "val" or "test".
    """

    def __init__(self, stepper: Any, mode: str) -> None:
        self._stepper, self.mode = stepper, mode

    def prepare(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._stepper.preprocess(batch, False)

    def predict(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._stepper.predict(batch, self.mode)


# Fillers: micro-batches that run, because other processes have one more, and count nothing. See ExactEpochs.


def check_counted(counted: Counted, stepper: Any) -> None:
    """Check that the last update of an epoch can be the mean over its samples.

    Args:
        counted: what counts in it.
        stepper: makes the update.

    Raises:
        ConfigError: the model weighs its micro-batches itself, or mixes the samples of all processes.
    """
    where, instead = "train_dataloader.sampler.round_up: False", "leave round_up out, or give drop_last=True"
    if stepper.custom_train:
        raise ConfigError(
            f"{where} gives the last update of an epoch {counted.total} samples in micro-batches of different sizes, and "
            f"{type(stepper.module).__name__} defines its own train_step, which does not weigh them; {instead}"
        )
    if counted.has_filler and any(isinstance(part, nn.SyncBatchNorm) for part in stepper.module.modules()):
        raise ConfigError(
            f"{where} leaves a process without a sample where others have one, and the sample that it repeats would count in "
            f"SyncBatchNorm's statistics; {instead}"
        )


RunWindow = Callable[[list[Any], Any], dict[str, Tensor]]
"""A strategy's ``run_window``."""


class UpdateLeftOut(Exception):  # noqa: N818 - nothing failed
    """Raised by what runs windows, to end an update before a weight is changed.

    Attributes:
        outputs: the values to log.
    """

    def __init__(self, outputs: dict[str, Tensor]) -> None:
        super().__init__("an update was left out")
        self.outputs = outputs


_WHOLE = (None,)
_NO_FILLER = (
    "round_up=False of the sampler leaves a process without a sample in the last update, which {} cannot tell from the others; "
    "leave round_up out"
)
_ASKED_BY_UPDATE_PARAMS = ("update_params", "scale_loss", "should_update")


class Stepper:
    """Calls a model in the way that the model supports; this is determined once and used for every batch.

    A model may have

    - ``forward(..., mode)``: called with "loss" and "predict", as MMEngine does;
    - any other ``forward``: its result has a ``loss``, as an attribute or a key, or it is a dict, and all values whose key
      contains "loss" are summed, as ``parse_losses`` does; other scalars of a dict are logged. Keys of a batch that it does
      not take are left out;
    - its own ``train_step(data, optim_wrapper)``: called for every micro-batch, and calls ``update_params``;
    - ``val_step(data)``, ``test_step(data)``: called in place of forward;
    - ``data_preprocessor``: makes arguments from a batch; without it the batch is copied to the device as it is;
    - ``parse_losses(losses)``: returns the total and the values to log;
    - ``loss_weight(data)``: the number of items (tokens, samples) that the loss of a batch is a mean of; or a sum, if
      ``forward`` has an argument ``num_items_in_batch``, the items of the update, to divide by; see Weighing.

    Methods that the user's OptimWrapper overrides are called: ``optim_context`` around forward, ``update_params`` for
    every micro-batch, and ``step`` followed by ``zero_grad``.
    """

    _kept_gradients: dict[nn.Parameter, Tensor]
    predicts_in_half = False
    """Whether predictions are computed under float16 autocast, whatever the precision of training."""

    def __init__(
        self, strategy: Strategy, model: nn.Module, optim: OptimWrapper | OptimWrapperDict | None = None
    ) -> None:
        module = strategy.module
        self.strategy, self.model, self.module, self.optim = strategy, model, module, optim
        self.custom_train = overrides(module, "train_step")
        self._train_step: Any = getattr(module, "train_step", None)
        self.takes_mode = takes_mode(module)
        self._for_prediction = {"mode": "predict"} if self.takes_mode else {}
        self._own_forward = own_run_forward(module)
        usual = self._losses_by_mode if self.takes_mode else self._losses_of_result
        self._losses = usual if self._own_forward is None else self._losses_of_own_forward
        preprocessor = getattr(module, "data_preprocessor", None)
        self.has_preprocessor = callable(preprocessor)
        self.preprocess = looking_at_keys(preprocessor if callable(preprocessor) else self._to_device, module)
        if not self.takes_mode and self._own_forward is None:
            self.preprocess = _leaving_out_keys(self.preprocess, module, first=not self.has_preprocessor)
        self.parse: Any = module.parse_losses if overrides(module, "parse_losses") else parse_losses
        self.run = self._custom_step if self.custom_train else self._micro_batch
        self.shares: Sequence[float | None] = _WHOLE
        self.counted: Counted | None = None
        """What counts of the update's micro-batches; None: all of them, equally."""
        self.micro_batch = 0
        """Index in its window of the micro-batch under way, if windows have several; the watchdog's thread reads it."""
        self.repetitions = 0  # how often a window was run of which only the last run counts, see Replay
        self._run_window, self._evaluate = strategy.run_window, strategy.evaluate
        self._check_unchanged = strategy.noted.check_unchanged
        self._has_own_window = _has_own(strategy, "run_window")
        self._split = strategy.split if _has_own(strategy, "split") else None
        self._has_looked = False  # True once the losses of a result were looked at
        self.merging: BaseTTAModel | None = None
        self.updates_itself = False
        """True if ``update_params`` or ``train_step`` makes the update right after the last micro-batch's backward."""
        # A context that does nothing is skipped, because entering one takes as long as the rest of this class.
        casts = strategy.autocast() is not NOTHING or overridden(strategy, "autocast")
        self._autocast: Callable[[], AbstractContextManager[None]] | None = strategy.autocast if casts else None
        # CUDA graphs write every replay's outputs to the same memory, but outputs are kept until a line is logged.
        self._reuses_outputs = bool(strategy.config.compile) or is_compiled(module)
        self.weighing = Weighing.of(module, strategy.device, strategy.topology)
        self._for_loss = {} if self.weighing is None else self.weighing.arguments
        if optim is not None:
            self._prepare_updates(optim)

    def _prepare_updates(self, optim: OptimWrapper | OptimWrapperDict) -> None:
        """Determine once which methods an update calls."""
        forget_averaged()
        if isinstance(optim, OptimWrapperDict) and not self.custom_train:
            raise ConfigError(
                f"optim_wrapper: has {len(optim)} optimizers, {type(self.module).__name__} must define "
                "train_step(data, optim_wrapper) to say which is updated when"
            )
        self._check_methods("train_step", "training")
        if self.weighing is not None and self.custom_train:
            raise ConfigError("model.loss_weight: has no effect beside train_step, weigh the loss there")
        self.updates_itself = self.custom_train or bool(overridden(optim, *_ASKED_BY_UPDATE_PARAMS))
        if self.updates_itself or overridden(optim, "step", "finish"):
            optim.observe_steps()
        if overridden(optim, "optim_context"):
            self._autocast = partial(optim.optim_context, self.module)
        self._should_sync = optim.should_sync if overridden(optim, "should_sync") else None  # type: ignore[union-attr]
        # Strategy.run_window does nothing more for a single micro-batch than to run it.
        syncs = _has_own(self.strategy, "grad_sync") or self._should_sync is not None
        self._runs_single = self._may_run_single = not self._has_own_window and not syncs
        if not isinstance(optim, OptimWrapperDict):
            self._differentiate = optim.update_params if self.updates_itself else optim.backward
            self.optim_step = optim.finish if overridden(optim, "step", "finish") else optim.step

    def train(self, window: list[Any], counted: Counted | None = None) -> dict[str, Tensor]:
        """Make one update from the micro-batches of a window.

        Args:
            window: the micro-batches.
            counted: how many samples of each count, where these differ. Then ``loss`` is weighted, so that its mean over
                processes is that over the samples; the values of a process with nothing but a filler are 0.

        Returns:
            0-dim tensors on the device: ``loss`` and the model's other values, as means over the window, and
            ``grad_norm``, or ``<name>.grad_norm`` for each of several optimizers, if it was computed.
        """
        outputs = self.forward_backward(window, counted)
        if outputs is None:
            return self.leave_out()
        if self.updates_itself:
            for name, wrapper in self.optim.wrappers.items():  # type: ignore[union-attr]
                if (norm := wrapper.last_step.grad_norm) is not None:
                    outputs[f"{name}.grad_norm" if name else "grad_norm"] = norm
        elif (norm := self.optim_step().grad_norm) is not None:
            outputs["grad_norm"] = norm
        return outputs

    def forward_backward(self, window: list[Any], counted: Counted | None = None) -> dict[str, Tensor] | None:
        """Run forward and backward of a window; return its values to log, None if none of its items counts; see ``train``."""
        self._check_unchanged()
        self.counted = counted
        if self._split is not None:
            window = [self._split(batch) for batch in window]
        is_whole = len(window) == 1 and self.weighing is None and counted is None
        shares = _WHOLE if is_whole else self._shares_of(window)
        if shares is None:
            return None
        self.shares = shares
        if shares is _WHOLE and self._runs_single:  # the most frequent case, and a few calls less
            self.optim.begin(0, 1)  # type: ignore[union-attr]
            return self.run(window[0], 0)
        if not self._has_own_window:
            return self._run_window(window, self)
        return {name: value.detach() for name, value in self._run_own_window(window).items()}  # they are kept

    def _run_own_window(self, window: list[Any]) -> dict[str, Tensor]:
        if self.counted is None or not self.counted.has_filler:
            return self._run_window(window, self)
        with gathering_refused(_NO_FILLER.format(type(self.strategy).__name__)):
            return self._run_window(window, self)

    def run_windows_by(self, run: Callable[[RunWindow, list[Any], Any], dict[str, Tensor]] | None) -> None:
        """Let ``run(run_window, window, step)`` run windows from now on, which gets the strategy's ``run_window``; None: no longer.

        It may call that several times, and raise UpdateLeftOut. Losses are weighed before, and updates made after it.
        """
        self._run_window = self.strategy.run_window if run is None else partial(run, self.strategy.run_window)
        self._runs_single = run is None and self._may_run_single

    def check(self, window: list[Any], counted: Counted | None = None) -> None:
        """Let the strategy refuse what it would train wrongly, before anything of the first update happens; see ``train``."""
        if check_window.dispatch(type(self.strategy)) is check_window.dispatch(object):
            return
        self.counted = counted
        window = [
            tree_map_only(Tensor, torch.clone, batch) for batch in window
        ]  # a preprocessor may change it in place
        if self._split is not None:
            window = [self._split(batch) for batch in window]
        if (shares := self._shares_of(window)) is not None:
            self.shares = shares
            check_window(self.strategy, window, self)

    def _shares_of(self, window: list[Any]) -> Sequence[float | None] | None:
        """Return the loss factor of each micro-batch, None for 1; None if no item of the window counts in the loss."""
        size = len(window)
        if self.weighing is None and self.counted is None:
            return (None if self.updates_itself or size == 1 else 1 / size,) * size
        if self.weighing is not None and not self.weighing.weigh(window, self.counted):
            return None
        factors = self.counted.factors if self.weighing is None else self.weighing.factors  # type: ignore[union-attr]
        # An update that is not made here divides by the window's length itself.
        return [factor * size for factor in factors] if self.updates_itself else factors

    def counts(self, batch: Any, index: int) -> bool:
        """Return True if micro-batch ``index`` of the last update has items that count in the loss."""
        return not self.is_filler(index) and (self.weighing is None or self.weighing.counts(batch))

    def is_filler(self, index: int) -> bool:
        """Return True if micro-batch ``index`` of the update repeats a sample and counts nothing."""
        return self.counted is not None and not self.counted.own[index]

    def rehearse(self, batch: Any, optim: Any) -> None:
        """Run forward of a micro-batch again, for hooks on modules; a strategy's own ``run_window`` includes backward.

        Args:
            batch: the micro-batch.
            optim: passed to the model's own ``train_step``; it must not update anything.
        """
        if self._split is not None:
            batch = self._split(batch)
        if self.custom_train:
            self._call_train_step(batch, optim)
        elif self._has_own_window:
            self.shares, self.counted, counted = _WHOLE, None, self.counted
            self._run_window([batch], self)
            self.counted = counted
        else:
            with torch.no_grad():
                self.forward(batch)

    def differentiate(self, window: list[Any]) -> bool:
        """Run forward and backward of the last window again; return False if its update cannot be separated from them."""
        if not self.updates_itself:
            self.forward_backward(window, self.counted)
        return not self.updates_itself

    # Methods for the strategy, see TrainStep

    def begin(self, index: int) -> bool:
        """See TrainStep."""
        size = len(self.shares)
        self.micro_batch = index
        if index and self._reuses_gradients:
            self._keep_gradients(index, size)
        self.optim.begin(index, size)  # type: ignore[union-attr]
        return index + 1 == size if self._should_sync is None else self._should_sync()

    @cached_property
    def _reuses_gradients(self) -> bool:
        """Whether backward may write gradients to the memory of earlier ones; asked when a micro-batch has run, which may record graphs."""
        from ...core.torch_compat.graphs_private import may_have_graphs

        options, module = self.strategy.config.compile, self.module
        is_repeated = bool(options) or is_compiled(module)
        return is_repeated and (may_have_graphs(options) or any(map(is_recorded, module.modules())))

    def keep_gradients(self) -> None:
        """Give gradients memory of their own where others may be written to it, when more runs before their update."""
        if self._reuses_gradients:
            self._keep_gradients(1, 1)

    def _keep_gradients(self, index: int, size: int) -> None:
        """Give what is added up memory of its own, before a CUDA graph's next replay writes its gradients to that memory."""
        kept = self._kept_gradients if index > 1 else {}
        for parameter in self.module.parameters():
            if (grad := parameter.grad) is not None and kept.get(parameter) is not grad:
                parameter.grad = kept[parameter] = grad.clone()
        self._kept_gradients = kept if index + 1 < size else {}

    def prepare(self, batch: Any) -> Any:
        """See TrainStep."""
        return self.preprocess(batch, True)

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See TrainStep."""
        if self.custom_train:
            raise StrategyError(
                f"{type(self.strategy).__name__}: runs forward and backward itself, but {type(self.module).__name__} "
                "defines its own train_step, which does both; remove it"
            )
        data = self.preprocess(batch, True)
        if self._autocast is None:
            loss, logs = self._losses(data)
        else:
            with self._autocast():
                loss, logs = self._losses(data)
        if self._reuses_outputs:
            return loss, {name: value.detach().clone() for name, value in logs.items()}
        return loss, {name: kept(value) for name, value in logs.items()}

    def backward(self, loss: Tensor, index: int) -> None:
        """See TrainStep."""
        share = self.shares[index]
        if share is None:
            self._differentiate(loss)
        elif share:
            self._differentiate(loss * share)
        else:
            with giving_nothing(loss, self.module.parameters()) as zero:
                self._differentiate(zero)

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """See TrainStep."""
        if self.counted is not None and not any(self.counted.own):
            return of_filler(parts[0])
        if self.weighing is not None:
            return self.weighing.mean(parts)
        if self.counted is not None:
            return weighted_mean(parts, self.counted.own, self.counted.factors)
        return parts[0] if len(parts) == 1 else mean_of(parts)

    def _micro_batch(self, batch: Any, index: int) -> dict[str, Tensor]:
        if self.counted is not None:
            is_filler = self.is_filler(index)
            with leaving_buffers(self.module) if is_filler else nullcontext(), gathering(counts=not is_filler):
                loss, logs = self.forward(batch)
                self.backward(loss, index)
            return logs
        loss, logs = self.forward(batch)
        if self.shares[index] is None:  # the usual case, with one call less
            self._differentiate(loss)
        else:
            self.backward(loss, index)
        return logs

    def leave_out(self) -> dict[str, Tensor]:
        """Skip an update without items: as with loss scaling, no weight, no average and no schedule changes."""
        for wrapper in self.optim.wrappers.values():  # type: ignore[union-attr]
            wrapper.last_step = StepInfo(skipped=True)
        return {"loss": torch.zeros((), device=self.strategy.device)}

    def _losses_by_mode(self, data: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.parse(run_forward(self.model, data, mode="loss", **self._for_loss))  # type: ignore[no-any-return]

    def _losses_of_own_forward(self, data: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert self._own_forward is not None
        return self.parse(self._own_forward(data, "loss"))  # type: ignore[no-any-return]

    def _losses_of_result(self, data: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        result = run_forward(self.model, data, **self._for_loss)
        total, logs = self.parse(losses_of(result, self.module, data))
        if not self._has_looked:
            self._look_for_losses(result)
        if isinstance(result, Mapping) and len(result) > 1:
            scalars = {name: value for name, value in result.items() if isinstance(value, Tensor) and value.dim() == 0}
            logs = {**scalars, **logs}
        return total, logs

    def _look_for_losses(self, result: Any) -> None:
        """Warn of losses that the first result has beside ``loss`` and that are not trained."""
        self._has_looked = True
        if (names := losses_left_out(result)) and is_main():
            logging.getLogger("flextrain").warning(
                f"model: {type(self.module).__name__}.forward gave a loss, and beside it {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} "
                'not trained, only logged: "loss" is the whole loss; add them to it, or detach() what is only to be logged'
            )

    def _custom_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        logs = self._call_train_step(batch, self.optim)
        if 0 < index == len(self.shares) - 1:
            for wrapper in self.optim.wrappers.values():  # type: ignore[union-attr]
                wrapper.end_window()
        return logs

    def _call_train_step(self, batch: Any, optim: Any) -> dict[str, Tensor]:
        logs = self._train_step(batch if self.has_preprocessor else self._to_device(batch, True), optim)
        if not isinstance(logs, Mapping):
            raise ConfigError(f"model.train_step: gave {type(logs).__name__}, return a dict of what to log")
        values = {name: torch.as_tensor(value) for name, value in logs.items()}
        values = {name: kept(full_tensor(each) if isinstance(each, DTensor) else each) for name, each in values.items()}
        if self._reuses_outputs:
            values = {name: value.clone() for name, value in values.items()}
        if "loss" not in values and (parts := [value for name, value in values.items() if "loss" in name]):
            parts = [part.to(self.strategy.device) for part in parts]
            values["loss"] = reduce(
                torch.add, (part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts)
            )
        return values

    def merge_with(self, model: BaseTTAModel | None) -> None:
        """Merge the predictions of augmented samples in testing, as ``model`` does; None: no longer.

        Raises:
            StrategyError: the model calls the module past a strategy that evaluates in its own way.
        """
        if self.merging is not None:
            self.merging.run_with(None)
        self.merging = model
        if model is None:
            return
        if overrides_test_step(model) and (self._split is not None or _has_own(self.strategy, "evaluate")):
            raise StrategyError(
                f"model: {type(model).__name__} defines its own test_step, which {type(self.strategy).__name__} cannot see; "
                "define merge_preds only"
            )
        model.module = self.module
        model.run_with(partial(self._evaluate_batch, mode="test"))

    def check_prediction(self, mode: str) -> None:
        """Raise ConfigError if the model has no method to predict with; ``mode`` is "val" or "test"."""
        self._check_methods(f"{mode}_step", "evaluation")

    def _check_methods(self, name: str, what: str) -> None:
        if has_forward(self.module) or overrides(self.module, name) or self._own_forward is not None:
            return
        raise ConfigError(
            f"model: {type(self.module).__name__} has neither forward nor {name}, {what} needs one of them"
        )

    def evaluate(self, batch: Any, mode: str) -> Any:
        """Return the strategy's output for one batch; ``mode`` is "val" or "test"."""
        if self.merging is None or mode != "test":
            return self._evaluate_batch(batch, mode)
        if not overrides_test_step(self.merging):
            return self.merging.test_step(batch)
        with self._casting():
            return self.merging.test_step(batch if self.has_preprocessor else self._to_device(batch, False))

    def _evaluate_batch(self, batch: Any, mode: str) -> Any:
        if self._split is not None:
            batch = self._split(batch)
        return self._evaluate(batch, EvaluationStep(self, mode))

    def predict(self, batch: Any, mode: str) -> Any:
        """Return the model's predictions for one batch; ``mode`` is "val" or "test"."""
        outputs = self._predict(batch, mode)
        return tree_map_only(Tensor, torch.clone, outputs) if self._reuses_outputs else outputs  # metrics may keep them

    def _predict(self, batch: Any, mode: str) -> Any:
        if overrides(self.module, f"{mode}_step"):
            with self._casting():
                return getattr(self.module, f"{mode}_step")(
                    batch if self.has_preprocessor else self._to_device(batch, False)
                )
        data = self.preprocess(batch, False)
        with self._casting():
            if self._own_forward is not None:
                return self._own_forward(data, "predict")
            return run_forward(self.model, data, **self._for_prediction)

    def _casting(self) -> AbstractContextManager[None]:
        if self.predicts_in_half:
            return torch.autocast(self.strategy.device.type, torch.float16)
        return self.strategy.autocast()

    def _to_device(self, data: Any, training: bool) -> Any:
        return to_device(data, self.strategy.device)


def _leaving_out_keys(
    preprocess: Callable[[Any, bool], Any], module: nn.Module, *, first: bool
) -> Callable[[Any, bool], Any]:
    """Return ``preprocess`` with ``taken_keys``; ``first``: before it, so that what is left out is not copied to the device."""
    taken = taken_keys(module)
    if first:
        return lambda data, training: preprocess(taken(data), training)
    return lambda data, training: taken(preprocess(data, training))


def _has_own(strategy: Strategy, name: str) -> bool:
    """Whether a method of the strategy is not Strategy's."""
    return getattr(type(strategy), name) is not getattr(Strategy, name) or bool(overridden(strategy, name))
