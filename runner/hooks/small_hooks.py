"""Hooks of a few lines: empty caches, average buffers, tell samplers the epoch, step schedules, compare replicas, prepare tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.base.errors import ConfigError
from ...core.base.registry import HOOKS, MODELS
from ...core.device.device import empty_cache
from ...core.model.base_model import BaseTTAModel
from ...optim.wrapper import StepInfo
from ...strategies.parts import average_buffers, check_replicas, keep_own_buffers
from ..data.samplers import tell_loader_epoch
from .early_stopping import says_greater
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Returns memory that the caching allocator holds to the device.

    Args:
        before_epoch: before every epoch of training, validation and testing.
        after_epoch: after every epoch.
        after_iter: after every iteration.
    """

    priority = "NORMAL"

    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        self._does_before_epoch = before_epoch
        self._does_after_epoch = after_epoch
        self._does_after_iter = after_iter

    def before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Empty the cache if ``before_epoch`` is set."""
        if self._does_before_epoch:
            empty_cache(runner.strategy.device)

    def after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Empty the cache if ``after_epoch`` is set."""
        if self._does_after_epoch:
            empty_cache(runner.strategy.device)

    def after_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = "train",
    ) -> None:
        """Empty the cache if ``after_iter`` is set."""
        if self._does_after_iter:
            empty_cache(runner.strategy.device)


# SyncBuffersHook: averages buffers, such as running statistics, over the processes.


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Replaces floating-point buffers by their mean over the processes after every training epoch.

    Loops without epochs do this before every validation. Until then each process's buffers follow its own data, unless
    the strategy has ``broadcast_buffers=True``. A checkpoint in the middle of an epoch has those of the first process.
    """

    priority = "NORMAL"

    def __init__(self) -> None:
        self._is_fresh = False

    def before_train(self, runner: Run) -> None:
        """Let the buffers of processes differ until they are averaged."""
        keep_own_buffers(runner.strategy)

    def after_train_epoch(self, runner: Run) -> None:
        """Average the buffers; the validation that follows need not do it again."""
        average_buffers(runner.strategy)
        self._is_fresh = True

    def before_val_epoch(self, runner: Run) -> None:
        """Average the buffers, unless this was done since the last validation."""
        if not self._is_fresh:
            average_buffers(runner.strategy)
        self._is_fresh = False


# DistSamplerSeedHook: gives the epoch to samplers, for a new order of samples in every epoch.


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Calls ``set_epoch`` of the training sampler, so that every epoch has a new order, the same on all processes."""

    priority = "NORMAL"

    def before_train_epoch(self, runner: Run) -> None:
        """Call ``set_epoch`` of every part of the training data that has it.

        The dataloaders call it too before they are read. Custom loops may read one directly, and need this call.
        """
        tell_loader_epoch(runner.train_dataloader, runner.epoch)


# ParamSchedulerHook: steps learning rate and momentum schedulers.


