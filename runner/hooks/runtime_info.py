"""RuntimeInfoHook: writes learning rates, losses, metrics and the position in training to the message hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.overriding import overridden
from ...core.registry import HOOKS
from ..reporting.history import HistoryBuffer
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Writes learning rates, training outputs, metrics and the loop's position to the message hub.

    Scalars are ``train/lr``, ``train/loss``, ``val/<metric>``; metrics that are not scalars become infos of that name.
    """

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self._rates: list[tuple[HistoryBuffer, Any]] = []
        self._get_lr: Callable[[], Mapping[str, Any]] | None = None  # the method of a wrapper class that overrides it
        self._outputs: dict[str, HistoryBuffer] = {}
        self._stages: list[str] = []

    def before_run(self, runner: Run) -> None:
        """Record the experiment's name."""
        runner.message_hub.update_info("experiment_name", runner.experiment_name, resumed=False)

    def before_train(self, runner: Run) -> None:
        """Record the start and the length of training."""
        self._enter(runner, "train")
        hub, optim = runner.message_hub, runner.optim_wrapper
        wrappers = {} if optim is None else optim.wrappers
        self._get_lr = None
        if any(overridden(each, "get_lr") for each in (optim, *wrappers.values())):
            self._get_lr = optim.get_lr  # type: ignore[union-attr]
            wrappers = {}
        self._rates = [
            (hub.history(f"train/{name}.lr" if name else "train/lr"), _holder(wrapper))
            for name, wrapper in wrappers.items()
            if wrapper.param_groups[0].get("lr") is not None  # an optimizer such as Adafactor may compute its own
        ]
        self._outputs = {}
        for key in ("epoch", "iter"):
            hub.compute_info(key, partial(getattr, runner, key))
        for key in ("max_epochs", "max_iters"):
            hub.update_info(key, getattr(runner, key))
        meta = _meta(runner, runner.train_dataloader)
        if meta is not None:
            hub.update_info("dataset_meta", meta)

    def after_train(self, runner: Run) -> None:
        """Record that training is over."""
        self._leave(runner)

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Record the learning rate of each optimizer's first parameter group."""
        for history, optimizer in self._rates:
            rate = optimizer.param_groups[0]["lr"]
            history.put(rate if type(rate) is float else _as_it_is(rate))
        if self._get_lr is not None:
            for name, rates in self._get_lr().items():
                runner.message_hub.update_scalar(f"train/{name}", rates[0])

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the outputs; tensors stay on their device."""
        if outputs:
            histories = self._outputs
            for key, value in outputs.items():
                if key in histories:
                    histories[key].put(value)
                else:  # the first time, with all checks
                    runner.message_hub.update_scalar(f"train/{key}", value)
                    histories[key] = runner.message_hub.history(f"train/{key}")

    def before_val(self, runner: Run) -> None:
        """Record that validation runs."""
        self._enter(runner, "val")
        _meta(runner, runner.val_dataloader)

    def after_val(self, runner: Run) -> None:
        """Record the stage that continues after validation."""
        self._leave(runner)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Record the metrics."""
        _keep(runner, "val", metrics)

    def before_test(self, runner: Run) -> None:
        """Record that testing runs."""
        self._enter(runner, "test")
        _meta(runner, runner.test_dataloader)

    def after_test(self, runner: Run) -> None:
        """Record that testing is over."""
        self._leave(runner)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Record the metrics."""
        _keep(runner, "test", metrics)

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Record that no stage is running."""
        self._stages = []
        runner.message_hub.pop_info("loop_stage")

    def _enter(self, runner: Run, stage: str) -> None:
        self._stages.append(stage)
        runner.message_hub.update_info("loop_stage", stage, resumed=False)

    def _leave(self, runner: Run) -> None:
        del self._stages[-1:]
        if self._stages:
            runner.message_hub.update_info("loop_stage", self._stages[-1], resumed=False)
        else:
            runner.message_hub.pop_info("loop_stage")


def _meta(runner: Run, dataloader: Any) -> Any:
    """Return ``metainfo`` of the dataset, after the visualizer got it too; None if there is none."""
    meta = getattr(getattr(dataloader, "dataset", None), "metainfo", None)
    if meta is not None:
        runner.visualizer.dataset_meta = meta
    return meta


def _holder(wrapper: Any) -> Any:
    """Return the object with the parameter groups: the optimizer, or the wrapper if its class overrides them."""
    return wrapper if overridden(wrapper, "param_groups", "optimizer") else wrapper.optimizer


def _as_it_is(rate: Any) -> Any:
    """Return the current learning rate; a tensor is copied, because schedulers change it in place."""
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def _keep(runner: Run, mode: str, metrics: Mapping[str, Any] | None) -> None:
    for key, value in (metrics or {}).items():
        if isinstance(value, (bool, int, float)) or getattr(value, "size", None) == 1 or _is_one_element(value):
            runner.message_hub.update_scalar(f"{mode}/{key}", value)
        else:
            runner.message_hub.update_info(f"{mode}/{key}", value)


def _is_one_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
