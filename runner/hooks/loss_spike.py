"""LossSpikeHook: takes back a stretch of training in which the loss spikes, and leaves out the data that caused it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...core.base.errors import ConfigError, LossSpikeError
from ...core.base.registry import HOOKS
from ...core.checkpoint import as_path
from ...core.comm.agreement import told_by_rank_0
from ...core.comm.collectives import broadcast_object
from ..reporting.message_hub import AVERAGED
from ..resume.choose_checkpoint import GoBack
from ..resume.going_back import newest_until, noted_since_the_start
from .checkpoint import CheckpointHook
from .hook import Hook
from .logger import LoggerHook

if TYPE_CHECKING:
    from ..run import Run

_TIMES = "spikes"
"""A fact of the event \"went_back\": how many spikes the run has taken back so far."""

# SpikeDetector: finds losses that are far above those before them.


_TO_DEVIATIONS = 1.4826
"""The median distance from the median times this is the standard deviation of normally distributed numbers."""
_LEAST_SPREAD = 1e-3
"""Share of the median below which losses do not count as spread: rounding is no spike."""


class SpikeDetector:
    """Compares each loss with the median and the spread of those before it, which a few outliers do not change.

    Args:
        window: number of losses to compare with; nothing is a spike before half of them are known.
        threshold: deviations above the median from which on a loss is too high.
        patience: so many of them in a row are a spike; one that is not finite is a spike at once.

    Source: Hampel, "The Influence Curve and its Role in Robust Estimation", 1974 (median absolute deviation).
    """

    def __init__(self, window: int, threshold: float, patience: int) -> None:
        self._threshold, self._patience = threshold, patience
        self.tolerates_nonfinite = False
        """True if somebody else sees to losses that are not finite."""
        self.normal: deque[float] = deque(maxlen=window)
        """The losses to compare with, oldest first."""
        self.high: list[float] = []
        """The newest losses that are too high, but not yet a spike."""
        self.since = 0
        """The update of the first of these."""

    def find(self, losses: Sequence[float], first: int) -> int | None:
        """Return the update with which a spike begins, which may be before ``first``; None: there is none.

        Args:
            losses: those since the last call, oldest first.
            first: the update of the first of them.
        """
        found = None
        for update, loss in enumerate(losses, first):
            begins = None
            if not math.isfinite(loss):
                if not self.tolerates_nonfinite:
                    begins = self.since if self.high else update
            elif loss > self.limit():
                self.since = self.since if self.high else update
                if len(self.high) <= self._patience:  # more would be a list without end
                    self.high.append(loss)
                    begins = self.since if len(self.high) == self._patience else None
            else:
                self._end()
                self.normal.append(loss)
            found = begins if found is None else found
        return found

    def _end(self) -> None:
        """Count the losses that were too high among the others: a normal one has followed."""
        self.normal += self.high
        self.high = []

    def limit(self) -> float:
        """Return the highest loss that is not too high."""
        known = self.normal
        if 2 * len(known) < (known.maxlen or 0):
            return math.inf
        middle = median(known)
        spread = max(_TO_DEVIATIONS * median(abs(loss - middle) for loss in known), _LEAST_SPREAD * abs(middle))
        return middle + self._threshold * spread


