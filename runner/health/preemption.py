"""Preemption: a signal to any process, or the end of the allowed time, ends all processes after the same update, saved."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.base.errors import CheckpointError, ConfigError
from ...core.base.events import append_event
from ...core.comm.agreement import Bulletin, StoreLostError, raising_together, roll_call
from ...core.comm.rendezvous import EndAskedError
from ...core.device.device import synchronize
from ...strategies.launchers import say_that_the_end_was_asked
from .. import signals
from ..hooks.checkpoint import CheckpointHook
from ..loops.base import EvaluationCut
from ..options import PreemptionOptions
from .monitor import Monitor, leave, try_for_a_while, weakly
from .termination import Terminated

if TYPE_CHECKING:
    from ..loops.train import TrainLoop
    from ..run import Run

# CommonEnd: how the processes of a job come to end at the same position, by what they leave in a Bulletin.


TOGETHER_S = 2.0
"""Seconds that a process waits for the others to know before it leaves."""
_NAP_S = 0.02


class CommonEnd:
    """One end on which all processes agree. Who asks first writes so; from then on each process says where it is.

    The methods belong to the thread that the bulletin belongs to, except ``is_there``.

    Args:
        bulletin: the bulletin of that thread.
        turn: how many ends there were before; a program may catch one and go on.
    """

    def __init__(self, bulletin: Bulletin, turn: int) -> None:
        self._bulletin, self._key = bulletin, f"stop {turn}"
        self._next_look = 0.0
        self._own: Bulletin | None = None  # of the thread that trains
        self._has_answered = False
        self._target: int | None = None

    def word(self, asked: str | None) -> dict[str, Any] | None:
        """What came, to which rank on which host, the same on all processes; None as long as nobody has asked.

        Args:
            asked: what has come to this process, if something has.
        """
        board = self._bulletin
        if asked is None:
            if time.monotonic() < self._next_look:
                return None
            self._next_look = time.monotonic() + board.pace_s
            text = board.read_first(self._key)
        else:
            text = board.put_first(self._key, json.dumps({"what": asked, "rank": board.rank, "host": platform.node()}))
        return None if text is None else json.loads(text)

    def is_now(self, own: bool) -> bool:
        """Whether all leave at once, as the first one to know decides: the others cannot be far from it."""
        return self._bulletin.put_first(f"{self._key} how", "now" if own else "") == "now"

    def last_word(self, asked: str | None, number: int) -> dict[str, Any] | None:
        """The word after training; all processes get the same, unless one comes more than TOGETHER_S later.

        Args:
            asked: see ``word``.
            number: of the call of train().
        """
        if asked is not None:
            self.word(asked)
        self.meet_those_who(f"have trained {number}")
        text = self._bulletin.read_first(self._key)
        return None if text is None else json.loads(text)

    def meet_those_who(self, does: str) -> None:
        """Count this process among those who ``does``, such as "know", and wait for the others, not for long."""
        board, key, deadline = self._bulletin, f"{self._key} {does}", time.monotonic() + TOGETHER_S
        try:
            number, nap_s = board.count(key), max(_NAP_S, board.pace_s / 5)
            while number < board.world_size and time.monotonic() < deadline:
                time.sleep(nap_s)
                number = board.count(key, 0)
            if board.rank == 0:  # which may keep the store: the others look once more
                time.sleep(2 * nap_s)
        except StoreLostError:  # then somebody has left
            return

    def is_there(self, here: int) -> bool:
        """Whether all processes end at this position: the number of updates and batches of validations so far.

        For the thread that trains. Rank 0 names the position before it goes on from ``here``. Nobody can have finished
        ``here + 2`` before that: an update needs all processes, and of a validation a process reads one batch ahead.
        """
        if self._own is None:
            self._own = self._bulletin.for_another_thread()
        board, key = self._own, self._key
        if not self._has_answered:
            self._has_answered = True
            board.put(f"{key} at {board.rank}", str(here))
            board.count(f"{key} answers")
        if self._target is None and board.rank == 0 and board.count(f"{key} answers", 0) == board.world_size:
            answers = board.read([f"{key} at {rank}" for rank in range(board.world_size)])
            self._target = max(here + 2, *(int(answer or 0) + 1 for answer in answers))
            board.put_first(f"{key} target", str(self._target))
        if self._target is None and (text := board.read_first(f"{key} target")) is not None:
            self._target = int(text)
        return self._target is not None and here >= self._target


# Departure: how the main thread of a process leaves a run that has to end, together with those of the other
# processes.


MAIN_S = 0.5
"""Seconds after which a main thread that does not return to Python is left behind."""


class Departure:
    """One departure of this process.

    The main thread raises Terminated, in the handler of a signal that another thread sends it, or by itself. Who leaves
    early would take the store from the others, or look to them like a failure: so it waits for them, not for long.
    """

    def __init__(self) -> None:
        self.is_due = False
        """True once a signal means: leave now."""
        self.has_begun = False
        """True once the main thread raises Terminated."""
        self._is_awaited = False
        self._all_leave = threading.Event()

    def begin(self) -> None:
        """Say, in the main thread, that it raises Terminated."""
        self.is_due = self.has_begun = True

    def wait(self) -> None:
        """Wait, in the main thread, until the other thread has met those of the other processes."""
        self._is_awaited = True
        self._all_leave.wait(TOGETHER_S)

    def meet_if_awaited(self, meet: Callable[[], None]) -> None:
        """Let the main thread, which leaves by itself and waits for the others, go on once they leave too."""
        if self._is_awaited and not self._all_leave.is_set():
            meet()
            self._all_leave.set()

    def call(
        self, number: int, meet: Callable[[], None], tell_that_it_is_stuck: Callable[[], None], status: int
    ) -> None:
        """Make the main thread raise Terminated; end the process if it is in a call that does not return.

        Args:
            number: of the signal whose handler raises it.
            meet: waits for the other processes to leave too.
            tell_that_it_is_stuck: writes to the log.
            status: exit status of the process if this thread has to end it.
        """
        self.is_due = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)
        deadline = time.monotonic() + MAIN_S
        while not self.has_begun and time.monotonic() < deadline:
            time.sleep(0.01)
        is_stuck = not self.has_begun
        if is_stuck:
            self.has_begun = True
            tell_that_it_is_stuck()
        meet()
        self._all_leave.set()
        if is_stuck:
            leave(status)


# The time that a run may take, and what Slurm says of its job.


SLURM = "slurm"
_CLIENT_S = 20.0
_FORM = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})")


def seconds_of(text: str | float, where: str) -> float:
    """Return a duration in seconds: a number, "HH:MM:SS", or "D-HH:MM:SS" as Slurm writes it.

    Raises:
        ConfigError: another form, or no time at all.
    """
    if isinstance(text, str):
        match = _FORM.fullmatch(text)
        if match is None or int(match["minutes"]) > 59 or int(match["seconds"]) > 59:
            raise ConfigError(
                f'{where}: "{text}" is not allowed, give seconds, "HH:MM:SS", "D-HH:MM:SS", or "{SLURM}" for the end of '
                "Slurm's job"
            )
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        text = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < text < float("inf"):
        raise ConfigError(f"{where}: {text} is not allowed, give more than 0 seconds")
    return float(text)


def slurm_job(where: str) -> str:
    """Return the number of the Slurm job that this process belongs to.

    Raises:
        ConfigError: there is none.
    """
    if job := os.environ.get("SLURM_JOB_ID"):
        return job
    raise ConfigError(f"{where}: needs a job of Slurm, and SLURM_JOB_ID is not set; leave it out elsewhere")


def slurm_end(where: str) -> float:
    """Return the time at which Slurm ends this job, in seconds since 1970, from SLURM_JOB_END_TIME or squeue; infinity: never.

    Raises:
        ConfigError: there is no such job, or Slurm does not say.
    """
    job = slurm_job(where)
    said = os.environ.get("SLURM_JOB_END_TIME", "")
    if said.isdigit():
        return float(said)
    for pause_s in (0, 1, 2, 4):  # a job that has just begun has no end for a moment
        time.sleep(pause_s)
        said, _, limit = _ask(
            where, "squeue", "--noheader", "--jobs", job, "--Format", "EndTime:40,TimeLimit:20"
        ).partition(" ")
        if limit.strip() == "UNLIMITED":
            return math.inf
        with suppress(ValueError):
            return time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))
    raise ConfigError(f'{where}: squeue says of job {job} that it ends at "{said}", give a duration')


def requeue() -> str:
    """Let Slurm start this job again; return what was done, in words, also if Slurm refuses.

    A job that Slurm is ending already, because of scancel or at its time limit, stays ended.
    """
    where = "requeue"
    try:
        job = slurm_job(where)
        state = _ask(where, "squeue", "--noheader", "--jobs", job, "--Format", "State:40")
        if state != "RUNNING":
            return f"job {job} is not requeued, Slurm is ending it already ({state or 'it is gone'})"
        _ask(where, "scontrol", "requeue", job)
    except ConfigError as error:
        return str(error)
    return f"job {job} is requeued"


def check_requeue(where: str) -> None:
    """Raise ConfigError if this process is in no job of Slurm, or cannot talk to it."""
    slurm_job(where)
    if shutil.which("scontrol") is None:
        raise ConfigError(f"{where}: needs Slurm's scontrol, which is not in PATH")


def _ask(where: str, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{where}: {command[0]} failed, {error}") from None
    if done.returncode:
        raise ConfigError(f"{where}: {command[0]} failed, {' '.join(done.stderr.split())}")
    return done.stdout.strip()


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
        self._turn, self._trainings = 0, 0  # of asking, if a program goes on after the end of a run; calls of train()
        self._deadline: float | None = None  # time.monotonic() at which the run ends by itself
        if self._options.max_time is not None:
            self._read_max_time(self._options.max_time)
        if self._options.requeue:
            check_requeue("env_cfg.preemption.requeue")
        self._forget()
        self._early: Monitor | None = None
        self.left_alone = ""
        """A line for the log if signals of the options do not end the run."""
        if self._signals:
            self.left_alone = signals.left_alone(signals.listen(self, self._signals))
            self._early = Monitor([weakly(self._watch_forming)])
            self._early.start()
            weakref.finalize(self, self._early.stop)

    def _read_max_time(self, limit: str | float) -> None:
        if limit == SLURM:
            slurm_job(_MAX_TIME)
        else:
            self._deadline = time.monotonic() + seconds_of(limit, _MAX_TIME)

    def _forget(self) -> None:
        self._asked: str | None = None
        self._asked_at = 0.0
        self._word: dict[str, Any] | None = None  # what came, and to which process; the same on all
        self._is_now, self._is_completing = False, False  # nothing is to be saved; the last word is to come
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
        if self._options.max_time == SLURM:
            with raising_together():
                if self._rank == 0:  # Slurm would have to answer all processes at once
                    left_s = slurm_end(_MAX_TIME) - time.time() - self._options.margin_s
                    self._deadline = time.monotonic() + left_s
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
        # Before the store is asked: training may end meanwhile.
        loop, has_updates, is_completing = self._loop, self._has_updates(), self._is_completing
        if (word := common_end.word(self._asked)) is None:
            return
        if loop is None and is_completing:
            return  # the main thread hears it: from here all would leave at once, also one that is still saving
        is_now = common_end.is_now(not has_updates)
        self._is_now = is_now or loop is None
        self._word = word
        if loop is None or loop is self._loop:
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
        # Connected now, because rank 0, which may keep the store, may end before this process.
        own = self.bulletin.for_another_thread() if self._size > 1 and self.bulletin is not None else None
        try:
            yield
            self._is_completing = own is not None  # before the other thread can see that there is no loop
        finally:
            self._has_trained |= self._has_updates()
            self._loop = run.stop_check = None
        if own is not None:
            self._hear_last_word(own)
        if self._word is not None:  # no update was left at which all could have ended
            self._saved = "training was complete"
            self._requeue_if_wanted()
            self._note(run)
            if self._size > 1:  # others have left train() already, and wait for this process before they end
                self._departure.wait()
            raise self._terminated()

    def _hear_last_word(self, own: Bulletin) -> None:
        """Hear what a process was asked so late that its thread has not told it, or this one's has not looked."""
        self._trainings += 1
        try:
            if self._size > 1:
                with suppress(StoreLostError):
                    self._word = CommonEnd(own, self._turn).last_word(self._asked, self._trainings) or self._word
        finally:
            self._is_completing = False

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
            self._saved = "; ".join(filter(None, (self._saved, requeue())))

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
