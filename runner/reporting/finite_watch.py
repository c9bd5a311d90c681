"""Witness: whether losses and gradient norms were finite since the last look, on which rank and in which iteration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .history import HistoryBuffer
from .message_hub import AVERAGED, MessageHub

_PREFIX = "train/"


class Finding(NamedTuple):
    """A figure that is not finite."""

    iteration: int
    name: str
    value: float


@dataclass(frozen=True)
class Look:
    """What the figures since the last look say."""

    is_bad: bool
    """Whether any is not finite; of any rank, where it is agreed on."""
    is_agreed: bool
    """Whether all ranks know the same; they do not where a model gives no loss to average."""
    own: tuple[Finding, ...]
    """What is not finite of this rank's own, oldest first."""
    iterations: int
    """How many there were."""
    forgotten: int
    """How many of the first of them are not kept any more."""


@dataclass
class _Watched:
    key: str
    history: HistoryBuffer
    seen: int = 0
    """Updates of it at the last look."""

    def new(self) -> list[Any]:
        """What came since, newest first."""
        return self.history.newest(self.history.updates - self.seen)


class Witness:
    """Looks at what the message hub has of losses and gradient norms, once that was read for a log line.

    Losses are averaged over the ranks for it, so that all see when one is not finite. What else is looked at, gradient
    norms and parts of losses, goes along with them as a single number.

    Args:
        hub: the run's.
        iteration: updates done.
        norms: look at gradient norms; under loss scaling they may be infinite, and the update is then left out.
    """

    def __init__(self, hub: MessageHub, iteration: int, norms: bool) -> None:
        self._hub, self._iteration = hub, iteration
        self._names = re.compile("loss|grad_norm" if norms else "loss")
        self._watched: list[_Watched] = []
        self._size = 0
        for watched in self._all():
            watched.seen = watched.history.updates
        hub.beside = self._others

    def look(self, iteration: int) -> Look:
        """What came since the last look, of which the last belongs to update number ``iteration``."""
        hub, several = self._hub, not self._hub.topology.is_alone
        own: list[Finding] = []
        is_agreed, is_bad, kept = not several, False, 0
        for watched in self._all():
            values = watched.new()
            watched.seen = watched.history.updates
            kept = max(kept, len(values))
            if several and watched.key == AVERAGED:
                is_agreed = True
                is_bad = bool(values) and not all(map(math.isfinite, (*map(float, values), hub.verdict.current())))
                values = watched.history.averaged[::-1] if is_bad else []
            own += self._not_finite(watched.key.removeprefix(_PREFIX), values, iteration)
        count, self._iteration = iteration - self._iteration, iteration
        if not (several and is_agreed):
            is_bad = bool(own)
        return Look(is_bad, is_agreed, tuple(sorted(own, key=_as_told)) if is_bad else (), count, count - kept)

    def _all(self) -> list[_Watched]:
        """The histories to look at, sorted out anew when there are more."""
        scalars = self._hub.log_scalars
        if len(scalars) != self._size:
            known = {watched.key for watched in self._watched}
            self._size = len(scalars)
            self._watched += [
                _Watched(key, history)
                for key, history in scalars.items()
                if key not in known and key.startswith(_PREFIX) and self._names.search(key)
            ]
        return self._watched

    def _others(self) -> list[Any]:
        return [value for watched in self._all() if watched.key != AVERAGED for value in watched.new()]

    def _not_finite(self, name: str, values: list[Any], iteration: int) -> Iterator[Finding]:
        for back, value in enumerate(values):
            if not math.isfinite(number := float(value)):
                yield Finding(iteration - back, name, number)


def _as_told(finding: Finding) -> tuple[int, bool, str]:
    """The oldest first, and losses before gradient norms, which follow from them."""
    return finding.iteration, "grad_norm" in finding.name, finding.name
