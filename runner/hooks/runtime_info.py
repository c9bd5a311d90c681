"""RuntimeInfoHook: writes learning rates, losses, metrics and the position in training to the message hub."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...core.base.errors import ConfigError
from ...core.base.overriding import overridden
from ...core.base.registry import HOOKS
from ..reporting.history import HistoryBuffer
from ..reporting.log_processor import num_batches
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


class _Taken(NamedTuple):
    """Stands for an output of the model that would be mixed with a figure of the log, or replaced by it."""

    name: str

    def put(self, value: Any) -> None:
        raise ConfigError(
            f'model: gives "{self.name}" to the log, which has a figure of its own by that name; give it another name'
        )


_FIGURES = ("lr", "time", "data_time", "memory", "epoch", "iter", "step")


@HOOKS.register_module()
class RuntimeInfoHook(Hook):
    """Writes learning rates, training outputs, metrics and the loop's position to the message hub.

    Scalars are ``train/lr``, ``train/loss``, ``val/<metric>``; metrics that are not scalars become infos of that name.
    """

    priority = "VERY_HIGH"

    def __init__(self) -> None:
        self._rates: list[tuple[HistoryBuffer, Any]] = []
        self._get_lr: Callable[[], Mapping[str, Any]] | None = None  # the method of a wrapper class that overrides it
        self._outputs: dict[str, HistoryBuffer | _Taken] = {}
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
        self._outputs = {name: _Taken(name) for name in _FIGURES}
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


# IterTimerHook: measures the time of iterations and estimates the time left.


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Measures the seconds per iteration and the part spent waiting for data, and estimates the time left.

    Scalars are ``<mode>/time`` and ``<mode>/data_time``; the estimate is the info ``eta``, in seconds. Time of
    validation does not enter the estimate, and that of saves enters no iteration's. The hook never waits for the device:
    its work shows in the iteration that waits for it.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._last = 0.0
        self._mode = "train"
        # Seconds and iterations of training, and of the current validation or test.
        self._seconds = self._eval_seconds = 0.0
        self._done = self._eval_done = 0
        self._loop: Any = None
        self._loop_s = self._saved_s = 0.0
        self.waited_s = 0.0
        """Seconds of this training in which this process has waited for data."""
        self._start = self._to_do = 0

    def before_train(self, runner: Run) -> None:
        """Reset the measurement; a resumed run starts from its iteration."""
        self._start, self._done, self._seconds, self.waited_s = runner.iter, 0, 0.0, 0.0
        self._loop = runner.train_loop
        self._loop_s = getattr(self._loop, "waited_s", 0.0)
        self._saved_s = getattr(runner, "saving_s", 0.0)
        self._data_times = runner.message_hub.history("train/data_time")
        self._times = runner.message_hub.history("train/time")
        self._last = time.perf_counter()

    def before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Start the clock and publish the estimate."""
        runner.message_hub.compute_info("eta", partial(self._eta, runner))
        self._mode = mode
        if mode == "train":
            self._to_do = runner.max_iters - self._start
        self._eval_done, self._eval_seconds = 0, 0.0
        self._last, self._saved_s = time.perf_counter(), getattr(runner, "saving_s", 0.0)

    def after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Switch the estimate back to training after a validation."""
        self._mode = "train"

    def after_val(self, runner: Run) -> None:
        """Restart the clock, so that the end of a validation does not count in the next iteration."""
        self._last, self._saved_s = time.perf_counter(), getattr(runner, "saving_s", 0.0)

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Record the time spent waiting for the batch, without that of hooks and saves after the update before."""
        loop_s = getattr(self._loop, "waited_s", None)  # a loop of one's own may have none
        waited = time.perf_counter() - self._last if loop_s is None else loop_s - self._loop_s
        self._loop_s = loop_s or 0.0
        self.waited_s += waited
        self._data_times.put(waited)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the time of the iteration."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        self._seconds += seconds
        self._done += 1
        saved_s, self._saved_s = self._saved_s, getattr(runner, "saving_s", 0.0)
        self._times.put(seconds - (self._saved_s - saved_s))

    def before_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Record the time spent waiting for a validation or test batch."""
        runner.message_hub.update_scalar(f"{mode}/data_time", time.perf_counter() - self._last)

    def after_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """Record the time of a validation or test batch."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._eval_seconds += seconds
        self._eval_done += 1
        runner.message_hub.update_scalar(f"{mode}/time", seconds)

    def _eta(self, runner: Run) -> float | None:
        """Return the seconds left; None before the first iteration is done."""
        if self._mode != "train":
            done, seconds, length = self._eval_done, self._eval_seconds, num_batches(runner, self._mode)
        else:
            done, seconds, length = self._done, self._seconds, self._to_do
        return seconds / done * (length - done) if done else None
