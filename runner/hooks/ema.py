"""EMAHook: keeps a moving average of the weights, which validation and testing use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ...core.errors import CheckpointError, ConfigError
from ...core.registry import HOOKS
from .averaging import WeightAverage
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run

AverageType = Literal["ExponentialMovingAverage", "StochasticWeightAverage", "MomentumAnnealingEMA"]
_PREFIX = "averaged."


@HOOKS.register_module()
class EMAHook(Hook):
    """Keeps an average of the model's weights, and puts it into the model for validation and testing.

    The model's own weights are restored afterwards, also when validation raises. A checkpoint holds them as the model,
    and the averages beside them. If there are float32 master weights, the average follows these. Averages of
    half-precision weights are kept in float32, because small momenta need the precision. An update that loss scaling
    skipped does not move the average.

    Args:
        ema_type: ExponentialMovingAverage, StochasticWeightAverage (the mean of all), or MomentumAnnealingEMA (the
            momentum falls like ``gamma / (gamma + updates)`` to its minimum ``momentum``), or a function that gives the
            momentum for a number of former updates.
        strict_load: raise if a checkpoint's averages have other names; otherwise the model's weights fill the gaps.
        begin_iter: first iteration that counts in the average.
        begin_epoch: first epoch that counts in the average; give only one of the two.
        momentum: weight of the newest weights in the average; default 0.0002.
        gamma: see MomentumAnnealingEMA in ``ema_type``; default 100.
        interval: the average moves at every ``interval``-th update.
        update_buffers: average floating-point buffers too; otherwise validation uses the model's own.
    """

    priority = "NORMAL"
    holds_weights = True

    def __init__(
        self,
        ema_type: AverageType | Callable[[int], float] = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        momentum: float | None = None,
        gamma: int | None = None,
        interval: int = 1,
        update_buffers: bool = False,
    ) -> None:
        if begin_iter < 0 or begin_epoch < 0 or (begin_iter and begin_epoch):
            raise ConfigError(
                f"EMAHook.begin_iter: {begin_iter} with begin_epoch={begin_epoch} is not allowed, give one of them, 0 or more"
            )
        if interval < 1:
            raise ConfigError(f"EMAHook.interval: {interval} is not allowed, give 1 or more")
        self.strict_load = strict_load
        self.begin_iter = begin_iter
        self.begin_epoch = begin_epoch
        self.update_buffers = update_buffers
        self.momentum = momentum
        self._weight = _weight_of(ema_type, momentum, gamma, interval)
        self._interval = interval
        self._average: WeightAverage | None = None
        self._updates = 0

    def before_run(self, runner: Run) -> None:
        """Allocate the averages; they have no meaning before the first update."""
        if self._average is None:
            self._average = WeightAverage(_averaged(runner, self.update_buffers))

    def before_train(self, runner: Run) -> None:
        """Check that the average starts before training ends; training from iteration 0 starts a new average."""
        if runner.iter == 0:
            self._updates = 0
        for name, begin, limit in (
            ("begin_epoch", self.begin_epoch, runner.max_epochs),
            ("begin_iter", self.begin_iter, runner.max_iters),
        ):
            if begin > limit:
                raise ConfigError(f"EMAHook.{name}: {begin} is not allowed, training ends at {limit}")
        if self.momentum is not None and self.momentum > 0.5:
            runner.logger.warning(
                f"EMAHook.momentum: {self.momentum} is the share of the newest weights, so the averages are hardly different "
                f"from them; what others call a decay of {self.momentum} is momentum={1 - self.momentum:.4g}"
            )

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Move the average if the update was applied."""
        optim = runner.optim_wrapper
        if not self._has_begun(runner) or optim is None or optim.last_step.skipped:
            return
        if self._updates == 0:
            self._get().copy_from_model()
        elif self._updates % self._interval == 0:
            self._get().lerp_to_model(self._weight(self._updates))
        self._updates += 1

    def before_val_epoch(self, runner: Run) -> None:
        """Put the averages into the model."""
        self._swap_in(runner)

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Restore the weights."""
        self._swap_out(runner)

    def before_test_epoch(self, runner: Run) -> None:
        """Put the averages into the model."""
        self._swap_in(runner)

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Restore the weights."""
        self._swap_out(runner)

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Restore the weights if validation or testing was interrupted.

        Half-precision weights follow if all processes have failed: where weights are sharded that takes a collective,
        in which others than this process may not be.
        """
        if self._average is not None and self._average.is_swapped_in:
            self._average.swap_out()
            if runner.all_have_failed():
                _refresh(runner)

    def before_save_checkpoint(self, runner: Run, checkpoint: dict[str, Any]) -> None:
        """Restore the weights if a checkpoint is saved while the averages are in the model."""
        self._swap_out(runner)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as ``averaged.<name>``, sharded like the weights, and the number of updates."""
        if self._average is None:
            return {}
        averages = {_PREFIX + name: tensor for name, tensor in self._average.averages.items()}
        return {"updates": self._updates, **averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``.

        Raises:
            CheckpointError: the averages have other names than the model's weights, and ``strict_load`` is set.
        """
        found = {key.removeprefix(_PREFIX): value for key, value in state.items() if key.startswith(_PREFIX)}
        averages = self._get().averages
        if self.strict_load and found.keys() != averages.keys():
            names = sorted(found.keys() ^ averages.keys())
            raise CheckpointError(
                f"EMAHook.strict_load: the checkpoint's averages differ from the model in {', '.join(names)}"
            )
        self._get().load(found)
        self._updates = int(state.get("updates", 0))

    def _get(self) -> WeightAverage:
        assert self._average is not None, "before_run makes it"
        return self._average

    def _has_begun(self, runner: Run) -> bool:
        if self.begin_epoch:
            return runner.epoch + 1 >= self.begin_epoch
        return runner.iter + 1 >= self.begin_iter

    def _swap_in(self, runner: Run) -> None:
        # Before the first update the averages hold old weights.
        if self._average is not None and self._updates:
            self._average.swap_in()
            _refresh(runner)

    def _swap_out(self, runner: Run) -> None:
        if self._average is not None and self._average.is_swapped_in:
            self._average.swap_out()
            _refresh(runner)


def _averaged(runner: Run, with_buffers: bool) -> dict[str, Tensor]:
    """Return the live tensors to average, by canonical name."""
    strategy = runner.strategy
    left_out = set() if with_buffers else {name for name, _ in strategy.module.named_buffers()}
    return {
        name: tensor
        for name, tensor in strategy.model_state().items()
        if (tensor.is_floating_point() or tensor.is_complex()) and name not in left_out
    }


def _refresh(runner: Run) -> None:
    """Copy the float32 master weights into the half-precision weights."""
    if runner.optim_wrapper is not None:
        for wrapper in runner.optim_wrapper.wrappers.values():
            wrapper.refresh()


def _weight_of(
    kind: str | Callable[[int], float], momentum: float | None, gamma: int | None, interval: int
) -> Callable[[int], float]:
    """Return a function from the number of former updates to the share of the newest weights."""
    where = "EMAHook"
    if callable(kind):
        if momentum is not None or gamma is not None:
            raise ConfigError(
                f"{where}.{'gamma' if momentum is None else 'momentum'}: has no meaning with a function as ema_type, leave it out"
            )
        return kind
    if gamma is not None and (kind != "MomentumAnnealingEMA" or gamma < 1):
        raise ConfigError(f"{where}.gamma: {gamma} is not allowed with {kind}, give 1 or more to MomentumAnnealingEMA")
    if kind == "StochasticWeightAverage":
        if momentum is not None:
            raise ConfigError(f"{where}.momentum: has no meaning with StochasticWeightAverage, leave it out")
        return lambda updates: 1.0 / (updates // interval + 1)
    lowest = 0.0002 if momentum is None else momentum
    if not 0.0 < lowest < 1.0:
        raise ConfigError(
            f"{where}.momentum: {lowest} is not allowed, give a number between 0 and 1, small for a long memory"
        )
    if kind == "ExponentialMovingAverage":
        return lambda updates: lowest
    if kind == "MomentumAnnealingEMA":
        fall = 100 if gamma is None else gamma
        return lambda updates: max(lowest, fall / (fall + updates))
    known = "ExponentialMovingAverage, StochasticWeightAverage or MomentumAnnealingEMA"
    raise ConfigError(f'{where}.ema_type: "{kind}" is not allowed, choose {known}')
