"""Witness: finds losses and gradient norms that were not finite, with their iteration and rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .history import HistoryBuffer
from .message_hub import AVERAGED, MessageHub

_PREFIX = "train/"


class NonfiniteFigure(NamedTuple):
    """A scalar that is not finite."""

    iteration: int
    name: str
    value: float


@dataclass(frozen=True)
class Look:
    """The result of one look at the scalars that are new since the last look."""

    is_bad: bool
    """True if any scalar is not finite; on any rank, if ``is_agreed``."""
    is_agreed: bool
    """True if all processes know the same result; False if the model gives no loss to average."""
    own: tuple[NonfiniteFigure, ...]
    """This rank's own scalars that are not finite, oldest first."""
    iterations: int
    """Number of iterations since the last look."""
    forgotten: int
    """Number of the oldest of these iterations whose values are no longer kept."""


@dataclass
class _Watched:
    key: str
    history: HistoryBuffer
    seen: int = 0
    """Number of updates at the last look."""

    def new(self) -> list[Any]:
        """Return the values since the last look, newest first."""
        return self.history.newest(self.history.updates - self.seen)


class Witness:
    """Looks at losses and gradient norms in the message hub, after they were read for a log line.

    Losses are averaged over the processes at that time, so every process sees if one is not finite. The other scalars,
    gradient norms and parts of losses, are reduced with them as a single number.

    Args:
        hub: the message hub of the run.
        iteration: number of updates done.
        norms: also look at gradient norms; with loss scaling they may be infinite, and the update is then skipped.
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
        """Return what is new since the last look; the newest values belong to update number ``iteration``."""
        hub, several = self._hub, not self._hub.topology.is_alone
        own: list[NonfiniteFigure] = []
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
        """Return the histories to look at; the list is extended when the hub has more scalars."""
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

    def _not_finite(self, name: str, values: list[Any], iteration: int) -> Iterator[NonfiniteFigure]:
        for back, value in enumerate(values):
            if not math.isfinite(number := float(value)):
                yield NonfiniteFigure(iteration - back, name, number)


def _as_told(finding: NonfiniteFigure) -> tuple[int, bool, str]:
    """Return a sort key: oldest first, and losses before gradient norms, which follow from them."""
    return finding.iteration, "grad_norm" in finding.name, finding.name
