"""Watchdog: ends a run that stands still, or whose processes left, and says which rank, where and why."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...core.base.errors import StrategyError
from ...core.base.events import append_event, heartbeats
from ...core.comm.agreement import Bulletin, StoreLostError
from ..options import WatchdogOptions
from .exchange import Ending, Exchange, Identity, Kind, follows_from_another
from .monitor import leave, say
from .stalls import (
    Age,
    Beat,
    Clock,
    Gathering,
    Stragglers,
    Whereabouts,
    empty,
    innermost,
    is_compiling,
    part_of,
    verdict,
    waits_now,
    whereabouts,
    with_one_more,
)

if TYPE_CHECKING:
    from ..run import Run

# Watched: the run that the main thread of this process is in, as the watchdog's threads read it.


class Watched:
    """A run from its beginning to its end on this process; made by the thread that runs it.

    Args:
        run: the run.
        number: its number, the same on all processes.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.thread = threading.get_ident()
        self.failed = ""
        """The error with which this process is leaving the run."""
        self.ending: Ending | None = None
        """How another process has left it."""
        self._start = self._found = (*run.progress(), heartbeats())
        self._count = 0
        self._lock = threading.Lock()

    def count(self) -> int:
        """A number that changes while the main thread gets on."""
        found = (*self.run.progress(), heartbeats())
        with self._lock:
            if found != self._found:
                self._found = found
                self._count += 1
            return self._count

    def is_first(self) -> bool:
        """Whether this process has not made the first update, or evaluated the first batch."""
        return self.run.progress() == self._start[:-1]

    def is_compiling(self) -> bool:
        """Whether this process compiles a model."""
        return is_compiling(self.thread)

    def whereabouts(self) -> Whereabouts:
        """What the main thread is doing."""
        run = self.run
        try:
            model = run.strategy.module
        except StrategyError:  # it is still being built
            model = None
        return whereabouts(self.thread, run.rank, run.iter, model, self.failed)


# Rounds: what the Monitor's thread does for the watchdog, several times a second.


STALLED = 75
"""Exit status of a run that stood still: EX_TEMPFAIL of sysexits.h, starting again may help."""

GRACE_S = 5.0
"""Seconds after which a process that still waits for one that has left is ended: NCCL does not notice it."""

LONG_GRACE_S = 60.0
"""The same for a process that does not get on, but is not seen to wait for others."""

_REPORT_S, _VERDICT_S, _LAST_S = 2.0, 5.0, 3.0
_ROUND_S = 0.05
_BEAT_S = 1.0


class ThreadOfRun(Protocol):
    """What the watchdog uses of Oversight."""

    bulletin: Bulletin | None

    def add(self, watcher: Callable[[], None]) -> None:
        """Let ``watcher`` be called several times a second."""

    def wake(self) -> None:
        """Let the watchers be called at once."""


