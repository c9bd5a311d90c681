"""InStep: keeps processes with data of different lengths in step; SameBatches: compares those of one shard of the data;
HeldBatches: copies batches whose memory the data use again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...core.base.errors import ConfigError, counted
from ...core.base.tensors import of_leaves, of_name
from ...core.base.trees import map_tensors
from ...core.comm import collectives as dist

_PURPOSE = "loops in step"
_END = object()

Window = list[Any]


class HeldBatches:
    """The batches of data of which several are needed at a time: the micro-batches of an update, or one that is read ahead.

    Some data write the next batch into memory that they gave before, as pipelines on accelerators do. The first batches are copied, and
    the given ones compared with them once the next ones are read. If one has changed, all batches are copied from then on.

    Args:
        where: the configuration key, for messages.
        count: how many batches are needed at a time, 2 or more.
    """

    def __init__(self, where: str, count: int) -> None:
        self._where, self._count = where, count
        self._copies: bool | None = None  # None: not known yet
        self._given: list[tuple[Any, Any, list[int]]] = []

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, each with memory of its own.

        Raises:
            ConfigError: the data use memory again that is not a tensor's, which is not copied.
        """
        for batch in batches:
            if self._copies is None:
                self._compare()
            if self._copies is False:
                yield batch
                continue
            copy = map_tensors(torch.Tensor, torch.clone, batch)
            if self._copies is None:
                self._given.append((batch, copy, of_leaves(batch)))
            yield copy

    def _compare(self) -> None:
        changed = [(copy, before) for batch, copy, before in self._given if of_leaves(batch) != before]
        if any(of_leaves(copy) != before for copy, before in changed):
            raise ConfigError(
                f"{self._where}: writes into a batch that it gave before, and {self._count} batches are needed at a time; give copies"
            )
        if changed:
            logging.getLogger("flextrain").info(
                f"{self._where}: writes into batches that it gave before; they are copied, because {self._count} are needed at a time"
            )
        if changed or len(self._given) == self._count - 1:
            self._copies, self._given = bool(changed), []


class InStep:
    """The windows of a process while all processes have one, cut to the same number of batches.

    While a window is trained on, the processes agree on the next one if it has been read, so no process waits for the
    message. Batches that only some processes have left at the end are skipped, with one warning.

    Args:
        where: the configuration key, for the message.
        ahead: read the next window before the current one is given out; otherwise read only what is given out next.
        processes: number of processes.
        shards: number of shards of the data, which no two processes with different ones should read alike.
        timeout_s: longest time in seconds that a process may take for its next window.
    """

    def __init__(
        self, where: str, *, processes: int, shards: int, ahead: bool = True, timeout_s: float | None = None
    ) -> None:
        self._where, self._ahead, self._processes, self._shards = where, ahead, processes, shards
        self._group = dist.side_group(timeout_s, _PURPOSE)
        self._said = self._is_compared = False

    def windows(self, own: Iterator[Window], start: int = 0) -> Iterator[Window]:
        """Yield the windows of ``own``, up to the first window that some process does not have.

        Args:
            own: the windows that this process can read.
            start: number of the first window in the epoch.
        """
        done, is_longer = start, False
        window, smallest = self._next(own)
        while size := smallest():
            is_longer = len(window) > size
            if not self._is_compared:
                self._compare(window[:size])
            if self._ahead:
                following, smallest = self._next(own)
            yield window[:size]
            done += 1
            if not self._ahead:
                following, smallest = self._next(own)
            window = following
        self._say(done, is_longer or bool(window))

    def _next(self, own: Iterator[Window]) -> tuple[Window, Callable[[], int]]:
        """Return the next window, and a function that waits for the smallest length of all processes' next windows."""
        window = next(own, [])
        return window, dist.start_reduce(len(window), "min", self._group)

    def _compare(self, window: Window) -> None:
        """Warn if shards of the data begin with the same samples: a source that does not divide itself, though the user has said so."""
        self._is_compared = True
        found = dist.start_gather(_print_of(window), self._group)()
        if len(set(found)) < self._shards:
            logging.getLogger("flextrain").warning(
                f"{self._where}: of {self._shards} processes with data of their own some begin with the same batch, so samples count several "
                "times; shard=True gives every process its own part, flextrain.data.data_shard() says which one that is"
            )

    def _say(self, done: int, is_longer: bool) -> None:
        longer = dist.start_reduce(int(is_longer), "sum", self._group)()
        if longer and not self._said:
            self._said = True
            logging.getLogger("flextrain").warning(
                f"{self._where}: {self._processes - longer} of {self._processes} processes had no more batches after "
                f"{counted(done, 'iteration')} of the epoch, so it ended there for all; the others skip their remaining "
                "batches, in every epoch"
            )


class SameBatches:
    """The windows of processes that hold one model together, compared: their shard of the data is the same.

    The first window of a pass is compared before it is given out, the others while they are trained on. Every window is
    compared whole, because data that divide themselves wrongly may begin alike.

    Args:
        where: the configuration key, for the message.
        shard: index of this process's shard of the data.
        in_step: keeps the processes in step, if their data may differ in length.
        timeout_s: longest time in seconds that a process may take for its next window.
    """

    def __init__(
        self, where: str, shard: int, in_step: InStep | SameBatches | None, timeout_s: float | None = None
    ) -> None:
        self._where, self._in_step = where, in_step
        self._group = dist.side_group(timeout_s, "same batches")
        self._shards: list[int] = dist.all_gather_object(shard)

    def windows(self, own: Iterator[Window], start: int = 0) -> Iterator[Window]:
        """Yield the windows of ``own``; see InStep.

        Raises:
            ConfigError: on every process, if those of a shard have different ones.
        """
        check: Callable[[], None] | None = None
        for window in own if self._in_step is None else self._in_step.windows(own, start):
            if check is not None:
                check()
            is_first, check = check is None, self._start(window)
            if is_first:
                check()
                check = _done
            yield window
        if check is not None:
            check()

    def _start(self, window: Window) -> Callable[[], None]:
        gathered = dist.start_gather(_print_of(window), self._group)

        def check() -> None:
            first: dict[int, tuple[int, int]] = {}
            for rank, (shard, found) in enumerate(zip(self._shards, gathered(), strict=True)):
                other, expected = first.setdefault(shard, (rank, found))
                if found != expected:
                    raise ConfigError(
                        f"{self._where}.dataset: gives process {rank} another batch than process {other}, and both train shard {shard} of "
                        "the data, because they hold one model together; divide it by flextrain.data.data_shard(), not by rank, and "
                        "draw alike on both"
                    )

        return check


def _print_of(window: Window) -> int:
    return of_name(repr(of_leaves(window))) >> 1


def _done() -> None:
    """Nothing is left to compare."""


def until_all_end(batches: Iterable[Any], timeout_s: float | None = None) -> Iterator[tuple[Any, bool]]:
    """Yield batches, each with True if it is this process's own, while any process has one.

    A process without a batch repeats its last one, or uses that of another process if it never had one, because the
    model may run collectives.
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
    """Return the first batch of this process, or else of the first process that has one."""
    has_one = dist.all_gather_object(batch is not _END)
    if all(has_one) or not any(has_one):
        return batch
    shared = dist.broadcast_object(None if batch is _END else batch, has_one.index(True))
    return shared if batch is _END else batch
