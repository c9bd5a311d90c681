"""Preemption: a signal to any process, or the end of the allowed time, ends all processes after the same update, saved."""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.comm.bulletin import Bulletin, StoreLostError
from ..core.comm.joint_errors import raising_together
from ..core.comm.matched_calls import roll_call
from ..core.comm.rendezvous import EndAskedError
from ..core.device import synchronize
from ..core.errors import CheckpointError
from ..core.events import append_event
from ..strategies.launchers import say_that_the_end_was_asked
from . import signals, time_limit
from .common_end import CommonEnd
from .departure import Departure
from .hooks.checkpoint import CheckpointHook
from .last_words import try_for_a_while
from .loops.base import EvaluationCut
from .monitor import Monitor, weakly
from .options import PreemptionOptions
from .termination import Terminated

if TYPE_CHECKING:
    from .loops.train import TrainLoop
    from .run import Run

_logger = logging.getLogger("flextrain")

_MAX_TIME = "env_cfg.preemption.max_time"
_TIME_IS_UP, _REQUEST = "max_time", "request_stop()"

FORMING_S = 5.0
"""Seconds that a process with a signal waits for the others to come to the process group, so that all end together."""


class Preemption:
    """Ends a run when a signal comes to any of its processes.

    Training ends after the same update on every process, or after the same batch of a validation, which a resumed run
    repeats. It is saved, and all processes leave with the same status. Where nothing would be lost, before the first
    update and outside of train(), they leave at once.

    How they agree: who gets the signal writes so in the Bulletin, in which the thread of every process looks. From then
    on every process looks after each update, and says once where it is. When all have done so, rank 0 names a position
    that it has yet to come to with the others. Until somebody asks, an update costs one attribute test.

    Args:
        options: None leaves signals alone; ``ask`` works nevertheless.
    """

    def __init__(self, options: PreemptionOptions | None) -> None:
        self._signals = options.signals if options else ()
        self._options = options or PreemptionOptions()
        self.bulletin: Bulletin | None = None
        """That of the thread which calls ``watch``; None for a single process."""
        self._run: Callable[[], Run | None] = lambda: None
        self._rank, self._size = 0, 0  # 0: the group is still to form
        self._is_cut_off = False
        self._loop: TrainLoop | None = None  # while it trains
        self._first = 0  # updates done before
        self._has_trained = False  # True once a loop has ended after updates of its own
        self._in_run, self._thread = False, threading.current_thread()
        self._turn = 0  # of asking, if a program goes on after the end of a run
        self._deadline: float | None = None  # time.monotonic() at which the run ends by itself
        self._read_max_time()
        if self._options.requeue:
            time_limit.check_requeue("env_cfg.preemption.requeue")
        self._forget()
        self._early: Monitor | None = None
        self.left_alone = ""
        """A line for the log if signals of the options do not end the run."""
        if self._signals:
            self.left_alone = signals.left_alone(signals.listen(self, self._signals))
            self._early = Monitor([weakly(self._watch_forming)])
            self._early.start()
            weakref.finalize(self, self._early.stop)

    def _read_max_time(self) -> None:
        limit = self._options.max_time
        if limit == time_limit.SLURM:
            time_limit.slurm_job(_MAX_TIME)
        elif limit is not None:
            self._deadline = time.monotonic() + time_limit.seconds_of(limit, _MAX_TIME)

    def _ask_slurm_for_the_end(self) -> None:
        """Only on rank 0, because Slurm would have to answer all processes at once."""
        left_s = time_limit.slurm_end(_MAX_TIME) - time.time() - self._options.margin_s
        self._deadline = time.monotonic() + left_s

    def _forget(self) -> None:
        self._asked: str | None = None
        self._asked_at = 0.0
        self._word: dict[str, Any] | None = None  # what came, and to which process; the same on all
        self._is_now = False  # True: nothing is to be saved
        self._departure = Departure()
        self._common_end: CommonEnd | None = None
        self._saved = ""
        self._is_over = False  # last, because the other thread waits for it

    @contextmanager
    def forming(self, launcher: str | None) -> Iterator[None]:
        """Around what comes before all processes have met: if one of them is ended, it tells the others, which end too."""
        try:
            yield
        except Terminated as error:
            say_that_the_end_was_asked(launcher, error.what)
            raise
        except EndAskedError as error:
            _logger.warning(f"{error} before all processes had come")
            self._departure.begin()
            raise Terminated(self._options.status, str(error)) from None

    def start(self, run: Run) -> None:
        """Begin to watch, after all processes have met."""
        self._run, self._rank, self._size = weakref.ref(run), run.rank, run.world_size
        if self._options.max_time == time_limit.SLURM:
            with raising_together():
                if self._rank == 0:
                    self._ask_slurm_for_the_end()
        if self._early is not None:
            self._early.stop()
        if self._size == 1 and self._asked is not None:
            self.came(signal.SIGTERM)

    @property
    def needs_thread(self) -> bool:
        """True if a thread has to call ``watch``."""
        return self._size > 1 or self._deadline is not None

    @property
    def is_needed(self) -> bool:
        """False if the run has gone."""
        return self._size == 0 or self._run() is not None

    # Asking

    def came(self, number: int) -> None:
        """Hear of a signal, in the main thread."""
        if self._departure.is_due:
            if not self._departure.has_begun and not self._is_elsewhere:
                self._departure.begin()
                if self._size > 1:
                    self._departure.wait()
                raise self._terminated()
            return  # a later signal does not disturb the end
        self.ask(signal.Signals(number).name)
        if self._size == 1 and self._is_now and not self._is_elsewhere and not self._departure.has_begun:
            self._requeue_if_wanted()
            raise self._terminated()

    @property
    def _is_elsewhere(self) -> bool:
        """True if the run is in progress in another thread than the main one, where the next check ends it."""
        return self._in_run and self._thread is not threading.main_thread()

    def ask(self, what: str) -> None:
        """Ask for the end of the run, from any thread; further calls have no effect."""
        if self._asked is None:
            self._asked_at, self._asked = time.monotonic(), what
        if self._size == 1 and self._word is None:
            self._word = {"what": self._asked}
            self._is_now = self._is_cut_off or not self._has_updates()
            if (run := self._run()) is not None:
                run.stop_check = self.check

    def cut_off(self) -> None:
        """From now on this process leaves when it is asked to, because it can ask no other: they or the store have gone."""
        self._is_cut_off, self._size = True, 1
        if self._asked is not None and self._word is None and not self._is_over:
            self.ask(self._asked)
            self._call_main()

    def _has_updates(self) -> bool:
        """Whether this process has made an update in the current train()."""
        loop = self._loop
        return loop is not None and loop.iter > self._first

    # In the thread

    def _watch_forming(self) -> None:
        """Do not wait long for a group that does not form."""
        if self._asked is None or time.monotonic() - self._asked_at < FORMING_S:
            return
        self._word = {"what": self._asked}
        try_for_a_while(lambda: _logger.warning(f"Ended by {self._asked} before all processes had come"))
        self._call_main()
        if self._early is not None:
            self._early.stop()

    def watch(self) -> None:
        """Look whether somebody has asked, and what follows; called several times a second."""
        run = self._run()
        if run is None or self._is_over:
            return
        if self._word is not None:
            if self._common_end is not None:
                self._departure.meet_if_awaited(self._meet_those_who_leave)
            return
        if self._deadline is not None and time.monotonic() > self._deadline and self._rank == 0:
            self.ask(_TIME_IS_UP)
        if self._size == 1 or self.bulletin is None:
            if self._is_now:
                self._requeue_if_wanted()
                self._call_main()
            return
        if self._common_end is None:
            self._common_end = CommonEnd(self.bulletin, self._turn)
        try:
            self._look(run, self._common_end)
        except StoreLostError:
            self.cut_off()

    def _look(self, run: Run, common_end: CommonEnd) -> None:
        if (word := common_end.word(self._asked)) is None:
            return
        is_now = common_end.is_now(not self._has_updates())
        self._is_now = is_now or self._loop is None
        self._word = word
        run.stop_check = self.check
        if not self._is_now:
            return
        self._requeue_if_wanted()
        if is_now:  # leave when all know that they have to, lest one takes the end of another for a failure
            common_end.meet_those_who("know")
        if not self._in_run:
            again = f"; {self._saved}" if self._saved else ""
            self._tell(f"outside of train(), where there is nothing to save{again}")
        self._call_main()

    def _meet_those_who_leave(self) -> None:
        if self._common_end is not None and self._size > 1:
            self._common_end.meet_those_who("leave")

    def _call_main(self) -> None:
        """Raise Terminated in the main thread; end the process if that thread is in a call that does not return."""
        number = signals.heard(self._signals)
        if number is None or signals.hearing() is not self or self._is_elsewhere:
            return  # the next check raises it
        # A process that is cut off may have more to lose.
        lost = "" if self._is_cut_off else "; there is nothing to save"
        stuck = f"in a call that waits for another process{lost}"
        self._departure.call(
            number, self._meet_those_who_leave, lambda: self._tell(stuck, on_every_rank=True), self._options.status
        )

    def _tell(self, where: str, on_every_rank: bool = False) -> None:
        if self._rank == 0 or on_every_rank:
            try_for_a_while(lambda: _logger.warning(f"{self._what()} {where}"))
        if self._rank == 0 and (run := self._run()) is not None:
            self._note(run)

    # In the thread that trains

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around train(), val() and test()."""
        if self._is_over:  # a program that has caught the end goes on
            self._turn += 1
            self._forget()
        self._raise_if_over()
        self._in_run, self._thread = True, threading.current_thread()
        signals.begin(self)
        try:
            yield
        finally:
            signals.end(self)
            self._in_run = False

    @contextmanager
    def training(self, loop: TrainLoop) -> Iterator[None]:
        """Around the loop of train()."""
        self._first, self._loop = loop.iter, loop
        run = self._run()
        assert run is not None
        try:
            yield
        finally:
            self._has_trained |= self._has_updates()
            self._loop = None
            run.stop_check = None
        if self._word is not None:  # no update was left at which all could have ended
            self._saved = "training was complete"
            self._requeue_if_wanted()
            self._note(run)
            if self._size > 1:  # others have left train() already, and wait for this process before they end
                self._departure.wait()
            raise self._terminated()

    def check(self, where: str) -> None:
        """Called after every update and every batch of an evaluation, once somebody has asked.

        Args:
            where: "update", "batch", or "cut": after a validation that EvaluationCut has left.
        """
        run, loop = self._run(), self._loop
        if run is None:
            return
        self._raise_if_over()
        if loop is None or (where == "batch" and not loop.is_validating):
            return  # a hook evaluates in the course of an update
        if where == "cut" or self._size == 1 or self._is_there(run, loop.position):
            if where == "batch":
                raise EvaluationCut
            self._end(run)

    def _raise_if_over(self) -> None:
        if self._word is not None and self._is_now:
            raise self._terminated()

    def _is_there(self, run: Run, here: int) -> bool:
        """Whether all processes end here. An accelerator is waited for, because its host may be many updates ahead."""
        assert self._common_end is not None
        synchronize(run.strategy.device)
        try:
            return self._common_end.is_there(here)
        except StoreLostError:  # rank 0 has left train() already
            run.stop_check = None
            return False

    def _end(self, run: Run) -> None:
        """Save, and raise Terminated."""
        run.stop_check = None
        where = f"the end at iteration {run.iter}"
        if problem := roll_call(where, float(run.strategy.config.timeout_s)):
            self._saved = f"not saved, the processes are at different updates: {problem}"
        elif self._options.save:
            self._saved = self._save(run)
        else:
            self._saved = "not saved (env_cfg.preemption.save=False)"
        self._requeue_if_wanted()
        self._note(run)
        raise self._terminated()

    def _save(self, run: Run) -> str:
        hook = next((hook for hook in run.hooks if isinstance(hook, CheckpointHook)), None)
        if hook is None:
            return "not saved, there is no CheckpointHook"
        try:
            path = hook.save_now(run)
        except CheckpointError as error:
            return f"not saved: {error}"
        return f"saved as {path.name}"

    def _requeue_if_wanted(self) -> None:
        """Let Slurm start the job again: by rank 0, and only if this start has made an update, or it could go on for ever."""
        if self._options.requeue and self._rank == 0 and (self._has_trained or self._has_updates()):
            self._saved = "; ".join(filter(None, (self._saved, time_limit.requeue())))

    def _note(self, run: Run) -> None:
        is_there = Path(run.work_dir).is_dir()  # the constructor may still be about to make it
        if self._rank == 0 and self._word is not None and is_there:
            facts = dict(by=self._word["what"], on_rank=self._word.get("rank", 0), status=self._options.status)
            append_event(
                run.work_dir, "preempted", rank=0, epoch=run.epoch, iter=run.iter, end=self._saved or "at once", **facts
            )

    # The end

    def reason_of(self, error: BaseException) -> BaseException:
        """Return what ended a run: ``error`` may only follow from the signal, which dataloader workers got too."""
        is_asked = self._word is not None or self._asked is not None
        self._is_over = is_asked or isinstance(error, Terminated)
        return self._terminated() if is_asked and isinstance(error, Exception) else error

    def _terminated(self) -> Terminated:
        self._departure.begin()
        return Terminated(self._options.status, self._what(), self._saved)

    def _what(self) -> str:
        word = self._word or {"what": self._asked}
        what, is_told = str(word["what"]), self._size > 1 and "rank" in word
        rank = f"rank {word['rank']} on {word['host']}" if is_told else ""
        if what == _TIME_IS_UP:
            return f"Ended by {what}"
        if what.startswith("SIG"):
            return f"Ended by {what}{f', which came to {rank}' if rank else ''}"
        reason = "" if what == _REQUEST else f": {what}"
        return f"Ended by {_REQUEST}{f' on {rank}' if rank else ''}{reason}"
