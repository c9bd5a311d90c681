"""Training loops: by epoch and by iteration."""

from __future__ import annotations

import bisect
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from ...core.base.config import NonNegativeInt, PositiveInt, check_call, refuse_foreign
from ...core.base.errors import ConfigError, counted
from ...core.base.registry import LOOPS
from ...core.comm.agreement import raising_together
from ...core.random.generators import load_rng_state, rng_state
from ...strategies.parts import meet
from ..data.dataloaders import TrainData
from .base import BaseLoop, EvaluationCut
from .losses import UnequalMeans
from .step import UpdateLeftOut, check_counted

if TYPE_CHECKING:
    from ..run import Run

_LEFT_OUT: Any = object()

VALIDATION_KEYS = {"val_begin", "val_interval", "dynamic_intervals"}
"""Arguments of the training loops that schedule validation."""


class TrainLoop(BaseLoop):
    """Base class of training loops: counts epochs and iterations, and makes one update per window of micro-batches.

    An iteration is one update. ``epoch`` and ``iter`` start at 0 and increase after the hooks of an epoch or iteration.

    A subclass may define ``run_iter(idx, data_batch)``, ``run_epoch`` or ``run`` anew, see BaseLoop. Its ``run_iter``
    makes exactly one update, by ``super().run_iter(idx, data_batch)`` or by
    ``self.runner.model.train_step(data_batch, optim_wrapper=self.runner.optim_wrapper)``.
    """

    by_epoch: bool = True
    before_first: Callable[[], object] = bool  # which does nothing
    _has_told_mode = False

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        val_begin: PositiveInt = 1,
        val_interval: PositiveInt = 1,
        dynamic_intervals: list[tuple[NonNegativeInt, PositiveInt]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader)
        self.val_begin = val_begin
        self._means: UnequalMeans | None = None
        self.val_interval: int = val_interval
        self.data = TrainData(
            self.loader,
            runner.accumulate,
            runner.seed,
            diff_rank_seed=runner.options.randomness.diff_rank_seed,
            shard=runner.strategy.topology.shard,
        )
        self.stop_training = False
        self.is_torn = False  # True if an exception has left an update unfinished
        self.start_iter = 0
        self._epoch = 0
        self._iter = 0
        # These two already count the update whose hooks are running; ``iter`` does not.
        self._done = 0
        self._inner = 0  # updates of the current epoch
        self._validated = 0  # epochs or iterations done at the last validation
        self.is_validating = False
        self._evaluated = 0  # batches of validations
        self._has_tried = False  # True after the dry pass
        self.waited_s = 0.0
        """Seconds in which ``batches`` has waited for data so far."""
        self._is_checked = False  # True after the strategy's check of the first window
        self._ahead = 0  # updates gained over epochs of constant length, after resuming
        later = sorted(dynamic_intervals or ())
        self._milestones = [0, *(begin for begin, _ in later)]
        self._intervals = [val_interval, *(interval for _, interval in later)]
        if self.data.epoch_length == 0:
            raise self.data.no_batch()

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Updates completed."""
        return self._iter

    @property
    def has_begun(self) -> bool:
        """Whether this process has begun with an update."""
        return self._is_checked

    @property
    def position(self) -> int:
        """Updates and batches of validations so far, which are as many on every process."""
        return self._done + self._evaluated

    @property
    def inner(self) -> int:
        """Updates completed in the current epoch; in the hooks of an update, including that update."""
        return self._inner

    @property
    def max_epochs(self) -> int:
        """Total number of epochs."""
        raise NotImplementedError

    @property
    def max_iters(self) -> int:
        """Total number of updates."""
        raise NotImplementedError

    @property
    def epoch_length(self) -> int:
        """Updates of the current epoch; after resuming with other batches, as if the whole epoch had these."""
        return self.data.length(self._epoch) or self._length

    @property
    def ends_with_filler(self) -> bool:
        """Whether the last micro-batch of the update under way is a filler on this process.

        A filler is one sample that is repeated and counts nothing, in the last update of an epoch with a
        ``DefaultSampler(round_up=False)``: the process has no sample there, and others have one. Hooks get it in
        ``data_batch`` like any other.
        """
        counted = self.data.counted
        return counted is not None and counted.ends_with_filler

    @property
    def _index(self) -> int:
        """The ``batch_idx`` of the next update."""
        return self._inner

    @property
    def _length(self) -> int:
        """Updates of a whole epoch; if it is endless, those of the run."""
        raise NotImplementedError

    def try_validation(self) -> None:
        """Make the dry pass of validation, before the first update of this process."""
        with raising_together():  # it is built here, and only rank 0 looks at the folders that its metrics write to
            loop = self._runner.val_loop
        if loop is None:
            return
        if not getattr(loop, "has_own_methods", True):
            self._runner.stepper.check_prediction("val")
        batches = self._runner.options.env_cfg.dry_batches
        done, end = (self._epoch, self.max_epochs) if self.by_epoch else (self._iter, self.max_iters)
        if batches and done < end and not self._has_tried:
            self._has_tried = True
            dry_run = getattr(loop, "dry_run", None)
            if dry_run is None:
                self._runner.logger.info(f"Dry pass: left out, {type(loop).__name__} is not derived from EvalLoop")
                return
            meet(self._runner.strategy, "the dry pass")
            dry_run(batches)

    def validate(self, done: int) -> None:
        """Validate if that is due after ``done`` epochs or iterations and was not done yet.

        A checkpoint is saved before the validation of its epoch or iteration. A resumed run must not skip that
        validation, because schedulers, early stopping and the best checkpoint depend on its metrics.
        """
        runner = self._runner
        loop = runner.val_loop
        if loop is None or done < self.val_begin or done == self._validated:
            return
        self._decide_current_val_interval(done)
        if done % self.val_interval == 0 or done == (self.max_epochs if self.by_epoch else self.max_iters):
            meet(runner.strategy, "validation")
            was_training = runner.model.training
            self._evaluate(loop)
            if runner.model.training != was_training:  # a loop of the user's may leave it so
                runner.model.train(was_training)
            self._validated = done

    def _evaluate(self, loop: Any) -> None:
        """Run a validation; if all processes end in its course, it counts as not begun."""
        random_state = rng_state(self._runner.strategy.device)
        self.is_validating, loop.after_batch = True, self._count_batch
        try:
            loop.run()
        except EvaluationCut:
            load_rng_state(random_state, self._runner.strategy.device)
            assert self._runner.stop_check is not None
            self._runner.stop_check("cut")
        finally:
            self.is_validating, loop.after_batch = False, None

    def _count_batch(self) -> None:
        self._evaluated += 1

    def _decide_current_val_interval(self, done: int | None = None) -> None:
        """Set ``val_interval``; as in MMEngine, an interval holds from the next epoch or iteration on."""
        if done is None:
            done = self._epoch if self.by_epoch else self._iter
        if self._intervals[1:]:  # else a hook may have set another one
            self.val_interval = self._intervals[bisect.bisect(self._milestones, done + 1) - 1]

    def run_iter(self, idx: Any, data_batch: Any = _LEFT_OUT) -> None:
        """Make one update, with its hooks; ``run_iter(data_batch)`` does it too, as in MMEngine's IterBasedTrainLoop.

        Args:
            idx: index of the update for the hooks, ``batch_idx``: in the epoch; in training by iterations, in the run.
            data_batch: the batch; with ``accumulative_counts`` above 1 the list of the update's micro-batches.
        """
        if data_batch is _LEFT_OUT:
            idx, data_batch = self._index, idx
        runner = self._runner
        hooks = runner.hook_calls
        window = [data_batch] if self.data.accumulate == 1 else data_batch
        if not self._is_checked:
            self._is_checked = True
            runner.stepper.check(window, self.data.counted)
            self.before_first()
            if "transformers" in sys.modules:  # of whose models it is known
                self._tell_large_logits(window[0])
            shards = runner.strategy.topology.data.count
            self._means = UnequalMeans(shards) if shards > 1 or len(window) > 1 else None
        for hook in hooks.before_train_iter:
            hook(runner, idx, data_batch)
        if not runner.stepper.module.training:
            self._tell_mode()
        if self._means is not None and self.data.counted is None and not self._means.look(runner.stepper, window):
            self._means = None
        outputs = self._update(data_batch)
        for hook in hooks.after_train_iter:
            hook(runner, idx, data_batch, outputs)
        self._iter = self._done
        if runner.stop_check is not None and not self.has_own_methods:
            runner.stop_check("update")

    def _tell_mode(self) -> None:
        if not self._has_told_mode:
            self._has_told_mode = True
            self._runner.logger.warning(
                f"model: is in evaluation mode in the update after iteration {self._done}, so it trains without dropout, and batch "
                "normalisation with the statistics so far; a hook that calls eval() has to call train() again"
            )

    def _tell_large_logits(self, batch: Any) -> None:
        from ..transforms.chunked_loss import large_logits

        if line := large_logits(self._runner.strategy.module, batch):
            self._runner.logger.info(line)

    # Batches, and updates by methods of a subclass

    def batches(self) -> Iterator[Any]:
        """Yield what ``run_iter`` gets, for all updates that are left; see BaseLoop.

        Raises:
            ConfigError: not exactly one update was made of a batch.
        """
        raise NotImplementedError

    def _due(self, stop: int | None = None) -> Iterator[Any]:
        """Yield what ``run_iter`` gets, up to the update ``stop`` of the epoch."""
        if (last := self.data.last_counted(self._epoch, stop)) is not None:
            check_counted(last, self._runner.stepper)
        if self.dataloader is not self.loader and not self.has_own_methods:
            raise self._replaced()
        windows = self.data.windows(self._epoch, self._inner, stop)
        due = self._timed(map(itemgetter(0), windows) if self.data.accumulate == 1 else windows)
        return self._checked(due) if self.has_own_methods else due

    def _timed(self, due: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            try:
                batch = next(due)
            except StopIteration:
                return
            finally:
                self.waited_s += time.perf_counter() - began
            yield batch

    def _checked(self, due: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and check after each that one update was made of it."""
        self._iter = done = self._done
        for batch in due:
            yield batch
            done += 1
            if self._done != done:
                made = counted(self._done - done + 1, "update")
                raise ConfigError(
                    f"train_cfg.type: {type(self).__name__} made {made} of a batch, and has to make one: call "
                    "super().run_iter(idx, data_batch), or self.runner.model.train_step(data_batch, "
                    "optim_wrapper=self.runner.optim_wrapper)"
                )
            self._iter = done
            if self._runner.stop_check is not None:
                self._runner.stop_check("update")

    def _update(self, data_batch: Any) -> Any:
        try:
            window = [data_batch] if self.data.accumulate == 1 else data_batch
            outputs = self._runner.stepper.train(window, self.data.counted)
        except UpdateLeftOut as found:
            outputs = found.outputs
        except BaseException:
            self.is_torn = True
            raise
        self._inner += 1
        self._done += 1
        return outputs

    def _steps(self) -> int:
        return self._done

    def _end_workers(self) -> None:
        self.data.close()

    def _iterate(self) -> Callable[[int, Any], object]:
        """Return ``run_iter``; a subclass's own may take the batch alone, as MMEngine's IterBasedTrainLoop does."""
        if not self.has_own_methods:
            return self.run_iter
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.run_iter).parameters.values()
        takes_index = sum(parameter.kind in kinds for parameter in parameters) != 1
        return self.run_iter if takes_index else lambda idx, data_batch: self.run_iter(data_batch)

    def state_dict(self) -> dict[str, int | None]:
        """Return the position in training, correct inside hooks too.

        ``epoch`` and ``iter``: epochs and updates completed; ``inner`` and ``left``: updates done and left in the
        epoch, None for an endless one; ``validated``: epochs or iterations done at the last validation.
        """
        epoch, inner = self._progress()
        length = self.data.length(epoch)
        left = None if length is None else max(0, length - inner)
        return {"epoch": epoch, "iter": self._done, "inner": inner, "left": left, "validated": self._validated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in ``state``; ``left`` is computed from the data."""
        self._epoch, self._iter, self._inner = state["epoch"], state["iter"], state["inner"]
        self._validated = state["validated"]
        self.start_iter = self._done = self._iter
        self._count_ahead()

    def _count_ahead(self) -> None:
        usual, length = self.data.epoch_length, self.data.length(self._epoch)
        if usual is not None and length is not None:
            self._ahead = self._done + (length - self._inner) - (self._epoch + 1) * usual

    def _jump(self) -> bool:
        """Go on after data that are left out; return False if nothing of the epoch is left."""
        inner = self.data.go_on_at(self._epoch, self._inner)
        if inner is not None and inner != self._inner:
            self._inner = inner
            self._count_ahead()
        return inner is not None

    def _progress(self) -> tuple[int, int]:
        """Return the epoch, and the updates completed in it."""
        return self._epoch, self._inner


# EpochBasedTrainLoop: training in passes over the data.


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Trains for a number of epochs.

    Args:
        max_epochs: number of epochs.
        val_begin: first epoch, counted from 1, after which validation may run.
        val_interval: epochs between validations; the last epoch is always validated.
        dynamic_intervals: ``[(epoch, interval), ...]``: the interval holds from that epoch on.
    """

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        max_epochs: PositiveInt,
        val_begin: PositiveInt = 1,
        val_interval: PositiveInt = 1,
        dynamic_intervals: list[tuple[NonNegativeInt, PositiveInt]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        if self.data.epoch_length is None:
            raise ConfigError(
                "train_cfg.by_epoch: the training data have no end or no length, give by_epoch=False and max_iters, or the "
                "dataset or loader a __len__"
            )
        self._max_epochs = max_epochs
        self._ended: int | None = None  # the epoch that has ended last, until the next one begins

    @property
    def _length(self) -> int:
        return cast(int, self.data.epoch_length)

    @property
    def max_epochs(self) -> int:
        """See TrainLoop."""
        return self._max_epochs

    @property
    def max_iters(self) -> int:
        """See TrainLoop."""
        return self._max_epochs * self._length + self._ahead

    @property
    def inner(self) -> int:
        """See TrainLoop."""
        return self._inner if self._ended in (None, self._epoch) else 0

    def run(self) -> Any:
        """Train, with validation after the epochs at which it is due."""
        runner = self._runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.try_validation()
        self.validate(self._epoch)
        while self._epoch < self._max_epochs and not self.stop_training:
            self._begin()
            begun = self._epoch
            self.run_epoch()
            if self._inner == 0:
                raise ConfigError(f"train_cfg.type: {type(self).__name__}.run_epoch made no update, see run_iter")
            self._ended, self._epoch = begun, begun + 1  # a subclass's own may leave the counting to the loop
            self.validate(self._epoch)
        runner.call_hook("after_train")
        return runner.model

    def run_epoch(self) -> None:
        """Train on one epoch, or on the rest of it."""
        runner = self._runner
        self._begin()
        runner.model.train()
        runner.call_hook("before_train_epoch")
        run_iter = self._iterate()
        for idx, batch in enumerate(self.batches(), self._inner):
            run_iter(idx, batch)
        if self._inner == 0:
            raise self.data.no_batch()
        self._ended = self._epoch
        runner.call_hook("after_train_epoch")
        self._epoch += 1

    def batches(self) -> Iterator[Any]:
        """See TrainLoop; those that are left in the epoch."""
        self._begin()
        return self._due()

    def _begin(self) -> None:
        if self._ended is not None:
            self._ended, self._inner = None, 0
        if not self._jump():
            self._inner = cast(int, self.data.length(self._epoch))
            self._count_ahead()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See TrainLoop."""
        self._ended = None
        super().load_state_dict(state)

    def _at_hook(self, point: str) -> None:
        if point == "after_train_epoch":
            self._ended = self._epoch

    def _progress(self) -> tuple[int, int]:
        """Return the epoch and its updates; in the hooks after an epoch, the epoch is counted as completed."""
        return (self._epoch, self._inner) if self._ended is None else (self._ended + 1, 0)


# IterBasedTrainLoop: training for a number of updates.


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Trains for a number of updates, starting the data again whenever they end.

    Args:
        max_iters: number of updates.
        val_begin: first iteration, counted from 1, after which validation may run.
        val_interval: iterations between validations; the last iteration is always validated.
        dynamic_intervals: ``[(iteration, interval), ...]``: the interval holds from that iteration on.
    """

    by_epoch = False

    def __init__(
        self,
        runner: Run,
        dataloader: Iterable[Any],
        max_iters: PositiveInt,
        val_begin: PositiveInt = 1,
        val_interval: PositiveInt = 1000,
        dynamic_intervals: list[tuple[NonNegativeInt, PositiveInt]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self._max_iters = max_iters
        self._iterator: Iterator[Any] | None = None

    @property
    def _index(self) -> int:
        return self._done

    @property
    def _length(self) -> int:
        return self.data.epoch_length or self._max_iters

    @property
    def max_epochs(self) -> int:
        """See TrainLoop."""
        return math.ceil((self._max_iters - self._ahead) / self._length)

    @property
    def max_iters(self) -> int:
        """See TrainLoop."""
        return self._max_iters

    def run(self) -> Any:
        """Train, with validation after the iterations at which it is due."""
        runner = self._runner
        self._iter = self._done  # a hook of the last update may have ended the run before
        runner.call_hook("before_train")
        self.try_validation()
        self.validate(self._iter)
        runner.model.train()
        runner.call_hook("before_train_epoch")
        if not self.stop_training:
            self._run_iters()
        runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")
        return runner.model

    def _run_iters(self) -> None:
        run_iter = self._iterate()
        for batch in self.batches():
            run_iter(self._done, batch)
            self._iter = self._done  # a subclass's own may leave the counting to the loop
            self.validate(self._iter)
            if self.stop_training:
                return

    def batches(self) -> Iterator[Any]:
        """See TrainLoop; those of all passes over the data that are left. An InfiniteSampler's pass never ends."""
        while self._done < self._max_iters:
            if self._jump():
                stop = self._inner + self._max_iters - self._done
                for batch in self._due(stop):  # to its end, where the last batch is compared
                    yield batch
                    if self._done >= self._max_iters and self._inner < stop:  # a hook has set an earlier end
                        return
                if self._inner == 0:
                    raise self.data.no_batch()
                if self._inner == stop != self.data.length(self._epoch):
                    continue  # if a hook has set a later end, the pass goes on
            else:
                self.data.pass_over(self._epoch, self._inner)
            if self._done < self._max_iters:
                self._epoch += 1
                self._inner = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See TrainLoop."""
        self._iterator = None
        super().load_state_dict(state)

    @property
    def dataloader_iterator(self) -> Iterator[Any]:
        """The iterator over ``batches()``, as MMEngine's loop has it."""
        if self._iterator is None:
            self._iterator = self.batches()
        return self._iterator


# ``train_cfg``, ``val_cfg`` and ``test_cfg``, each read and checked once: the class of a loop, and its arguments.


_COUNTS = ("max_epochs", "max_iters", "val_begin", "val_interval")


@dataclass(frozen=True)
class LoopConfig:
    """A loop that is to be built.

    Attributes:
        loop: its class, or a function that returns it.
        arguments: what it gets beside the runner and the data.
    """

    loop: Any
    arguments: Mapping[str, Any]


class TrainConfig(LoopConfig):
    """``train_cfg``."""

    @classmethod
    def read(cls, given: Any) -> TrainConfig:
        """Check a runner's ``train_cfg``, and return what it says.

        Raises:
            ConfigError: a key is unknown, missing or contradicts another one.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"train_cfg: {given!r} is not allowed, give dict(by_epoch=True, max_epochs=...)")
        arguments = dict(given)
        for name in _COUNTS:
            if isinstance(value := arguments.get(name), float) and value.is_integer():  # such as 1e5
                arguments[name] = int(value)
        by_epoch = arguments.pop("by_epoch", None)
        if by_epoch is not None and not isinstance(by_epoch, bool):
            raise ConfigError(f"train_cfg.by_epoch: {by_epoch!r} is not allowed, give True or False")
        if (kind := arguments.pop("type", None)) is not None:
            if by_epoch is not None:
                raise ConfigError("train_cfg.by_epoch: has no meaning beside train_cfg.type, give one of them")
            loop = LOOPS.resolve(kind, "train_cfg.type")
            refuse_foreign(loop, "train_cfg.type", "flextrain.runner.loops.train.TrainLoop", LOOPS)
            if inspect.isclass(loop) and not issubclass(loop, TrainLoop):
                raise ConfigError(
                    f"train_cfg.type: {loop.__name__} is no training loop; subclass EpochBasedTrainLoop or IterBasedTrainLoop, "
                    "which count for checkpoints and schedules, and define run_iter, run_epoch or run"
                )
        else:
            if by_epoch is None:
                if arguments.get("max_iters") is not None and arguments.get("max_epochs") is not None:
                    raise ConfigError("train_cfg.max_iters: max_epochs is given too, keep one of them")
                by_epoch = "max_iters" not in arguments
            loop, right, wrong = EpochBasedTrainLoop, "max_epochs", "max_iters"
            if not by_epoch:
                loop, right, wrong = IterBasedTrainLoop, wrong, right
            if wrong in arguments:
                raise ConfigError(f"train_cfg.{wrong}: has no meaning with by_epoch={by_epoch}, give {right}")
        check_call(loop, arguments, "train_cfg", ("runner", "dataloader"))
        return cls(loop, arguments)

    @property
    def by_epoch(self) -> bool:
        """Whether training is counted in passes over the data."""
        return self.loop.by_epoch  # type: ignore[no-any-return]

    @property
    def max_epochs(self) -> int | None:
        """The number of passes; None: training is counted in iterations."""
        return self.arguments.get("max_epochs")


class EvalConfig(LoopConfig):
    """``val_cfg`` or ``test_cfg``."""

    @classmethod
    def read(cls, given: Any, mode: str) -> EvalConfig:
        """Check a runner's ``val_cfg`` or ``test_cfg``, and return what it says.

        Raises:
            ConfigError: a key is unknown, or the class is no loop of evaluation.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{mode}_cfg: {given!r} is not allowed, give dict()")
        where = f"{mode}_cfg.type"
        loop = LOOPS.resolve(given.get("type", "ValLoop" if mode == "val" else "TestLoop"), where)
        refuse_foreign(loop, where, "flextrain.BaseLoop", LOOPS)
        if inspect.isclass(loop):
            if not issubclass(loop, BaseLoop) or issubclass(loop, TrainLoop):
                raise ConfigError(f"{where}: {loop.__name__} is no evaluation loop")
            parameters = inspect.signature(loop).parameters.values()
            if not any(p.name == "evaluator" or p.kind is p.VAR_KEYWORD for p in parameters):
                raise ConfigError(f"{where}: {loop.__name__} takes no evaluator; take runner, dataloader and evaluator")
        arguments = {key: value for key, value in given.items() if key != "type"}
        check_call(loop, arguments, f"{mode}_cfg", ("runner", "dataloader", "evaluator"))
        return cls(loop, arguments)
