"""Watchdog: ends a run that stands still, or whose processes left, and says which rank, where and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ...core.events import append_event
from .ending import Ending, Kind, follows_from_another
from .exchange import Exchange
from .guard import Guard, keeper_of_store
from .limits import WatchdogOptions
from .rounds import Rounds, ThreadOfRun
from .watched import Watched

if TYPE_CHECKING:
    from ..run import Run

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