_MADE = StepInfo()
"""What is known of a step of a torch optimizer, which a scheduler of the user's may have in place of the wrapper."""


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Steps the parameter schedulers: by iteration, by epoch, or by the metrics of a validation.

    A scheduler that counts iterations does not count an update that loss scaling skipped. It counts an iteration in which the recipe or
    the model makes no update, as in MMEngine.
    """

    priority = "LOW"
    _loop: Any = None
    _lists: Sequence[Sequence[Any]] = ()
    _number = 0
    _by_iter: Sequence[Any] = ()
    _by_epoch: Sequence[Any] = ()
    _iter = _epoch = 0  # those after which the schedulers have stepped
    _judged = -1  # the iteration of the validation that was judged last
    _repeated = -1  # that of the one that a resumed run may repeat

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration of the validation that schedulers have stepped with, which a resumed run may repeat."""
        return {"judged": self._judged} if self._judged >= 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._judged = self._repeated = int(state["judged"])

    @property
    def due_steps(self) -> list[str]:
        """The steps, "iter" and "epoch", that are still to come at the end of an update or epoch, where another hook may save before."""
        if self._loop is None:
            return []
        done, loop = self._loop.state_dict(), self._loop
        skipped = any(getattr(each.optimizer, "last_step", _MADE).skipped for each in self._by_iter)
        due = {
            "iter": done["iter"] > max(loop.iter, self._iter) and bool(self._by_iter) and not skipped,
            "epoch": loop.by_epoch and done["epoch"] > max(loop.epoch, self._epoch) and bool(self._by_epoch),
        }
        return [unit for unit, is_due in due.items() if is_due]

    def check_metrics(self, runner: Run, names: Collection[str]) -> None:
        """Raise ConfigError if a scheduler monitors a metric that is missing."""
        for scheduler in (*self._by_epoch, *self._by_iter):
            scheduler.check_metrics(names)

    def before_train(self, runner: Run) -> None:
        """Sort the schedulers into those by iteration and those by epoch."""
        given = runner.param_schedulers
        self._lists = list(given.values()) if isinstance(given, Mapping) else [] if given is None else [given]
        schedulers = [scheduler for group in self._lists for scheduler in group]
        self._number = len(schedulers)
        self._by_iter, self._by_epoch = ([s for s in schedulers if bool(s.by_epoch) is unit] for unit in (False, True))
        self._loop, self._iter, self._epoch = runner.train_loop, runner.iter, runner.epoch
        if self._by_epoch:
            self._warn_of_rules(runner)

    def _warn_of_rules(self, runner: Run) -> None:
        for scheduler in self._by_epoch:
            if (
                scheduler.need_val_args
                and getattr(scheduler, "rule", None) == "less"
                and says_greater(scheduler.monitor)
            ):
                runner.logger.warning(
                    f'{type(scheduler).__name__}.rule: with "less" the value falls while {scheduler.monitor} grows; give '
                    'rule="greater" if more is better'
                )

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Step the schedulers that count iterations."""
        if sum(map(len, self._lists)) != self._number:  # a hook has added one
            self.before_train(runner)
        for scheduler in self._by_iter:
            if not getattr(scheduler.optimizer, "last_step", _MADE).skipped:
                scheduler.step()
        self._iter += 1

    def after_train_epoch(self, runner: Run) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in self._by_epoch:
            scheduler.step()
        self._epoch += 1

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Step the schedulers that depend on metrics, during training only, and once for a validation that is repeated after resuming."""
        judging = [scheduler for scheduler in self._by_epoch if scheduler.need_val_args]
        if not judging or runner.iter == self._repeated:
            return
        for scheduler in judging:
            scheduler.step(metrics or {})
        self._judged = runner.iter

    def after_train(self, runner: Run) -> None:
        """Leave training: a later validation must not step schedulers."""
        self._lists, self._number, self._by_iter, self._by_epoch, self._loop = (), 0, (), (), None

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training: a later validation must not step schedulers."""
        self._lists, self._number, self._by_iter, self._by_epoch, self._loop = (), 0, (), (), None


# CheckReplicasHook: compares replicas of the model's tensors while training goes on.


@HOOKS.register_module()
class CheckReplicasHook(Hook):
    """Compares weights and optimizer state with the replicas on other processes, between saves, which compare them too.

    A difference, such as a flipped bit in the memory of one device, is a DivergenceError on every process. It names the
    tensor and the ranks. See ``check_replicas`` of strategies/parts for what is compared. Every check waits for the device.

    Args:
        interval: updates between two checks.
    """

    priority = "LOW"  # before checkpoints are saved

    def __init__(self, interval: int = 500) -> None:
        given: object = interval  # a configuration may have anything
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ConfigError(f"CheckReplicasHook.interval: {interval!r} is not allowed, give an integer of 1 or more")
        self.interval = interval

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare after every ``interval`` updates."""
        if (runner.iter + 1) % self.interval == 0:
            check_replicas(runner.strategy)


# PrepareTTAHook: tests a trained model with several augmentations of every sample.


@HOOKS.register_module()
class PrepareTTAHook(Hook):
    """Makes ``runner.test()`` merge the predictions of augmented samples; see BaseTTAModel.

    Args:
        tta_cfg: ``dict(type=..., **arguments)`` of the BaseTTAModel, without its ``module``, which is the run's.
    """

    priority = "VERY_HIGH"

    def __init__(self, tta_cfg: dict[str, Any], *, where: str = "PrepareTTAHook") -> None:
        kind = MODELS.check(tta_cfg, f"{where}.tta_cfg", ("module",))
        if isinstance(kind, type) and not issubclass(kind, BaseTTAModel):
            raise ConfigError(f"{where}.tta_cfg.type: {kind.__name__} is not derived from BaseTTAModel")
        given: Any = tta_cfg
        if isinstance(given, Mapping) and given.get("data_preprocessor") is not None:
            raise ConfigError(
                f"{where}.tta_cfg.data_preprocessor: has no meaning beside a run's model, which keeps its own; leave it out"
            )
        self.tta_cfg: Mapping[str, Any] = tta_cfg
        self._built: BaseTTAModel | None = None

    def before_test(self, runner: Run) -> None:
        """Build the BaseTTAModel around the run's model."""
        if runner.stepper.merging not in (None, self._built):
            raise ConfigError("PrepareTTAHook: the runner's model is a BaseTTAModel already, leave the hook out")
        self._built = MODELS.build(self.tta_cfg, "PrepareTTAHook.tta_cfg", module=runner.strategy.module)
        runner.stepper.merge_with(self._built)

    def after_test(self, runner: Run) -> None:
        """Test without augmentations again."""
        runner.stepper.merge_with(None)
