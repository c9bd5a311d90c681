"""What flextrain raises. Every message is one line: where, what was given, what is allowed, the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlexTrainError(Exception):
    """Base of everything that flextrain raises on purpose."""


class ConfigError(FlexTrainError, ValueError):
    """A configuration that cannot mean anything; raised before any process group or model exists."""


class NonFiniteError(FlexTrainError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite, and ``env_cfg=dict(nonfinite="raise")`` was asked for."""


class LaunchError(FlexTrainError, RuntimeError):
    """The processes of a job could not find each other, or one of them failed."""


class StrategyError(FlexTrainError, RuntimeError):
    """A strategy cannot honour a request, or was used out of order."""


class CheckpointError(FlexTrainError, RuntimeError):
    """A checkpoint is missing, broken, or does not fit what it is loaded into."""


def nearest(name: str, candidates: Iterable[str], closeness: float = 0.6) -> str | None:
    """The candidate spelled most like ``name``, or None when none is close: from 0 for all to 1 for the same alone."""
    names = list(candidates)
    folded = {candidate.lower(): candidate for candidate in names}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=closeness)
    return folded[match[0]] if match else None


def suggest(name: str, candidates: Iterable[str]) -> str:
    """The tail ``, did you mean "x"?`` for an error about an unknown ``name``; empty when nothing is close."""
    match = nearest(name, candidates)
    return f', did you mean "{match}"?' if match else ""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and what it counts: ``1 epoch``, ``2 epochs``; ``plural`` where an "s" is not enough."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def one_of(candidates: Iterable[object]) -> str:
    """The allowed values as words: ``0, 1 or 2``."""
    words = [str(candidate) for candidate in candidates]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
