"""Stalls: all processes send a beat while they get on, and one of them notices when none does any more."""

from __future__ import annotations

import dataclasses

from .exchange import Exchange
from .pulse import Age, Clock
from .stragglers import Samples


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process tells of itself; it is sent only when it has changed.

    Attributes:
        run: number of the run that it is in, or was in last.
        is_busy: whether it is in a run now.
        is_first: whether it has not made the first update, or evaluated the first batch, of this run.
        is_compiling: whether it compiles a model.
        count: a number that changes as long as the process gets on.
        samples: what it was doing whenever it was looked at, see Stragglers.
    """

    run: int = 0
    is_busy: bool = False
    is_first: bool = True
    is_compiling: bool = False
    count: int = 0
    samples: Samples = (0, 0, 0)

    def text(self) -> str:
        """This beat as a text, for ``read``."""
        return f"{self.run} {self.is_busy:d} {self.is_first:d} {self.is_compiling:d} {self.count} {' '.join(map(str, self.samples))}"

    @classmethod
    def read(cls, text: str) -> Beat:
        """The beat that ``text`` gave."""
        run, is_busy, is_first, is_compiling, count, *samples = map(int, text.split())
        return cls(run, bool(is_busy), bool(is_first), bool(is_compiling), count, tuple(samples))


class Gathering:
    """The beats of all processes, as one process sees them.

    Rank 0 gathers. Another rank does so once nobody has for ``(4 + rank)`` rounds: the rank that gathers may be stopped
    while the store, which the launcher may keep, is there.

    Args:
        exchange: the exchange of this process.
        clock: the clock of this process.
        stall_s: seconds without any beat that count as a stall.
        long_s: those in a phase that may take longer.
    """

    def __init__(self, exchange: Exchange, clock: Clock, stall_s: float, long_s: float) -> None:
        self._exchange, self._clock = exchange, clock
        self._stall_s, self._long_s = stall_s, long_s
        self._ages = [Age(clock) for _ in range(exchange.world_size)]
        self._beats = [Beat()] * exchange.world_size
        self._texts: list[str | None] = [None] * exchange.world_size
        self._beating = 0  # processes that have sent a beat, when the beats were read last
        self._gathers = exchange.rank == 0
        self._others = Age(clock)

    def is_mine(self, round_s: float) -> bool:
        """Whether this process has to gather now."""
        if self._gathers:
            return True
        if self._exchange.rank > 8:  # deputies enough; every one asks the store
            return False
        self._others.note(self._exchange.bulletin.count("gathered", 0))
        self._gathers = self._others.seconds > max(2.0, (4 + self._exchange.rank) * round_s)
        return self._gathers

    def gather(self) -> tuple[float, int, int] | None:
        """Read all beats; return what ``stall`` does."""
        bulletin = self._exchange.bulletin
        bulletin.count("gathered")
        known = [rank for rank, text in enumerate(self._texts) if text is not None]
        if len(known) < len(self._texts) and (beating := bulletin.count("beating", 0)) > len(known):
            # The store is asked for each rank alone, which is too much to do in every round.
            known = list(range(len(self._texts))) if beating > self._beating else known
            self._beating = beating
        for rank, text in zip(known, bulletin.read([f"beat {rank}" for rank in known]), strict=True):
            self._texts[rank] = text
        for rank, text in enumerate(self._texts):
            if text is not None:
                self._beats[rank] = beat = Beat.read(text)
                self._ages[rank].note((beat.run, beat.is_busy, beat.count))
        return self.stall()

    def stall(self) -> tuple[float, int, int] | None:
        """For how many seconds nobody has got on, in which run, and a rank that is in it; None if that is no stall.

        All processes have met at the beginning of a run: one that is not in it has left it, or cannot tell.
        """
        busy = [rank for rank, beat in enumerate(self._beats) if beat.is_busy]
        if not busy:
            return None
        seconds = min(self._ages[rank].seconds for rank in busy)
        # What a stopped process has told last may be out of date: the first update is made by all or by none.
        is_first = all(self._beats[rank].is_first for rank in busy)
        long = [rank for rank in busy if is_first or self._beats[rank].is_compiling]
        still = seconds > self._stall_s and all(self._ages[rank].seconds > self._long_s for rank in long)
        return (seconds, self._beats[busy[0]].run, busy[0]) if still else None

    def samples(self) -> list[Samples]:
        """What the processes were doing whenever they were looked at."""
        return [beat.samples for beat in self._beats]

    def finished(self, run: int) -> list[int]:
        """The ranks that have left a run which this process is still in."""
        return [rank for rank, beat in enumerate(self._beats) if not beat.is_busy and beat.run >= run]
