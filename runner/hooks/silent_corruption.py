"""ReplayHook: finds silent corruption, also of sharded state, by running forward and backward twice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...core.base.errors import ConfigError, CorruptionError, StrategyError, counted, listed, one_of, suggest
from ...core.base.events import append_event, job
from ...core.base.registry import HOOKS
from ...strategies.parts import cannot_repeat
from ..repeated_windows import Mismatch, Replay, RunWindow, words
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run

_REACTIONS = ("stop", "skip", "leave")
_SHOWN = 3


@HOOKS.register_module()
class ReplayHook(Hook):
    """Runs forward and backward of an update twice now and then, and compares every bit, on every process, before the update.

    A device that computes wrongly, or whose memory does, is found although no other process holds what it holds: under full
    sharding, tensor and pipeline parallelism too. ``Replay`` of runner/repeated_windows.py says what is put back and compared. Training is bit
    for bit that without the hook. A replay takes as long as another forward and backward; the host waits for the device twice.

    In the second update after every start, replays go on until it is known what repeats bit by bit on this machine; a fault in
    this very update seems not to repeat, too. What does not, as of kernels that add up in any order, is named in the log: gradients, values and buffers may then differ by 16 times what was
    measured, outputs of modules are not compared. ``randomness=dict(deterministic=True)`` makes most of it repeat.

    The message names the rank and the first tensor, in the order of the computation. Gradients are compared after they were
    reduced, so a fault that shows in nothing before may be another rank's, which the message says.

    Args:
        interval: updates between two replays.
        on_mismatch: "stop" raises a CorruptionError on every process; "skip" leaves out the update, with a warning and the line
            ``corrupted`` in events.jsonl, replays the next one too, and stops if that differs again, or if a weight has changed;
            "leave" stops, and `flextrain run` with a range of machines goes on without the machine, if one alone is named.
        nonrepeating: "tolerate" or "refuse", what does not repeat bit by bit.
        trials: how many pairs of runs in a row have to show nothing new in the second update.

    Raises:
        ConfigError: an argument is not allowed.
        StrategyError: before training: the strategy cannot run a window twice; in the second update: the model cannot, or
            something does not repeat, and that is refused.
    """

    priority = "LOWEST"

    def __init__(
        self, interval: int = 1000, on_mismatch: str = "stop", nonrepeating: str = "tolerate", trials: int = 2
    ) -> None:
        for name, number in (("interval", interval), ("trials", trials)):
            given: object = number  # a configuration may have anything
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ConfigError(f"ReplayHook.{name}: {number!r} is not allowed, give an integer of 1 or more")
        chosen: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("on_mismatch", on_mismatch, _REACTIONS),
            ("nonrepeating", nonrepeating, ("tolerate", "refuse")),
        )
        for name, value, allowed in chosen:
            if value not in allowed:
                choices = one_of([f'"{one}"' for one in allowed])
                hint = suggest(value, allowed) if isinstance(value, str) else ""
                raise ConfigError(f"ReplayHook.{name}: {value!r} is not allowed, choose {choices}{hint}")
        self.interval, self.on_mismatch, self.nonrepeating, self.trials = interval, on_mismatch, nonrepeating, trials
        self.replays = 0
        """Windows that this process has run twice."""
        self._replay: Replay | None = None
        self._is_due = False
        self._differed = False  # whether the last update was skipped
        self._run: Run | None = None

    def before_train(self, runner: Run) -> None:
        """Refuse a strategy that cannot run a window twice, and begin with the next update."""
        if why := cannot_repeat(runner.strategy):
            raise StrategyError(f"ReplayHook: needs forward and backward twice, and {why}, or leave the hook out")
        if self.on_mismatch == "leave" and not job():
            raise ConfigError(
                'ReplayHook.on_mismatch: "leave" needs `flextrain run`, which starts the others without a machine; choose "stop"'
            )
        if any(isinstance(hook, ReplayHook) and hook is not self for hook in runner.hooks):
            raise ConfigError("ReplayHook: there are several in this run, keep one")
        self._replay, self._run = Replay(runner.stepper, self.trials), runner
        self._is_due, self._differed, self.replays = True, False, 0

    def before_train_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Let the update run its window twice if that is due; one that has no items leaves it to the next."""
        assert self._replay is not None
        self._is_due |= (runner.iter + 1) % self.interval == 0 or not self._replay.is_tried
        if self._is_due:
            runner.stepper.run_windows_by(self._run_window)

    def after_train(self, runner: Run) -> None:
        """Leave training, and say so if nothing was compared."""
        if not self.replays and runner.iter > runner.train_loop.start_iter:
            runner.logger.warning(
                "ReplayHook: nothing was compared, the first replay is in the second update after a start; make the run longer"
            )
        self._end(runner)

    def on_exception(self, runner: Run, exception: BaseException) -> None:
        """Leave training."""
        self._end(runner)

    def _end(self, runner: Run) -> None:
        if self._run is not None:
            runner.stepper.run_windows_by(None)
        self._replay = self._run = None

    def _run_window(self, run_window: RunWindow, window: list[Any], step: Any) -> dict[str, Tensor]:
        replay, run = self._replay, self._run
        assert replay is not None
        assert run is not None
        was_seen, was_tried = replay.has_seen_one, replay.is_tried
        try:
            outputs = replay(run_window, window, step)
            self._is_due = False
            self.replays += was_seen
            if replay.is_tried and not was_tried:
                self._tell_what_repeats(run, replay)
            if replay.finding is None:
                self._differed = False
                return outputs
            self._react(run, replay, replay.finding)
            replay.leave_out(outputs)
        finally:
            replay.forget()
            run.stepper.run_windows_by(None)

    def _react(self, run: Run, replay: Replay, finding: Mismatch) -> None:
        """Leave out the update, or raise; the same on every process, which all know the same finding."""
        replay.restore()
        iteration, again = run.iter + 1, self._differed
        stops = self.on_mismatch != "skip" or again or finding.stays
        if run.rank == finding.ranks[0]:
            facts: dict[str, Any] = {
                "rank": run.rank,
                "ranks": list(finding.ranks),
                "iter": iteration,
                "reason": str(finding),
            }
            append_event(run.work_dir, "corrupted", **facts, leaves=self.on_mismatch == "leave")
        text = f"ReplayHook: iteration {iteration}, {finding}; a device or its memory may be faulty"
        if stops:
            raise CorruptionError(
                f"{text}{', also in the update before' if again else ''}; resume=True goes on from the last checkpoint, which may be later "
                "than the first fault"
            )
        run.logger.warning(f"{text}; the update is left out, and the next one is replayed too")
        self._differed = self._is_due = True

    def _tell_what_repeats(self, run: Run, replay: Replay) -> None:
        """Log what is compared, and what does not repeat.

        Raises:
            StrategyError: that is refused.
        """
        compared = ", ".join(counted(number, name) for name, number in replay.compared.items())
        if not replay.bounds:
            run.logger.info(f"ReplayHook: a window repeats bit by bit on this machine; compared are {compared}")
            return
        names = sorted(replay.bounds)
        said = []
        for kind, name in names[:_SHOWN]:
            measured = replay.bounds[kind, name]
            by = f" (by {measured:.1e})" if measured and not math.isinf(measured) else ""
            said.append(words(kind, name) + by)
        more = f" and {counted(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else ""
        what = f"{listed(said, _SHOWN)}{more}"
        advice = "randomness=dict(deterministic=True) makes most kernels repeat"
        if self.nonrepeating == "refuse":
            raise StrategyError(
                f'ReplayHook.nonrepeating: "refuse", and {what} {_do(names)} not repeat bit by bit; {advice}'
            )
        run.logger.warning(
            f"ReplayHook: {what} {_do(names)} not repeat bit by bit; values and gradients may differ by 16 times what was measured, "
            f"outputs of modules are not compared; compared are {compared}; {advice}"
        )


def _do(names: list[Any]) -> str:
    return "does" if len(names) == 1 else "do"
