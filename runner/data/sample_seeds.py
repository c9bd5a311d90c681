"""Seeds of samples: random numbers for a sample depend on the run's seed, the epoch and the sample's position in it.

So a sample's augmentation does not depend on the process or worker that reads it, on the batch size or on resuming. A
dataset that never draws random numbers is only watched, which costs a few microseconds per batch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, get_worker_info

from ...core.base.errors import DataError
from ...core.comm.topology import process_shard, tell_worker
from ...core.random.generators import Watch, nth_seed, seed_generators
from ..signals import Outliving, is_caught
from .samplers import tell_epoch
from .streams.divided_streams import original

# Stacks of the workers of data loaders: a worker that is stuck can still be asked where.


_FILE = "flextrain-stack"
_BEGINS = "Stack (most recent call first):"
_OUTERMOST = " in _worker_loop\n"
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_ROOT = Path(__file__).parents[2]
_OWN = (f"{_ROOT / 'runner'}{os.sep}", f"{_ROOT / 'core'}{os.sep}")
_NAP_S = 0.02


def answer() -> None:
    """Let this worker write its stack, also from C code, when ``ask`` sends it a signal; nothing where that cannot be.

    The file is in memory and ends with the worker; ``ask`` finds it among the worker's open files.
    """
    if sys.platform != "linux" or (number := _signal()) is None:
        return
    if signal.getsignal(number) is signal.SIG_DFL and not is_caught(number):
        faulthandler.register(number, file=os.memfd_create(_FILE), all_threads=False)


def ask(pid: int, patience_s: float = 1.0) -> str:
    """Return the stack of a worker of this process, innermost line first; empty if it does not answer in time."""
    file, number = _file_of(pid), _signal()
    if file is None or number is None:
        return ""
    deadline, before = time.monotonic() + patience_s, ""
    try:
        if not is_caught(number, pid):  # the signal would end it
            return ""
        os.kill(pid, number)
        while time.monotonic() < deadline:
            time.sleep(_NAP_S)
            if (text := file.read_text(errors="replace")) and text == before:  # it is written line by line
                break
            before = text
    except OSError:  # it has ended
        return ""
    inside, found, _ = before.rpartition(_BEGINS)[2].partition(_OUTERMOST)
    # What is outside of it in a forked worker is the stack of the process that forked it.
    return f"{inside}{found}".strip("\n") if found else ""


def source_in(stack: str) -> tuple[str, int, str] | None:
    """File, line and function of the innermost code of the user's in a stack that ``ask`` returned; None if there is none."""
    lines = [(file, int(line), function) for file, line, function in _LINE.findall(stack)]
    others = [found for found in lines if not found[0].startswith((*_OWN, "<")) and "/torch/" not in found[0]]
    own = [found for found in others if not found[0].startswith(_STANDARD) and "/site-packages/" not in found[0]]
    packages = [found for found in others if "/site-packages/" in found[0]]
    return next(iter(own or packages), None)


def _signal() -> int | None:
    """A signal that neither Python nor torch uses."""
    return None if sys.platform != "linux" else signal.SIGRTMAX - 7


