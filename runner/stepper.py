"""Stepper: one update, or one evaluation batch, of any model under any strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import distributed as dist
from ..core.device import to_device
from ..core.errors import ConfigError
from ..core.model import overrides, parse_losses, run_forward, takes_mode
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..strategies.base import NOTHING, Strategy

_WHOLE = (None,)


class Stepper:
    """Knows how a model wants to be called; asked once, used for every batch.

    A model may have

    - ``forward(..., mode)``: called with "loss" and "predict", as MMEngine does;
    - any other ``forward``: its result must have a ``loss``, as an attribute or a key; other scalars of a dict are logged;
    - its own ``train_step(data, optim_wrapper)``: called for every micro-batch, and calls ``update_params``;
    - ``val_step(data)``, ``test_step(data)``: called in place of forward;
    - ``data_preprocessor``: makes a batch into arguments; otherwise the batch is brought to the device as it is;
    - ``parse_losses(losses)``: gives the total and what to log;
    - ``loss_weight(data)``: over how many items (tokens, samples) the loss of a batch is a mean. The update is then the
      same however the items are split over micro-batches and processes; without it, each micro-batch of each process
      counts the same.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optim: OptimWrapper | OptimWrapperDict | None = None
    ) -> None:
        module = strategy.module
        self.strategy, self.model, self.module, self.optim = strategy, model, module, optim
        self.custom_train = overrides(module, "train_step")
        self._train_step: Any = getattr(module, "train_step", None)
        self.takes_mode = takes_mode(module)
        self._for_loss = {"mode": "loss"} if self.takes_mode else {}
        self._for_prediction = {"mode": "predict"} if self.takes_mode else {}
        preprocessor = getattr(module, "data_preprocessor", None)
        self.has_preprocessor = callable(preprocessor)
        self.preprocess: Callable[[Any, bool], Any] = preprocessor if callable(preprocessor) else self._to_device
        self.parse: Any = module.parse_losses if overrides(module, "parse_losses") else parse_losses
        self._run = self._custom_step if self.custom_train else self._micro_batch
        # A context that does nothing is left out: entering one takes as long as the rest of this class.
        self._grad_sync = None if type(strategy).grad_sync is Strategy.grad_sync else strategy.grad_sync
        self._autocast = None if strategy.autocast() is NOTHING else strategy.autocast
        # CUDA graphs write every replay's outputs to the same place, and these are kept until a line is logged.
        self._reuses_outputs = bool(strategy.config.compile)
        weigh = getattr(module, "loss_weight", None)  # also a usual name for a number
        self.weigh: Callable[[Any], Any] | None = (
            weigh if inspect.ismethod(weigh) or inspect.isfunction(weigh) else None
        )
        if isinstance(optim, OptimWrapperDict) and not self.custom_train:
            raise ConfigError(
                f"optim_wrapper: has {len(optim)} optimizers, {type(module).__name__} must define "
                "train_step(data, optim_wrapper) to say which is updated when"
            )
        if self.weigh is not None and self.custom_train:
            raise ConfigError("model.loss_weight: has no effect beside train_step, weigh the loss there")

    def train(self, window: list[Any]) -> dict[str, Tensor]:
        """One update from the micro-batches of a window.

        Returns:
            0-dim tensors on the device: ``loss`` and whatever else the model gives, means over the window, and
            ``grad_norm`` when it was computed.
        """
        optim, last = self.optim, len(window) - 1
        assert optim is not None
        shares = self._shares(window)
        outputs: dict[str, Tensor] = {}
        for i, batch in enumerate(window):
            optim.begin(i, last + 1)
            if self._grad_sync is None:
                logs = self._run(batch, optim, shares[i])
            else:
                with self._grad_sync(i == last):
                    logs = self._run(batch, optim, shares[i])
            outputs = _added(outputs, logs) if i else logs
        if last:
            outputs = {
                name: value if self.weigh is not None and name == "loss" else value / (last + 1)
                for name, value in outputs.items()
            }
        info = optim.last_step if self.custom_train else optim.step()
        if info.grad_norm is not None:
            outputs["grad_norm"] = info.grad_norm
        return outputs

    def _micro_batch(self, batch: Any, optim: Any, factor: float | Tensor | None) -> dict[str, Tensor]:
        data = self.preprocess(batch, True)
        if self._autocast is None:
            loss, logs = self._losses(data)
        else:
            with self._autocast():
                loss, logs = self._losses(data)
        if factor is None:
            optim.backward(loss)
        else:
            # A mean over no items is NaN, and its share is nothing.
            loss = torch.where(factor > 0, loss * factor, 0.0) if isinstance(factor, Tensor) else loss * factor
            optim.backward(loss)
            if isinstance(factor, Tensor):
                logs = {**logs, "loss": loss}
        if self._reuses_outputs:
            return {name: value.detach().clone() for name, value in logs.items()}
        return {name: value.detach() for name, value in logs.items()}

    def _losses(self, data: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        result = run_forward(self.model, data, **self._for_loss)
        if self.takes_mode:
            return self.parse(result)  # type: ignore[no-any-return]
        total, logs = self.parse({"loss": self._own_loss(result)})
        if isinstance(result, Mapping) and len(result) > 1:
            scalars = {name: value for name, value in result.items() if isinstance(value, Tensor) and value.dim() == 0}
            logs = {**scalars, **logs}
        return total, logs

    def _custom_step(self, batch: Any, optim: Any, share: object = None) -> dict[str, Tensor]:
        logs = self._train_step(batch if self.has_preprocessor else self._to_device(batch, True), optim)
        if not isinstance(logs, Mapping):
            raise ConfigError(f"model.train_step: gave {type(logs).__name__}, return a dict of what to log")
        values = {name: torch.as_tensor(value).detach() for name, value in logs.items()}
        if self._reuses_outputs:
            values = {name: value.clone() for name, value in values.items()}
        if "loss" not in values and (parts := [value for name, value in values.items() if "loss" in name]):
            values["loss"] = torch.stack([part.float() for part in parts]).sum()
        return values

    def _shares(self, window: list[Any]) -> Sequence[float | Tensor | None]:
        """What to multiply each micro-batch's loss with, None for 1: its share of the window.

        With ``loss_weight`` it is the share of the items of all micro-batches and processes, times the number of processes
        because gradients are averaged over them.
        """
        if self.weigh is None:
            return _WHOLE if len(window) == 1 else (1 / len(window),) * len(window)
        weights = torch.stack([torch.as_tensor(self.weigh(batch), dtype=torch.float32) for batch in window])
        total = dist.all_reduce(weights.sum())
        return (weights * dist.get_world_size() / total).to(self.strategy.device).unbind()

    def _own_loss(self, result: Any) -> Tensor:
        """The loss of a model that is not called with a mode."""
        if isinstance(result, Mapping) and "loss" in result:
            loss = result["loss"]
        else:
            loss = getattr(result, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"model: {type(self.module).__name__}.forward has no parameter mode and gave {type(result).__name__} "
                "without a loss; return an object or dict with a loss, or take mode"
            )
        return loss

    def evaluate(self, batch: Any, mode: str) -> Any:
        """What the model predicts for one batch; ``mode`` is "val" or "test"."""
        if overrides(self.module, f"{mode}_step"):
            with self.strategy.autocast():
                return getattr(self.module, f"{mode}_step")(
                    batch if self.has_preprocessor else self._to_device(batch, False)
                )
        data = self.preprocess(batch, False)
        with self.strategy.autocast():
            return run_forward(self.model, data, **self._for_prediction)

    def _to_device(self, data: Any, training: bool) -> Any:
        return to_device(data, self.strategy.device)


def _added(total: dict[str, Tensor], logs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: total[name] + logs[name] for name in total if name in logs}
