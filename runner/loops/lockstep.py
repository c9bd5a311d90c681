"""Processes whose data may differ in length: they train in step, end their epochs together, and evaluate in step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...core.comm import collectives as dist
from ...core.errors import counted

_PURPOSE = "loops in step"
_END = object()

Window = list[Any]


class InStep:
    """The windows of a process as long as all processes have one, each of as many batches on all.

    While a window is trained on, the processes agree on the next one, if that has been read: nobody waits for the message.
    What some have left at the end is left out, and that is said once.

    Args:
        where: the configuration key, for the message.
        ahead: read the next window before one is given; without, nothing is ever read that has not been given.
        processes: how many there are.
        timeout_s: how long a process may take for its next window.
    """

    def __init__(self, where: str, *, processes: int, ahead: bool = True, timeout_s: float | None = None) -> None:
        self._where, self._ahead, self._processes = where, ahead, processes
        self._group = dist.side_group(timeout_s, _PURPOSE)
        self._said = False

    def windows(self, own: Iterator[Window], start: int = 0) -> Iterator[Window]:
        """The windows of ``own``, up to the first that some process does not have.

        Args:
            own: what this process can read.
            start: the number in the epoch of the first.
        """
        done, is_longer = start, False
        window, smallest = self._next(own)
        while size := smallest():
            is_longer = len(window) > size
            if self._ahead:
                following, smallest = self._next(own)
            yield window[:size]
            done += 1
            if not self._ahead:
                following, smallest = self._next(own)
            window = following
        self._say(done, is_longer or bool(window))

    def _next(self, own: Iterator[Window]) -> tuple[Window, Callable[[], int]]:
        """The next window, and what waits for the length of the shortest of all processes' next."""
        window = next(own, [])
        return window, dist.start_reduce(len(window), "min", self._group)

    def _say(self, done: int, is_longer: bool) -> None:
        longer = dist.start_reduce(int(is_longer), "sum", self._group)()
        if longer and not self._said:
            self._said = True
            logging.getLogger("flextrain").warning(
                f"{self._where}: {self._processes - longer} of {self._processes} processes had no more batches after "
                f"{counted(done, 'iteration')} of the epoch, which ended there for all; what the others have left is left "
                "out, in every epoch"
            )


def until_all_end(batches: Iterable[Any], timeout_s: float | None = None) -> Iterator[tuple[Any, bool]]:
    """Batches and whether they are this process's own, as long as any process has one.

    A process that has no more repeats its last one, and one that had none gets that of another: whoever runs a model may
    have to communicate.
    """
    group = dist.side_group(timeout_s, _PURPOSE)
    own = iter(batches)
    batch = next(own, _END)
    last = _first(batch)
    some_left = dist.start_reduce(batch is not _END, "max", group)
    while some_left():
        is_own = batch is not _END
        last = batch if is_own else last
        batch = next(own, _END) if is_own else _END
        some_left = dist.start_reduce(batch is not _END, "max", group)
        yield last, is_own


def _first(batch: Any) -> Any:
    """The first batch of this process, or of the first that has one."""
    has_one = dist.all_gather_object(batch is not _END)
    if all(has_one) or not any(has_one):
        return batch
    shared = dist.broadcast_object(None if batch is _END else batch, has_one.index(True))
    return shared if batch is _END else batch
