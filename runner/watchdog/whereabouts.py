"""Whereabouts: what the main thread of a process is doing, read off its stack by another thread."""

from __future__ import annotations

import dataclasses
import json
import sys
import sysconfig
import traceback
from types import FrameType
from typing import Any

from torch import nn

from ...core.torch_private import LOADER_ITERATOR, awaited_worker, compiles, last_collective
from ...core.uncaught import shown
from ..data import worker_stacks
from ..failures.origin import origin_of_frames
from .identity import state_of

_LIBRARY = __name__.partition(".")[0]
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
class Whereabouts:
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

    def text(self) -> str:
        """These values as a text, for ``read``."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Whereabouts:
        """The values that ``text`` gave."""
        return cls(**json.loads(text))


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
