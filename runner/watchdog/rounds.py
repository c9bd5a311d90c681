"""Rounds: what the Monitor's thread does for the watchdog, several times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from ...core.comm.bulletin import Bulletin, StoreLostError
from ...core.events import append_event
from ..last_words import leave, say
from .ending import Ending
from .exchange import Exchange
from .identity import Identity
from .limits import WatchdogOptions
from .pulse import Age, Clock
from .stall import Beat, Gathering
from .stragglers import Stragglers, empty, part_of, with_one_more
from .verdict import verdict
from .watched import Watched
from .whereabouts import Whereabouts, innermost, waits_now

STALLED = 75
"""Exit status of a run that stood still: EX_TEMPFAIL of sysexits.h, starting again may help."""

GRACE_S = 5.0
"""Seconds after which a process that still waits for one that has left is ended: NCCL does not notice it."""

LONG_GRACE_S = 60.0
"""The same for a process that does not get on, but is not seen to wait for others."""

_REPORT_S, _VERDICT_S, _LAST_S = 2.0, 5.0, 3.0
_NAP_S = 0.05
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
            time.sleep(_NAP_S)
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
            time.sleep(_NAP_S * max(1.0, exchange.world_size / 50))
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
                time.sleep(_NAP_S)
        except StoreLostError:
            pass  # there is nothing to keep for the others
