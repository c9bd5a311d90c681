"""Exchange: what the processes of a run tell each other through the job's store, beside training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from ...core.comm.bulletin import Bulletin, StoreLostError
from .ending import Ending
from .identity import Identity

T = TypeVar("T")


class Exchange:
    """The store as the watchdog uses it; its methods belong to the thread of the Monitor, except ``ask``.

    Runs are counted, because one runner may train, fail, and train again: an ending belongs to one run.

    Args:
        bulletin: the bulletin of the Monitor's thread.
        myself: this process.
    """

    def __init__(self, bulletin: Bulletin, myself: Identity) -> None:
        self.bulletin, self.myself = bulletin, myself
        self.rank, self.world_size = myself.rank, bulletin.world_size
        self.lost: StoreLostError | None = None
        """The error with which the store was lost."""
        self.answered = 0
        """Number of the last alarm that this process has answered."""
        self._questions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._known: dict[int, Identity] = {}
        self._heard: set[int] = set()
        self.bulletin.put(f"process {self.rank}", myself.text())
        self.bulletin.put(
            f"answer {self.rank}", "0"
        )  # texts that are there are read with two messages, whatever their number

    # Another thread's questions

    def ask(self, question: Callable[[], T], patience_s: float, wake: Callable[[], None]) -> T | None:
        """Let the Monitor's thread call a function; None if it does not come to that in time, or the store is lost."""
        done, results = threading.Event(), list[T]()

        def answer() -> None:
            try:
                results.append(question())
            finally:
                done.set()

        self._questions.put(answer)
        wake()
        done.wait(patience_s)
        return results[0] if results else None

    def answer_questions(self) -> None:
        """Call what ``ask`` was given."""
        while not self._questions.empty():
            self._questions.get()()

    # Endings

    def announce(self, run: int, ending: Ending) -> Ending:
        """Tell the others of an ending; return the first one of this run, which counts."""
        first = Ending.read(self.bulletin.put_first(f"end {run}", ending.text()))
        self.hear(run)
        self.alarm()
        return first

    def alarm(self) -> int:
        """Make every process look at once, and say that it is there; return the number of the alarm."""
        return self.bulletin.count("alarms")

    def has_alarm(self) -> bool:
        """Whether there is an alarm that this process has not answered; answers it."""
        number = self.bulletin.count("alarms", 0)
        if number == self.answered:
            return False
        self.bulletin.put(f"answer {self.rank}", str(number))
        self.answered = number
        return True

    def first_ending(self, run: int) -> Ending | None:
        """The ending that was announced first in a run."""
        text = self.bulletin.read_first(f"end {run}")
        if text is None:
            return None
        self.hear(run)
        return Ending.read(text)

    def hear(self, run: int) -> None:
        """Take note that this process knows how the run ends."""
        if run not in self._heard:
            self._heard.add(run)
            self.bulletin.count(f"heard {run}")

    def all_have_heard(self, run: int) -> bool:
        """Whether every process knows how the run ends."""
        return self.bulletin.count(f"heard {run}", 0) >= self.world_size

    def silent(self, number: int) -> list[int]:
        """The ranks that have not answered alarm ``number``."""
        answers = self.bulletin.read([f"answer {rank}" for rank in range(self.world_size)])
        return [rank for rank, text in enumerate(answers) if text is None or int(text) < number]

    # Processes

    def identities(self, ranks: Iterable[int]) -> dict[int, Identity]:
        """The identities of these ranks, as far as they are there."""
        new = [rank for rank in ranks if rank not in self._known]
        for rank, text in zip(new, self.bulletin.read([f"process {rank}" for rank in new]), strict=True):
            if text is not None:
                self._known[rank] = Identity.read(text)
        return {rank: self._known[rank] for rank in ranks if rank in self._known}

    def ended_beside(self, number: int) -> list[Identity]:
        """Processes on this machine that have ended, among ``number`` ranks up and down; asks the store only once.

        If the store is lost, rank 0, which may have kept it, is one of them.
        """
        near = [*range(max(0, self.rank - number), min(self.world_size, self.rank + number + 1))]
        known = self._known
        if self.lost is None and not all(rank in known for rank in near):
            known = self.identities(near)
        elif self.lost is not None and 0 not in near:
            near.append(0)
        return [
            known[rank]
            for rank in near
            if rank in known and rank != self.rank and known[rank].is_beside(self.myself) and known[rank].has_ended()
        ]

    def is_elsewhere(self, identity: Identity) -> bool:
        """Whether a process is on another machine, so that its name has to be said."""
        return identity.machine != self.myself.machine
