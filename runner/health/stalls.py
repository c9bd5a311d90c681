"""Stalls: all processes send a beat while they get on, and one of them notices when none does any more."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from ...core.base.errors import shown
from ...core.torch_compat.torch_private import LOADER_ITERATOR, awaited_worker, compiles, last_collective
from ..data import sample_seeds as worker_stacks
from .exchange import Exchange, Told, state_of
from .origin import origin_of_frames

# Stragglers: a process that takes far more time than the others for what no other process waits in.


LEAST_S = 60.0
"""Seconds that are compared at a time."""
LEAST_SHARE = 0.2
"""A straggler spends this share of all the time more than the median does."""
LEAST_RATIO = 1.5
"""It takes this many times as long as the median."""
_IN_A_ROW = 2
_LIBRARY = __name__.partition(".")[0]
_HOOKS = (f"{_LIBRARY}.runner.loops.", f"{_LIBRARY}.runner.hooks.dispatch")

PARTS = ("data loading", "hooks")
"""What is compared: both come before or after the collectives of an update, in which the processes wait for each other.
The time of a whole update is the same for all, because they wait."""


def part_of(thread: int) -> int | None:
    """The index in PARTS of what ``thread`` of this process is doing; None for anything else."""
    frame = sys._current_frames().get(thread)
    is_innermost = True
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("torch.distributed"):  # a hook that waits for other processes
            return None
        if name.startswith(f"{_LIBRARY}."):
            if name.startswith(f"{_LIBRARY}.runner.data."):
                return 0
            return 1 if name.startswith(_HOOKS) and not is_innermost else None
        is_innermost, frame = False, frame.f_back
    return None


Samples = tuple[int, ...]
"""How often a process was looked at, and how often it was then in each of PARTS."""


class Stragglers:
    """Compares what the processes were doing when they were looked at, five times a second; for the one that gathers.

    Because of the thresholds a warning means that the run would be faster by about a sixth or more without the
    difference. It comes once for a rank and a part, after two minutes.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._before: Sequence[Samples] = ()
        self._suspects: dict[tuple[int, int], int] = {}

    def compare(self, now: float, samples: Sequence[Samples]) -> list[tuple[int, str]]:
        """Return the stragglers that are new, each with what to say of it.

        Args:
            now: the time on this process's clock, in seconds.
            samples: of all processes.
        """
        if now - self._since < LEAST_S and self._before:
            return []
        before, self._before, self._since = self._before, samples, now
        if len(before) != len(samples):
            return []
        new = [tuple(b - a for a, b in zip(old, own, strict=True)) for old, own in zip(before, samples, strict=True)]
        if min(total for total, *_ in new) < LEAST_S:  # a process that was hardly looked at, or has begun a new run
            self._suspects.clear()
            return []
        return [found for part in range(len(PARTS)) for found in self._of_part(part, new)]

    def _of_part(self, part: int, new: Sequence[Samples]) -> list[tuple[int, str]]:
        shares = [own[1 + part] / own[0] for own in new]
        usual = statistics.median_low(shares)
        found = []
        for rank, share in enumerate(shares):
            key = rank, part
            is_far = share - usual > LEAST_SHARE and share > LEAST_RATIO * usual
            if not is_far and self._suspects.get(key, 0) < _IN_A_ROW:
                self._suspects.pop(key, None)
                continue
            self._suspects[key] = self._suspects.get(key, 0) + is_far
            if is_far and self._suspects[key] == _IN_A_ROW:
                found.append((rank, _said(part, share, usual)))
        return found


def _said(part: int, share: float, usual: float) -> str:
    times = f"{share / usual:.1f} times the median" if usual > 0.05 else f"{share:.0%} of the time, others hardly any,"
    return (
        f"takes {times} in {PARTS[part]} ({share:.0%} of the time, {usual:.0%} in the median): the others wait for it"
    )


def empty() -> Samples:
    """The samples of a process that nobody has looked at yet."""
    return (0,) * (1 + len(PARTS))


def with_one_more(samples: Samples, part: int | None) -> Samples:
    """The samples with another look at the process, which was in ``part``."""
    return (samples[0] + 1, *(count + (index == part) for index, count in enumerate(samples[1:])))


# Whereabouts: what the main thread of a process is doing, read off its stack by another thread.


_WAITING = (
    "torch.distributed",
    "torch.autograd.graph",  # backward runs in C++, with the collectives of the gradients
    "torch.nn.parallel.distributed",
    "deepspeed.comm",
    f"{_LIBRARY}.core.comm.",
)
_STANDARD = sysconfig.get_path("stdlib")
_LONGEST_STACK = 6000


