"""Stalls: all processes send a beat while they get on, and one of them notices when none does any more."""

from __future__ import annotations

import dataclasses

from .exchange import Exchange
from .pulse import Age, Clock


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process tells of itself; it is sent only when it has changed.

    Attributes:
        run: number of the run that it is in, or was in last.
        is_busy: whether it is in a run now.
        is_long: whether it is in a phase that may take longer: before the first update, or compiling.
        count: a number that changes as long as the process gets on.
    """

    run: int = 0
    is_busy: bool = False
    is_long: bool = True
    count: int = 0

    def text(self) -> str:
        """This beat as a text, for ``read``."""
        return f"{self.run} {self.is_busy:d} {self.is_long:d} {self.count}"

    @classmethod
    def read(cls, text: str) -> Beat:
        """The beat that ``text`` gave."""
        run, is_busy, is_long, count = map(int, text.split())
        return cls(run, bool(is_busy), bool(is_long), count)


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
            self._ages[rank].note(text)
            if text is not None:
                self._beats[rank] = Beat.read(text)
        return self.stall()

    def stall(self) -> tuple[float, int, int] | None:
        """For how many seconds nobody has got on, in which run, and a rank that is in it; None if that is no stall.

        All processes have met at the beginning of a run: one that is not in it has left it, or cannot tell.
        """
        busy = [rank for rank, beat in enumerate(self._beats) if beat.is_busy]
        if not busy:
            return None
        seconds = min(self._ages[rank].seconds for rank in busy)
        still = all(
            self._ages[rank].seconds > (self._long_s if self._beats[rank].is_long else self._stall_s) for rank in busy
        )
        return (seconds, self._beats[busy[0]].run, busy[0]) if still else None

    def finished(self, run: int) -> list[int]:
        """The ranks that have left a run which this process is still in."""
        return [rank for rank, beat in enumerate(self._beats) if not beat.is_busy and beat.run >= run]