@HOOKS.register_module()
class LossSpikeHook(Hook):
    """Takes back a stretch of training in which the loss spikes: it goes on from the last good checkpoint, with later data.

    A loss, the mean over all processes, is too high if it is more than ``threshold`` deviations above the median of the last
    ``window`` ones; the deviation is 1.4826 times the median distance from the median. ``patience`` of them in a row are a spike. So is
    one that is NaN or infinite, unless ``env_cfg=dict(nonfinite=...)`` is "raise", which ends the run, or "skip", which has left that update
    out. Losses are read and judged every ``interval`` updates, which is when the host waits for the device; all processes do what
    rank 0 decides.

    A checkpoint is good if the losses of the ``margin`` updates after it were no part of the spike. Training goes on from the newest of
    these as a resumed run does, with everything that it holds, in this process. All data since then are left out; the log,
    ``events.jsonl`` ("went_back") and every later checkpoint say which, so that resumed runs leave them out too, on any number of
    processes. Later checkpoints are deleted. By epochs, training has fewer updates then; schedules keep their plan.

    Without a good checkpoint, training goes on with a warning.

    Args:
        window: number of losses to compare with; no loss is too high before half of them are known.
        threshold: deviations above the median.
        patience: number of losses in a row that make a spike.
        margin: updates after a checkpoint that have to be normal.
        times: how often a run may go back, over all restarts.
        interval: updates between two looks; default: that of LoggerHook, or 50.

    Raises:
        ConfigError: an argument is not allowed; before training, if no CheckpointHook saves what can be resumed, or it keeps too few; at
            the first look, if the model gives no loss.
        LossSpikeError: there is one more spike than ``times``.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 5.1.
    """

    priority = 65  # after the logger; before NonFiniteHook, which expects new values at the update that reads them

    def __init__(
        self,
        window: int = 128,
        threshold: float = 6.0,
        patience: int = 3,
        margin: int = 10,
        times: int = 3,
        interval: int | None = None,
    ) -> None:
        least = dict(window=2, patience=1, margin=1, times=1, interval=1)
        given: dict[str, Any] = dict(window=window, patience=patience, margin=margin, times=times, interval=interval)
        for key, number in least.items():
            value = given[key]
            if key == "interval" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < number:
                raise ConfigError(f"LossSpikeHook.{key}: {value!r} is not allowed, give an integer of {number} or more")
        number_given: Any = threshold
        if (
            isinstance(number_given, bool)
            or not isinstance(number_given, (int, float))
            or not 0 < number_given < math.inf
        ):
            raise ConfigError(f"LossSpikeHook.threshold: {threshold!r} is not allowed, give a number above 0")
        self.window, self.threshold, self.patience = window, float(threshold), patience
        self.margin, self.times, self.interval = margin, times, interval
        self._detector = self._new_detector()
        self._interval = 50
        self._looked: int | None = None  # updates done at the last look
        self._went_back = 0
        self._has_warned = False

    def before_train(self, runner: Run) -> None:
        """Begin to look from here on, or from where the checkpoint had looked last.

        Raises:
            ConfigError: no CheckpointHook saves, or keeps, what is needed to go back.
        """
        lines = [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
        self._interval = self.interval or min(lines, default=50)
        self._check_saves(runner)
        self._detector.tolerates_nonfinite = runner.options.env_cfg.nonfinite in ("raise", "skip")
        if self._looked is None:
            self._looked = runner.iter
        # A checkpoint does not know how often a run went back to it, if that ended before the next one.
        self._went_back = max(self._went_back, told_by_rank_0(lambda: noted_since_the_start(runner, _TIMES)))
        # Values before the last look are not needed, and a save may come up to one update before the next.
        runner.message_hub.retain(AVERAGED, 2 * self._interval)

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Look at the losses if that is due."""
        done = runner.iter + 1
        if done % self._interval == 0 or done == runner.max_iters:
            self._look(runner, done)

    def after_train_epoch(self, runner: Run) -> None:
        """Look at the losses before a checkpoint is saved and the model is validated."""
        self._look(runner, runner.iter)

    def _look(self, runner: Run, done: int) -> None:
        """Judge the losses since the last look, and go back if they have a spike; a collective."""
        assert self._looked is not None, "before_train sets it"
        new, self._looked = done - self._looked, done
        if new < 1:
            return
        hub = runner.message_hub
        hub.fetch("train/", reduce=AVERAGED)
        if AVERAGED not in hub.log_scalars:
            raise ConfigError('LossSpikeHook: the model gives no loss to compare, return it as "loss"')
        own = [float(value) for value in reversed(hub.log_scalars[AVERAGED].newest(new))]
        losses = broadcast_object(own)  # sums over processes may be rounded in other ways
        limit = self._detector.limit()
        began = self._detector.find(losses, done - len(losses) + 1)
        if began is not None:
            self._go_back(runner, began, max(losses, key=_height), limit)

    def _go_back(self, runner: Run, began: int, highest: float, limit: float) -> None:
        """Go back to a checkpoint from before the update ``began``.

        Raises:
            LossSpikeError: that has been done too often.
        """
        what = f"Iteration {began}: the loss spikes, up to {highest:.4g}"
        what += f" with a limit of {limit:.4g}" if math.isfinite(limit) else ""
        if self._went_back >= self.times:
            raise LossSpikeError(
                f"{what}, and training has gone back {self._went_back} times already (LossSpikeHook.times); a lower learning rate, other "
                "data or clip_grad may help"
            )
        latest = began - 1 - self.margin
        runner.finish_saving()
        saving = (hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
        others = {path for hook in saving for path in hook.found_of_others}
        found = told_by_rank_0(lambda: _as_text(newest_until(runner, latest, others)))
        if found is None:
            if not self._has_warned:
                self._has_warned = True
                runner.logger.warning(
                    f"{what}; there is no checkpoint of at most {max(latest, 0)} updates to go back to, training goes on"
                )
            return
        self._went_back += 1
        # What the checkpoint has of this hook is loaded; one of a run without this hook has nothing.
        self._looked, self._detector = None, self._new_detector()
        why = f"{what}, {self._went_back} of {self.times} times that a run may go back"
        raise GoBack(as_path(found), why, **{_TIMES: self._went_back})

    def _check_saves(self, runner: Run) -> None:
        saving = [
            hook
            for hook in runner.hooks
            if isinstance(hook, CheckpointHook)
            and hook.interval > 0
            and hook.save_optimizer
            and hook.save_param_scheduler
        ]
        if not saving:
            raise ConfigError(
                "LossSpikeHook: needs checkpoints to go back to, give default_hooks=dict(checkpoint=dict(by_epoch=False, interval=...))"
            )
        hook = saving[0]
        length = hook.interval * (runner.train_loop.epoch_length if hook.by_epoch else 1)
        needed = math.ceil((self._interval + self.patience + self.margin) / length) + 2
        if 0 < hook.max_keep_ckpts < needed:
            raise ConfigError(
                f"CheckpointHook.max_keep_ckpts: with {hook.max_keep_ckpts} the good checkpoint may be deleted before LossSpikeHook has "
                f"looked, give {needed} or more"
            )

    def _new_detector(self) -> SpikeDetector:
        return SpikeDetector(self.window, self.threshold, self.patience)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the losses to compare with, where it has looked last, and how often it has gone back."""
        detector = self._detector
        return {
            "looked": self._looked,
            "normal": list(detector.normal),
            "high": list(detector.high),
            "since": detector.since,
            "went_back": self._went_back,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; going back is not forgotten by going back."""
        self._looked = state["looked"]
        self._detector = self._new_detector()
        self._detector.normal.extend(state["normal"])
        self._detector.high, self._detector.since = list(state["high"]), state["since"]
        self._went_back = max(self._went_back, state["went_back"])


def _height(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _as_text(path: Path | None) -> str | None:
    return None if path is None else str(path)  # not every path-like object can be pickled


__all__ = ["LossSpikeHook"]