def _file_of(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(file.readlink()).startswith(f"/memfd:{_FILE}"):
                    return file
    return None


class Turn(NamedTuple):
    """The indices of the batch to read next, with its position in the epoch."""

    seed: int
    """Seed of the epoch."""
    epoch: int
    position: int
    """Place of the first sample in the epoch, over all processes."""
    stride: int
    """Distance between the positions of two samples."""
    indices: Any
    """Indices of the batch; a single index if there is no batch."""


class SeededDataset(Dataset[Any]):
    """A dataset of batches: ``dataset[turn]`` reads and collates one, with the generators seeded for every sample.

    The generators of Python, NumPy and torch on the CPU are seeded; their former state is restored afterwards. A
    dataset with ``__getitems__`` is seeded once per batch, as the collate function is.

    Args:
        dataset: the user's dataset.
        collate: function that makes a batch from a list of samples.
        in_batches: True if a turn has a list of indices; otherwise it has one index, and ``collate`` gets its sample.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], in_batches: bool) -> None:
        self.dataset, self.collate, self.in_batches = dataset, collate, in_batches
        self.epoch: int | None = None
        self._at_once = in_batches and _reads_at_once(dataset)
        self._watch: Watch | None = None
        # True if reading draws random numbers; None until a batch has been read.
        self._draws: bool | None = None

    def __getitem__(self, turn: Turn) -> Any:
        try:
            if turn.epoch != self.epoch:
                tell_epoch(self.dataset, turn.epoch)  # for the copy in a worker that is kept over epochs
                self.epoch = turn.epoch
            self._watch = watch = self._watch or Watch()
            if self._draws is False:
                with watch:
                    batch = self._read(turn.indices)
                if not watch.drew:
                    return batch
                self._draws = True  # from now on; this batch is read again with seeds
            with watch:
                return self._draw(turn, watch)
        except Exception as error:
            raise _of_samples(error, self.dataset, turn.indices)  # noqa: B904 - it is that error, or has it as its cause

    # Without map, which would end at a StopIteration of the dataset with the samples before it.
    def _read(self, indices: Any) -> Any:
        if self._at_once:
            return self.collate(self.dataset.__getitems__(indices))
        dataset = self.dataset
        return self.collate([dataset[index] for index in indices] if self.in_batches else dataset[indices])

    def _draw(self, turn: Turn, watch: Watch) -> Any:
        """Read a batch with seeds; for the first one, find out whether the seeds were needed."""
        if self._at_once:
            samples = self._seeded(turn, 2 * turn.position, watch, self.dataset.__getitems__, turn.indices)
        elif self.in_batches:
            positions = range(turn.position, turn.position + turn.stride * len(turn.indices), turn.stride)
            read = self.dataset.__getitem__
            samples = [
                self._seeded(turn, 2 * position, watch, read, index)
                for position, index in zip(positions, turn.indices, strict=True)
            ]
        else:
            samples = self._seeded(turn, 2 * turn.position, watch, self.dataset.__getitem__, turn.indices)
        batch = self._seeded(turn, 2 * turn.position + 1, watch, self.collate, samples)
        self._draws = bool(self._draws)
        return batch

    def _seeded(self, turn: Turn, number: int, watch: Watch, read: Callable[[Any], Any], what: Any) -> Any:
        seed_generators(nth_seed(turn.seed, number))
        if self._draws is not None:
            return read(what)
        watch.mark()
        found = read(what)
        if watch.moved():
            self._draws = True
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None}  # belongs to this process


class SeededStream(IterableDataset[Any]):
    """A stream for worker processes: its random numbers start again in every epoch, also in persistent workers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # This tensor is shared with the workers.
        self._begins: Tensor = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, seed: int, epoch: int) -> None:
        """Set the next epoch, and the seed from which workers derive their own."""
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.Generator().manual_seed(seed))
        self._begins[0], self._begins[1] = drawn, epoch
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        base, epoch = self._begins.tolist()
        if epoch != self.epoch:
            tell_epoch(self.dataset, epoch)
            self.epoch = epoch
        info = get_worker_info()
        worker = info.id if info else 0
        # torch gives the same seeds to new workers.
        random.seed(base + worker)
        np.random.seed(np.random.SeedSequence([worker, base % 2**32, base >> 32, 0]).generate_state(4))
        torch.manual_seed(base + worker)
        return iter(self.dataset)


class CollateOfStream:
    """A stream's collate function, of which a StopIteration is an error, and not the end of the stream."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except StopIteration as error:
            name = getattr(self.collate, "__name__", type(self.collate).__name__)
            raise DataError(f"{name}: raised StopIteration, as next() does at an end; give next() a default") from error


class WorkerInit:
    """The worker_init_fn: restores ``dataset`` of the worker info to the user's, then calls the user's function.

    The worker goes on for a while after the signals that end a run, whose last update needs its batches. If it is stuck,
    the watchdog can ask it where. What a forked worker inherits is never collected there: process groups that nobody refers
    to any more would wait for threads that only the parent has, and the worker would crash.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self.function = function
        self._outliving = Outliving()
        self._shard: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is no fork does not know the run.
        return {**self.__dict__, "_shard": process_shard()}

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._shard is not None:
            tell_worker(self._shard)
        self._outliving.begin()
        answer()
        info: Any = get_worker_info()
        dataset = info.dataset
        if isinstance(dataset, (SeededDataset, SeededStream)):
            dataset = dataset.dataset
        object.__setattr__(info, "dataset", original(dataset))  # torch forbids a normal assignment
        if self.function is not None:
            self.function(worker)


def _of_samples(error: Exception, dataset: Any, indices: Any) -> Exception:
    """Return the error, with a note that names the samples; for a StopIteration, which would end the epoch, another one."""
    if not isinstance(error, StopIteration):
        if hasattr(error, "add_note"):  # Python 3.11; a worker sends notes to the training process
            error.add_note(samples_in_words(indices))
        return error
    found = DataError(
        f"{type(dataset).__name__} or its collate_fn: raised StopIteration, as next() does at an end, at "
        f"{samples_in_words(indices)}; give next() a default"
    )
    found.__cause__ = error
    return found


def samples_in_words(indices: Any) -> str:
    """Name the samples of a batch by their indices, for messages."""
    if not isinstance(indices, (list, tuple)):
        return f"sample {indices} of the dataset"
    return f"samples {', '.join(map(str, indices[:16]))}{', ...' if len(indices) > 16 else ''} of the dataset"


def order_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's order for other samplers; never change it, because old checkpoints rely on it."""
    return seed + 1_000_003 * (epoch + 1)


def as_read(batch: Any) -> Any:
    """Return the batch unchanged, because SeededDataset has collated it."""
    return batch


def _reads_at_once(dataset: Any) -> bool:
    """True if a dataset reads several samples with its own method; torch's wrappers do if their dataset does."""
    own = getattr(type(dataset), "__getitems__", None)
    if own is Subset.__getitems__:
        return _reads_at_once(dataset.dataset)
    if own is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(map(_reads_at_once, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))
