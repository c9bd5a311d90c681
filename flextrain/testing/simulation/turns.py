"""Turns: threads of which one runs at a time, until it waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.base.errors import FlexTrainError

_FRUITLESS = 20  # questions by every rank without anything happening meanwhile


class SimulationError(FlexTrainError):
    """Simulated ranks wait for each other for ever, or make collective calls that do not fit together."""


class AbandonedError(BaseException):
    """Ends a simulated rank because another one has failed. It is not an Exception, which a program might catch."""


@dataclass
class _Wait:
    is_over: Callable[[], bool]
    what: str


class Turns:
    """Which of several threads runs. Turns change only where a thread waits, so each run of a program is the same.

    Args:
        count: number of threads, which have the numbers 0 to ``count - 1``.
        leave, enter: called in a thread before its turn ends and after it has begun again; what ``leave`` returns is given
            to ``enter``.
    """

    def __init__(self, count: int, leave: Callable[[], Any], enter: Callable[[Any], None]) -> None:
        self._leave, self._enter = leave, enter
        self._signals = [threading.Semaphore(0) for _ in range(count)]
        self._waits: list[_Wait | None] = [_Wait(lambda: True, "its start") for _ in range(count)]
        self._is_running = [True] * count
        self._own = threading.local()
        self._fruitless = 0
        self._stuck = ""
        self._abandons = False

    @property
    def number(self) -> int:
        """The number of this thread."""
        return int(self._own.number)

    def begin(self, number: int) -> None:
        """Make this thread number ``number``, and wait for its first turn."""
        self._own.number = number
        self._signals[number].acquire()
        self._waits[number] = None

    def start(self) -> None:
        """Give the first turn to thread 0; called by a thread without a number."""
        self._signals[0].release()

    def end(self, has_failed: bool) -> None:
        """End this thread's part. If it has failed, each of the others ends where it waits next, by AbandonedError."""
        self._is_running[self.number] = False
        self._abandons |= has_failed
        self.happened()
        self._pass_on()

    def happened(self) -> None:
        """Note that something happened that others may wait for."""
        self._fruitless = 0

    def wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Let other threads run until ``is_over()``.

        Args:
            what: what this thread waits for, for messages.

        Raises:
            SimulationError: all threads wait; the message has what for.
        """
        if self._abandons:
            raise AbandonedError
        if is_over():
            return
        self._give_way(_Wait(is_over, what))
        if not is_over():
            raise SimulationError(self._stuck)

    def ask_again(self, what: str) -> None:
        """Let other threads run because the answer to a question was no, and will be asked again.

        Raises:
            SimulationError: nothing can change the answer any more.
        """
        if self._abandons:
            raise AbandonedError
        self._fruitless += 1
        if self._fruitless > _FRUITLESS * len(self._waits):
            raise SimulationError(self._stuck or self._described())
        self._give_way(_Wait(lambda: True, what))

    def _give_way(self, wait: _Wait) -> None:
        number = self.number
        self._waits[number] = wait
        if self._next() != number:
            kept = self._leave()
            self._pass_on()
            self._signals[number].acquire()
            self._enter(kept)
        self._waits[number] = None
        if self._abandons:
            raise AbandonedError

    def _pass_on(self) -> None:
        if (chosen := self._next()) is not None:
            self._signals[chosen].release()

    def _next(self) -> int | None:
        """The next thread that can go on; if none can, the first that waits, which raises; None if all have ended."""
        count = len(self._waits)
        first = None
        for distance in range(1, count + 1):
            number = (self.number + distance) % count
            wait = self._waits[number]
            if not self._is_running[number] or wait is None:
                continue
            first = number if first is None else first
            if self._abandons or wait.is_over():
                return number
        if first is not None and not self._stuck:
            self._stuck = self._described()
        return first

    def _described(self) -> str:
        waiting: dict[str, list[int]] = {}
        for number, wait in enumerate(self._waits):
            what = f"wait in {wait.what}" if wait is not None and self._is_running[number] else "have returned"
            if self._is_running[number] and wait is None:
                what = "ask the store in vain"
            waiting.setdefault(what, []).append(number)
        parts = (f"ranks {_spans(numbers)} {what}" for what, numbers in waiting.items())
        return f"all simulated ranks wait for each other: {'; '.join(parts)}"


def _spans(numbers: list[int]) -> str:
    """Sorted numbers in brief, such as "0 to 3, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