@dataclasses.dataclass(frozen=True)
class Whereabouts(Told):
    """What a process was doing when it was asked.

    Attributes:
        rank: its rank.
        iteration: updates completed.
        words: the part of the run and the line of the user's code, such as `` in custom_hooks (Late.after_train_iter),
            train.py:31``; may be empty.
        waits: whether it is in a call that waits for other processes.
        collective: the last collective that it began, such as ``all_reduce number 41``; empty if nobody records them.
        stack: the stack of the main thread, as text.
        failed: the error that it is ending with; empty if there is none.
    """

    rank: int
    iteration: int
    words: str
    waits: bool
    collective: str = ""
    stack: str = ""
    failed: str = ""


def whereabouts(thread: int, rank: int, iteration: int, model: nn.Module | None, failed: str = "") -> Whereabouts:
    """Find out what ``thread`` of this process is doing; this never raises."""
    frames = _frames(thread)
    of_worker = ""
    try:
        origin = origin_of_frames(_inside(frames), model)
        if (worker := _awaited_worker(frames)) is not None:
            said, of_worker = ask_worker(*worker)
            origin.part = f"{origin.loader} ({said})"
        words = origin.words()
    except Exception as error:  # told instead: what the user's objects do when they are looked at must not end this
        words = f" ({type(error).__name__} while looking where)"
    lines = traceback.format_list(traceback.StackSummary.extract(iter(frames)))
    stack = "".join(lines)[-_LONGEST_STACK:] + of_worker
    return Whereabouts(rank, iteration, words, waits(frames), last_collective(), stack, failed)


def ask_worker(number: int, pid: int) -> tuple[str, str]:
    """Where the worker of a dataloader is, in words, and its stack, as far as it can be asked."""
    stack = worker_stacks.ask(pid)
    if (found := worker_stacks.source_in(stack)) is not None:
        file, line, function = found
        said = f"worker {number}, {function}, {shown(file, line)}"
    else:
        said = f"worker {number}, process {pid}, {state_of(pid)}"
    return said, f"Worker {number}, innermost first:\n{stack[:_LONGEST_STACK]}\n" if stack else ""


def _awaited_worker(frames: list[tuple[FrameType, int]]) -> tuple[int, int] | None:
    """Number and process of the worker whose batch a thread waits for."""
    for frame, _ in reversed(frames):
        own = frame.f_locals.get("self")
        if isinstance(own, LOADER_ITERATOR):
            return awaited_worker(own)
    return None


def waits(frames: list[tuple[FrameType, int]]) -> bool:
    """Whether the innermost function, other than one of Python's own library, waits for other processes."""
    for frame, _ in reversed(frames):
        if frame.f_code.co_filename.startswith((_STANDARD, "<")) and "site-packages" not in frame.f_code.co_filename:
            continue
        return _name(frame).startswith(_WAITING)
    return False


def is_compiling(thread: int) -> bool:
    """Whether ``thread`` of this process compiles a model, which takes minutes in which nothing else goes on."""
    return any(compiles(_name(frame), frame.f_code.co_name) for frame, _ in _frames(thread))


def innermost(thread: int) -> Any:
    """What changes when ``thread`` of this process goes on: its innermost function and instruction."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (id(frame.f_code), frame.f_lasti)


def waits_now(thread: int) -> bool:
    """Whether ``thread`` of this process waits for other processes."""
    return waits(_frames(thread))


def _frames(thread: int) -> list[tuple[FrameType, int]]:
    """The frames of a thread with the lines they are at, from the outermost on."""
    frame = sys._current_frames().get(thread)  # walk_stack(None) would be the caller's own stack
    return [] if frame is None else list(traceback.walk_stack(frame))[::-1]


def _inside(frames: list[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """The frames from the first of this library on: the line of the user's that calls the runner says nothing."""
    first = next((i for i, (frame, _) in enumerate(frames) if _name(frame).startswith(f"{_LIBRARY}.")), 0)
    return frames[first:]


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


# The verdict on a run that stands still: which rank it waits for, and what every rank is doing.


_MOST_GROUPS = 12


def verdict(
    seconds: float, reports: Mapping[int, Whereabouts], silent: Mapping[int, str], finished: Sequence[int] = ()
) -> str:
    """Say on one line whom a run waits for, and below it what every rank does.

    Args:
        seconds: how long nobody has got on.
        reports: those of the ranks that answer.
        silent: what is known of those that do not, such as "rank 1 (process 4711 on node2) is stopped (SIGSTOP)".
        finished: ranks that have left the run.
    """
    first = _culprits(reports, silent, finished)
    head = f"The run stands still for {seconds:.0f} s: {'; '.join(first)}"
    return "\n".join([head, *(f"  {line}" for line in _lines(reports, silent, finished) if line not in first)])