class Rounds:
    """The part of the watchdog that talks to the other processes; all its methods belong to the Monitor's thread.

    A process asks the store one question in a round, and sends its beat once a second if it has changed. With more than
    200 processes rounds are longer, so that all together send about 1000 messages per second. Rank 0 reads the beats of
    all with two messages a second; if it is silent, another rank does.

    Args:
        oversight: its bulletin is used.
        options: None: no stall is looked for, but endings are told.
    """

    def __init__(self, oversight: ThreadOfRun, options: WatchdogOptions | None) -> None:
        self._oversight, self._options = oversight, options
        self.exchange: Exchange | None = None
        """None before the first round, and for one process."""
        self.is_ready = threading.Event()
        """Set when the first round has begun, after which the others know of this process."""
        self.number = 0
        """Rounds so far."""
        self.watched: Watched | None = None
        """The run that the main thread is in; set by the main thread."""
        self.last_run = 0
        """Number of the last run; set by the main thread."""
        self.is_ending = False
        """True from the moment at which the end of this process is certain."""
        self._clock = Clock()
        self._gathering: Gathering | None = None
        self._stragglers, self._samples = Stragglers(), empty()
        self._left_alone = Age(self._clock)
        self._sent = Beat(-1)
        self._next = self._next_beat = 0.0

    def __call__(self) -> None:
        """Look after the run once."""
        self._clock.tick()
        self.number += 1
        if self.exchange is None:
            self._begin()
        exchange = self.exchange
        if exchange is None or exchange.lost is not None:
            return
        try:
            exchange.answer_questions()
            if self.watched is not None and self._options is not None:
                self._samples = with_one_more(self._samples, part_of(self.watched.thread))
            if self._clock.now >= self._next:
                self._next = self._clock.now + exchange.bulletin.pace_s
                self._look_around(exchange)
        except StoreLostError as error:
            exchange.lost = error  # the guard decides whether that matters

    def _begin(self) -> None:
        bulletin = self._oversight.bulletin
        if bulletin is None:
            return
        exchange = Exchange(bulletin, Identity.of_this_process(bulletin.rank))
        if self._options is not None:
            self._gathering = Gathering(exchange, self._clock, self._options.stall_s, self._options.long_s)
        self.exchange = exchange
        self.is_ready.set()

    def _look_around(self, exchange: Exchange) -> None:
        watched = self.watched
        if exchange.has_alarm() and watched is not None:
            self._hear(exchange, watched)
        is_due = self._clock.now >= self._next_beat
        self._send_beat(exchange, watched, is_due)
        if is_due:
            self._next_beat = self._clock.now + self._beat_s
            exchange.identities([0])  # while it can be asked: this process may keep the store
            if watched is not None:
                self.look(watched, near=1)
                self._leave_if_others_left(watched)
            if self._gathering is not None and self._gathering.is_mine(self._beat_s):
                self._judge(exchange, watched, self._gathering)

    def send_beat(self) -> None:
        """Send the beat of this process now."""
        assert self.exchange is not None
        self._send_beat(self.exchange, self.watched, is_due=True)

    def _judge(self, exchange: Exchange, watched: Watched | None, gathering: Gathering) -> None:
        """Announce a stall if there is one; a process that is in the run tells what is known."""
        stall = gathering.gather()
        if watched is not None and self._options is not None and self._options.stragglers:
            for rank, said in self._stragglers.compare(self._clock.now, gathering.samples()):
                found = exchange.identities([rank])[rank]
                name = found.words(with_process=False) if exchange.is_elsewhere(found) else f"rank {rank}"
                watched.run.logger.warning(f"{name} {said}")
        if stall is None:
            return
        seconds, run, busy = stall
        speaker = exchange.myself if watched is not None else exchange.identities([busy])[busy]
        exchange.announce(run, Ending("stalled", speaker, f"{seconds:.0f}"))
        if watched is not None:
            self._hear(exchange, watched)

    @property
    def _beat_s(self) -> float:
        return _BEAT_S if self._options is None else min(_BEAT_S, self._options.stall_s / 10)

    def _send_beat(self, exchange: Exchange, watched: Watched | None, is_due: bool) -> None:
        """Send the beat if it has changed; at once if a run has begun or ended."""
        if watched is None:
            beat = Beat(self.last_run, samples=self._samples)
        elif is_due or (self._sent.run, self._sent.is_busy) != (watched.number, True):
            beat = Beat(
                watched.number, True, watched.is_first(), watched.is_compiling(), watched.count(), self._samples
            )
        else:
            return
        if beat != self._sent:
            begins = watched is not None and self._sent.run != beat.run
            exchange.bulletin.put(f"beat {exchange.rank}", beat.text())
            if self._sent.run < 0:
                exchange.bulletin.count("beating")
            self._sent = beat
            if begins and watched is not None:  # another process may have failed in it before this one came
                self._hear(exchange, watched)

    # Endings

    def look(self, watched: Watched, near: int) -> Ending | None:
        """How the run ends: as a process has told, or because one on this machine has ended without a word.

        Args:
            near: ranks from this one's up and down that are looked at, as far as they are on this machine.
        """
        exchange = self.exchange
        assert exchange is not None
        if watched.ending is None and (gone := exchange.ended_beside(near)):
            told = exchange.first_ending(watched.number) or self._announce(exchange, watched, gone[0])
            self._take(watched, told)
        return watched.ending

    def find(self, watched: Watched) -> Ending | None:
        """The same, asking the store too."""
        assert self.exchange is not None
        self._hear(self.exchange, watched)
        return self.look(watched, near=8)

    def _announce(self, exchange: Exchange, watched: Watched, gone: Identity) -> Ending:
        """Announce how the run ends for a process that has ended without a word."""
        text = exchange.bulletin.read([f"beat {gone.rank}"])[0]
        beat = Beat() if text is None else Beat.read(text)
        has_finished = beat.run >= watched.number and not beat.is_busy
        own = Ending("finished" if has_finished else "killed", gone, iteration=watched.run.iter)
        told = exchange.announce(watched.number, own)
        if told == own and not has_finished:
            facts = {"rank": gone.rank, "iter": watched.run.iter, "reason": own.words(), "where": "", "follows": False}
            append_event(watched.run.work_dir, "failed", **facts, killed=True)
        return told

    def _hear(self, exchange: Exchange, watched: Watched) -> None:
        """Take note of what was announced."""
        if (found := exchange.first_ending(watched.number)) is None:
            return
        self._take(watched, found)
        if found.kind == "stalled":
            self._end_all(exchange, watched, found)

    def _take(self, watched: Watched, ending: Ending) -> None:
        assert self.exchange is not None
        if watched.ending is None and (ending.process.rank != self.exchange.rank or ending.kind == "stalled"):
            watched.ending = ending
            self._left_alone.restart()

    def _leave_if_others_left(self, watched: Watched) -> None:
        """End this process if another one has left the run and the main thread does not notice."""
        ending, exchange = watched.ending, self.exchange
        if ending is None or exchange is None:
            return
        self._left_alone.note((watched.number, watched.count(), innermost(watched.thread)))
        is_waiting = waits_now(watched.thread) and not watched.failed
        if self._left_alone.seconds < (GRACE_S if is_waiting else LONG_GRACE_S):
            return
        if not is_waiting and ending.kind == "finished":  # the others may have something left to do
            return
        self.is_ending = True
        found = watched.whereabouts()
        because = ending.words(exchange.is_elsewhere(ending.process))
        rank = exchange.rank
        say(
            watched.run,
            f"Failed because {because}; rank {rank} was in iteration {found.iteration + 1}{found.words}",
            found.stack,
        )
        leave(1)

    # A stall

    def _end_all(self, exchange: Exchange, watched: Watched, ending: Ending) -> None:
        """End all processes that can: each tells what it does, one of them puts that together, all log it."""
        self.is_ending = True
        bulletin, run = exchange.bulletin, watched.run
        own = watched.whereabouts()
        text = f"The run stands still for {ending.said} s: rank {exchange.rank} is{own.words}"
        stacks = f"The stack of rank {exchange.rank}:\n{own.stack}"
        reports = {own.rank: own}
        try:
            bulletin.put(f"report {exchange.rank}", own.text())
            bulletin.count("reports")
            if ending.process.rank == exchange.rank:
                reports = self._gather_reports(exchange)
                text = self._verdict(exchange, watched, float(ending.said), reports)
                stacks = "".join(f"The stack of rank {r.rank}:\n{r.stack}" for r in reports.values())
                bulletin.put("verdict", text)
                append_event(
                    run.work_dir, "stalled", rank=ending.process.rank, iter=run.iter, reason=text.partition("\n")[0]
                )
            else:
                text = self._await_verdict(exchange) or text
        except StoreLostError:
            pass  # what is known so far is logged
        say(run, text, stacks, speaks=own.rank == min(reports))
        self._let_others_leave(exchange, len(reports) if ending.process.rank == exchange.rank else None)
        leave(STALLED)

    def _gather_reports(self, exchange: Exchange) -> dict[int, Whereabouts]:
        deadline = time.monotonic() + _REPORT_S
        while exchange.bulletin.count("reports", 0) < exchange.world_size and time.monotonic() < deadline:
            time.sleep(_ROUND_S)
        texts = exchange.bulletin.read([f"report {rank}" for rank in range(exchange.world_size)])
        return {rank: Whereabouts.read(text) for rank, text in enumerate(texts) if text is not None}

    def _verdict(self, exchange: Exchange, watched: Watched, seconds: float, reports: dict[int, Whereabouts]) -> str:
        finished: list[int] = []
        if self._gathering is not None:
            self._gathering.gather()  # this process may not have been the one that did
            finished = self._gathering.finished(watched.number)
        missing = [rank for rank in range(exchange.world_size) if rank not in reports and rank not in finished]
        known = exchange.identities(missing)
        silent = {}
        for rank in missing:
            found = known.get(rank)
            does = found.state() if found is not None and found.is_beside(exchange.myself) else "does not answer"
            silent[rank] = f"rank {rank} does not answer" if found is None else f"{found.words()} {does}"
        return verdict(seconds, reports, silent, finished)

    def _await_verdict(self, exchange: Exchange) -> str | None:
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            if (text := exchange.bulletin.read(["verdict"])[0]) is not None:
                return text
            time.sleep(_ROUND_S * max(1.0, exchange.world_size / 50))
        return None

    def _let_others_leave(self, exchange: Exchange, reports: int | None) -> None:
        """Let the process that may keep the store, rank 0, leave last."""
        deadline = time.monotonic() + _LAST_S
        try:
            if exchange.rank > 0:
                exchange.bulletin.count("left")
            while exchange.rank == 0 and time.monotonic() < deadline:
                expected = exchange.bulletin.count("reports", 0) if reports is None else reports
                if exchange.bulletin.count("left", 0) >= expected - 1:
                    return
                time.sleep(_ROUND_S)
        except StoreLostError:
            pass  # there is nothing to keep for the others


