"""Exceptions of flextrain. Every message is one line: where, what was given, what is allowed, the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .uncaught import show_in_one_line

if TYPE_CHECKING:
    from typing_extensions import Self

_KEY = re.compile(r"([A-Za-z_]\w*(?:\.\w+|\[\d+\])*): ")


class FlexTrainError(Exception):
    """Base class of all exceptions that flextrain defines; the interpreter shows one that nobody catches in one line."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new error."""
        show_in_one_line(FlexTrainError)
        return super().__new__(cls, *args, **kwargs)


class ConfigError(FlexTrainError, ValueError):
    """An invalid configuration; raised before any process group or model exists.

    The message begins with the key and a colon: ``custom_hooks[0].interval: ...``.
    """

    origin: str | None = None
    """Where the value was written, if the message says it: ``configs/base.py:12``."""

    @property
    def path(self) -> tuple[str | int, ...]:
        """The key as names and indices, ("custom_hooks", 0, "interval"); empty if the message begins with none."""
        found = _KEY.match(str(self))
        if found is None:
            return ()
        names = re.findall(r"[^.\[\]]+", found[1])
        return tuple(int(name) if name.isdecimal() else name for name in names)

    def say_where(self, origin: str) -> None:
        """Put ``origin`` in front of the message."""
        self.args = (f"{origin}: {self}",)
        self.origin = origin


class NonFiniteError(FlexTrainError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite, and ``env_cfg=dict(nonfinite="raise")`` is set."""


class DivergenceError(FlexTrainError, RuntimeError):
    """Processes that should hold replicas of a tensor hold different values; every process raises it."""


class DataError(FlexTrainError, ValueError):
    """A data file is damaged, or not what its source says; the message begins with the file and the sample."""


class LaunchError(FlexTrainError, RuntimeError):
    """The processes of a job could not connect to each other, or one of them failed."""


class StrategyError(FlexTrainError, RuntimeError):
    """A strategy does not support a request, or its methods were called in the wrong order."""


class CheckpointError(FlexTrainError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the object that loads it."""


class TrialPruned(FlexTrainError):  # noqa: N818 - searches call it so
    """A search has no use for this run, which has ended in order; see PruningHook."""


class StorageError(CheckpointError):
    """Storage failed while a checkpoint was written. If a save raises it, it does so on every process."""


def nearest(name: str, candidates: Iterable[object], closeness: float = 0.6) -> str | None:
    """The candidate spelled most like ``name``; None if none reaches ``closeness``, from 0 (any) to 1 (equal)."""
    # Keys of a user's mapping may be anything.
    folded = {candidate.lower(): candidate for candidate in candidates if isinstance(candidate, str)}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=closeness)
    return folded[match[0]] if match else None


def suggest(name: str, candidates: Iterable[object]) -> str:
    """The end ``, did you mean "x"?`` of an error about an unknown ``name``; empty if no candidate is close."""
    match = nearest(name, candidates)
    return f', did you mean "{match}"?' if match else ""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 epoch``, ``2 epochs``; ``plural`` if it is not the noun with an "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def one_of(candidates: Iterable[object]) -> str:
    """The allowed values as text: ``0, 1 or 2``."""
    words = [str(candidate) for candidate in candidates]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