def _culprits(reports: Mapping[int, Whereabouts], silent: Mapping[int, str], finished: Sequence[int]) -> list[str]:
    """Say who keeps the others: whoever is not there, waits for nobody, is behind, or does what most do not."""
    if silent:
        return [*silent.values()]
    if ended := [report for report in reports.values() if report.failed]:
        return [f"{ranks([report.rank])} has failed, {report.failed}, and is still{report.words}" for report in ended]
    own = [report for report in reports.values() if not report.waits and report.rank not in finished]
    if finished:
        gone = f"{ranks(finished)} {'has' if len(finished) == 1 else 'have'} finished the run already"
        return [gone] if not own else [gone, *_groups(own, "waits for nobody")]
    if own and (len(own) < len(reports) or len(reports) == 1):
        return _groups(own, "waits for nobody")
    least = min(report.iteration for report in reports.values())
    behind = [report for report in reports.values() if report.iteration == least]
    if len(behind) < len(reports):
        return _groups(behind, "is behind the others")
    counts = collections.Counter(_doing(report) for report in reports.values())
    if len(counts) > 1 and len({report.collective for report in reports.values()}) > 1:
        return [f"the ranks wait in different calls: {', '.join(_groups(reports.values(), 'waits'))}"]
    if len(counts) > 1:
        usual = counts.most_common(1)[0]
        if usual[1] > len(reports) / 2:
            return _groups((r for r in reports.values() if _doing(r) != usual[0]), "is not where the others are")
        return [f"the ranks are in different calls: {', '.join(_groups(reports.values(), 'is'))}"]
    return [f"all ranks are at the same point,{next(iter(counts))}"]


def _lines(reports: Mapping[int, Whereabouts], silent: Mapping[int, str], finished: Sequence[int]) -> list[str]:
    waiting = [report for report in reports.values() if report.waits and report.rank not in finished]
    own = [report for report in reports.values() if not report.waits and report.rank not in finished]
    lines = [*silent.values(), *_groups(own, "waits for nobody"), *_groups(waiting, "waits for others")]
    more = len(lines) - _MOST_GROUPS
    return lines if more <= 0 else [*lines[:_MOST_GROUPS], f"and {more} more lines, see the log files of the ranks"]


def _groups(reports: Iterable[Whereabouts], does: str) -> list[str]:
    """Say what ranks do, with one text for all that do the same."""
    together: dict[tuple[int, str, str], list[int]] = {}
    for report in reports:
        together.setdefault((report.iteration, _doing(report), report.failed), []).append(report.rank)
    return [
        f"{ranks(members)} {_plural(does) if len(members) > 1 else does} in iteration {iteration + 1},{doing}{f', after {failed}' if failed else ''}"
        for (iteration, doing, failed), members in together.items()
    ]


def _plural(does: str) -> str:
    verb, _, rest = does.partition(" ")
    return f"{'are' if verb == 'is' else verb.removesuffix('s')} {rest}".rstrip()


def _doing(report: Whereabouts) -> str:
    return f"{report.words or ' at an unknown point'}{f' (last collective: {report.collective})' if report.collective else ''}"


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 7``."""
    found = sorted(numbers)
    spans: list[list[int]] = []
    for number in found:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(found) > 1 else ''} {said}"


# Pulse: whether this process is getting on, on a clock that stands still while the process is stopped.


_LONGEST_TICK_S = 2.0


class Clock:
    """Seconds that this process could run: a stopped or suspended one has not waited for anything.

    The method ``tick`` has to be called several times a second; what it finds missing does not count.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source, self._last = source, source()
        self.now = 0.0
        """The time, in seconds since this object was made."""

    def tick(self) -> float:
        """Go on, and return ``now``."""
        now = self._source()
        self.now += min(now - self._last, _LONGEST_TICK_S)
        self._last = now
        return self.now


class Age:
    """How long something has not changed, on a clock of this process: clocks of two machines are never compared."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._value: Hashable = None
        self._since = clock.now

    def note(self, value: Hashable) -> None:
        """Take what there is now."""
        if value != self._value:
            self._value, self._since = value, self._clock.now

    def restart(self) -> None:
        """Count from now on."""
        self._since = self._clock.now

    @property
    def seconds(self) -> float:
        """Seconds since the value changed."""
        return self._clock.now - self._since


@dataclasses.dataclass(frozen=True)
class Beat(Told):
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