# The guard: a second thread beside the Monitor's, which waits without end if the store does not answer.


_PERIOD_S = 0.25
_ENDING_S = 50.0
"""Seconds after which an end that has begun is made, whatever it waits for; more than all that an end waits for together."""


class Guard:
    """Ends this process if the job's store is silent or lost and training does not get on either.

    Args:
        rounds: the rounds of the Monitor's thread.
        watched: the run.
        stall_s, long_s: see WatchdogOptions.
    """

    def __init__(self, rounds: Rounds, watched: Watched, stall_s: float, long_s: float) -> None:
        self._rounds, self._watched = rounds, watched
        self._stall_s, self._long_s = stall_s, long_s
        self._ends = threading.Event()
        threading.Thread(target=self._guard, name="flextrain-guard", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._ends.set()

    def _guard(self) -> None:
        clock = Clock()
        silent, still, ending = Age(clock), Age(clock), Age(clock)
        while not self._ends.wait(min(_PERIOD_S, self._stall_s / 8)):
            clock.tick()
            rounds, watched = self._rounds, self._watched
            silent.note(rounds.number)
            still.note(watched.count())
            ending.note(rounds.is_ending)
            if rounds.is_ending:
                if ending.seconds > _ENDING_S:
                    os._exit(STALLED)
                continue
            lost = rounds.exchange is not None and rounds.exchange.lost is not None
            limit = self._long_s if watched.is_first() or watched.is_compiling() else self._stall_s
            if (lost or silent.seconds > self._stall_s) and still.seconds > limit:
                self._end(silent.seconds, still.seconds, lost)

    def _end(self, silent: float, still: float, lost: bool) -> None:
        rounds, watched = self._rounds, self._watched
        rounds.is_ending = True
        own, run = watched.whereabouts(), watched.run
        keeper = keeper_of_store()
        said = (
            f"{keeper} has ended"
            if lost
            else f"{keeper} {'have' if ' or ' in keeper else 'has'} not answered for {silent:.0f} s"
        )
        text = f"The run stands still for {still:.0f} s: {said}; rank {run.rank} is in iteration {own.iteration + 1}{own.words}"
        say(run, text, f"The stack of rank {run.rank}:\n{own.stack}")
        append_event(run.work_dir, "stalled", rank=run.rank, iter=run.iter, reason=text)
        leave(STALLED)


def keeper_of_store() -> str:
    """Who keeps the job's store, with a relative clause."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun or its machine, which keep the job's store,"
    return "rank 0 or its machine, which keep the job's store,"


T = TypeVar("T")

LOOK_S = 1.0
"""Seconds that a process whose communication failed looks for the reason."""

_EXIT_S = 60.0
_NAP_S = 0.02


class Watchdog:
    """Watches the processes of a run from a thread of each of them; training does nothing for it.

    A process gets on if iterations, micro-batches, validation batches, parts of checkpoints or calls of ``heartbeat``
    go on: the thread reads these numbers. When they have not changed on any process for ``stall_s`` seconds, every
    process that can says what it is doing, and all end with status 75. Before the first update, and while a model is
    compiled, it takes ``first_s`` seconds.

    A process that fails tells the others before it leaves. They look for that when their communication breaks, and are
    ended with it if they still wait in a collective.

    The methods of this class are for the main thread; what the Monitor's thread does is in Rounds.

    Args:
        oversight: its thread watches.
        options: ``env_cfg.watchdog``; None: no stall is looked for, but failures are told.
    """

    def __init__(self, oversight: ThreadOfRun, options: WatchdogOptions | None) -> None:
        self._oversight, self._options = oversight, options
        self._rounds = Rounds(oversight, options)
        oversight.add(self._rounds)

    @contextmanager
    def watching(self, run: Run) -> Iterator[None]:
        """Context of a run; a nested one, such as validation in a hook, belongs to the outer one."""
        rounds = self._rounds
        if rounds.watched is not None or self._oversight.bulletin is None:
            yield
            return
        if rounds.exchange is None:  # whoever fails at once shall be known to the others
            self._oversight.wake()
            rounds.is_ready.wait(LOOK_S)
        rounds.watched = watched = Watched(run, rounds.last_run + 1)
        options = self._options
        guard = Guard(rounds, watched, options.stall_s, options.long_s) if options is not None else None
        try:
            yield
        finally:
            self.await_exit()
            if guard is not None:
                guard.stop()
            rounds.last_run, rounds.watched = watched.number, None  # in this order, for the other thread
            if (
                not watched.failed
            ):  # who waits for this process shall know that it has finished, also if it exits at once
                self._ask(rounds.send_beat)

    @property
    def has_told(self) -> bool:
        """Whether the end of the current run was told, or found to be another process's."""
        watched = self._rounds.watched
        return watched is None or bool(watched.failed)

    def tell(self, run: Run, kind: Kind, said: str) -> bool:
        """Tell the others why this process leaves the run, before it does.

        It takes milliseconds. Rank 0, which may keep the store, waits up to a second until all have heard it.

        Args:
            run: the run.
            kind: "failed" or "left".
            said: such as "ValueError: ...".

        Returns:
            True if no other process has told of an end before.
        """
        watched, exchange = self._rounds.watched, self._rounds.exchange
        if watched is None or exchange is None:
            return False
        watched.failed = said[:200]
        number = watched.number
        own = Ending(kind, exchange.myself, said[:1000], run.iter)
        first = self._ask(lambda: exchange.announce(number, own))
        if exchange.rank == 0 and first is not None:
            self._ask_until(lambda: exchange.all_have_heard(number), LOOK_S)
        return first == own

    def reason(self, error: BaseException) -> Ending | None:
        """How another process left, from which ``error`` follows; None if it is this process's own or nothing is known.

        If the watchdog is about to end all processes, this does not return.
        """
        self.await_exit()
        rounds = self._rounds
        watched, exchange = rounds.watched, rounds.exchange
        if watched is None or exchange is None or not follows_from_another(error):
            return None
        watched.failed = f"{type(error).__name__}: {error}"[:200]
        found = watched.ending or self._ask_until(lambda: rounds.find(watched), LOOK_S)
        if found is None and (found := self._silent(exchange) or self._keeper(exchange)) is not None:
            facts = {"rank": found.process.rank, "iter": watched.run.iter}  # which other processes may write too
            append_event(watched.run.work_dir, "failed", **facts, reason=found.words(), where="", follows=True)
        self.await_exit()
        return found

    def await_exit(self) -> None:
        """Wait for the watchdog to end this process, if it is about to: all processes end with one status."""
        deadline = time.monotonic() + _EXIT_S
        while self._rounds.is_ending and time.monotonic() < deadline:
            time.sleep(0.1)

    def all_have_failed(self) -> bool:
        """Whether all processes leave the run by errors of their own, so that none of them is missing in a collective.

        Waits up to a second for that; all get the same answer. True if nobody watches.
        """
        watched, exchange = self._rounds.watched, self._rounds.exchange
        if watched is None or exchange is None:
            return True
        key, bulletin = f"failed {watched.number}", exchange.bulletin
        self._ask(lambda: bulletin.count(key))
        have = self._ask_until(lambda: bulletin.count(key, 0) >= exchange.world_size, LOOK_S)
        # The first answer is that of all: whoever has waited in vain leaves, and the last one fails because of that.
        return self._ask(lambda: bulletin.put_first(f"all {key}", "yes" if have else "no")) == "yes"

    def is_elsewhere(self, ending: Ending) -> bool:
        """Whether the process that has left was on another machine."""
        return self._rounds.exchange is not None and self._rounds.exchange.is_elsewhere(ending.process)

    def _silent(self, exchange: Exchange) -> Ending | None:
        """The first of the processes that do not answer any more, if all the others do."""
        if exchange.world_size > 512 and exchange.rank > 0:  # every process would ask for all answers
            return None
        number = self._ask(exchange.alarm)
        if number is None:
            return None
        silent = self._ask_until(lambda: exchange.silent(number) == [], LOOK_S)
        if silent:
            return None
        missing = self._ask(lambda: exchange.identities(exchange.silent(number)))
        gone = next(iter((missing or {}).values()), None)
        return None if gone is None else Ending("silent", gone)

    def _keeper(self, exchange: Exchange) -> Ending | None:
        """What is known if the store is lost: the process that keeps it has ended."""
        if exchange.lost is None:
            return None
        deadline = time.monotonic() + LOOK_S
        while time.monotonic() < deadline:  # a process that is killed closes its connections before it has ended
            for gone in exchange.ended_beside(8):
                if gone.rank == 0 and keeper_of_store().startswith("rank 0"):
                    return Ending("killed", gone)
            time.sleep(0.05)
        return Ending("store", exchange.myself, f"{keeper_of_store()} can no longer be reached")

    def _ask(self, question: Callable[[], T], patience_s: float = LOOK_S) -> T | None:
        """Let the Monitor's thread call a function that uses the store; None if that cannot be done in time."""
        exchange = self._rounds.exchange
        if exchange is None or exchange.lost is not None:
            return None
        return exchange.ask(question, patience_s, self._oversight.wake)

    def _ask_until(self, question: Callable[[], T], patience_s: float) -> T | None:
        """Ask until the answer is true, for at most ``patience_s`` seconds; return the last answer."""
        deadline = time.monotonic() + patience_s
        while not (found := self._ask(question, patience_s)) and time.monotonic() < deadline:
            exchange = self._rounds.exchange
            if exchange is None or exchange.lost is not None:
                break
            time.sleep(max(_NAP_S, exchange.bulletin.pace_s / 5))
        return found


__all__ = ["Watchdog", "WatchdogOptions"]
