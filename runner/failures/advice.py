"""Advice on errors of torch that users meet: what they mean here, and which configuration key helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .origin import Origin

if TYPE_CHECKING:
    from ..run import Run


@dataclass(frozen=True)
class Failure:
    """An error with what is known of it.

    Attributes:
        run: the run that it ended.
        error: the error.
        origin: where it came from.
        kind: name of its class; for an error of a data worker, of the original one.
        text: its whole message; for an error of a data worker, the original one.
        found: groups of the pattern that its message matches.
    """

    run: Run
    error: BaseException
    origin: Origin
    kind: str
    text: str
    found: tuple[Any, ...] = ()


Advice = str | Callable[[Failure], str | None]

RULES: list[tuple[re.Pattern[str], Advice]] = []
"""Patterns of ``ErrorClass: message``, each with what to do; the first that matches and has an advice counts."""


def rule(pattern: str) -> Callable[[Advice], Advice]:
    """Register an advice, or a function that gives one, for messages that contain ``pattern``."""

    def add(advice: Advice) -> Advice:
        RULES.append((re.compile(pattern, re.DOTALL), advice))
        return advice

    return add


def advice_on(failure: Failure) -> str | None:
    """Return what to do about an error; None if there is nothing to add to its own message."""
    said = f"{failure.kind}: {failure.text}"
    for pattern, advice in RULES:
        if (match := pattern.search(said)) is None:
            continue
        if isinstance(advice, str):
            return advice
        known = Failure(failure.run, failure.error, failure.origin, failure.kind, failure.text, match.groups())
        if text := advice(known):
            return text
    return None
