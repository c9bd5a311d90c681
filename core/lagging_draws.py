"""LaggingDraws: the state of torch's generator on the CPU while operations that draw from it are put off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import StrategyError
from .generator_marks_private import mark_of, marked

Draw = Callable[[], Any]
"""Draws what an operation that was put off draws, and drops it."""


@dataclass
class _Series:
    """Operations that draw one after the other, and the state before the first."""

    start: Tensor
    draws: list[Draw] = field(default_factory=list)


class LaggingDraws:
    """Knows from which state each series of operations draws that was put off.

    While a series is open, the generator has a mark in place of its state. So it is seen when a constructor seeds the
    generator, or sets its state, also to one that it has read before.

    Args:
        end: called with the state before the first operation of a series when the generator goes on from another state.
    """

    def __init__(self, end: Callable[[Tensor], None]) -> None:
        self._end = end
        self._series: _Series | None = None
        self._marks: list[tuple[_Series, int]] = []

    @property
    def start(self) -> Tensor | None:
        """The state before the first operation of the open series."""
        return None if self._series is None else self._series.start

    def forget(self) -> None:
        """Begin a new series with the next operation, from the state that the generator has then."""
        self._series = None

    def put_off(self, draw: Draw) -> None:
        """Note an operation that draws and is put off."""
        self.follow()
        if self._series is None:
            self._series = _Series(torch.get_rng_state())
        self._series.draws.append(draw)
        self._marks.append((self._series, len(self._series.draws)))
        self._mark()

    def catch_up(self) -> None:
        """Advance the generator as if nothing had been put off."""
        self.follow()
        if (series := self._series) is not None:
            self._go_on(self._after(series, len(series.draws)))

    def follow(self) -> None:
        """Take note if the generator was given another state."""
        state = torch.get_rng_state()
        number = mark_of(state)
        if number is None:
            if self._series is not None:
                self._go_on(state)
        elif self._series is None or number != len(self._marks) - 1:
            self._go_on(self.meant_by(state))

    def meant_by(self, state: Tensor) -> Tensor:
        """Return a state, computed if it is a mark.

        Raises:
            StrategyError: it is the mark of another model.
        """
        if (number := mark_of(state)) is None:
            return state
        if number >= len(self._marks):
            raise StrategyError(
                "model: sets a state of torch's generator that the constructor of another model has read; give the model as "
                "an instance"
            )
        return self._after(*self._marks[number])

    def leave(self) -> None:
        """Give the generator the state before the open series, for code outside of the construction."""
        self.follow()
        if self._series is not None:
            torch.set_rng_state(self._series.start)

    def enter(self) -> None:
        """Begin again after ``leave``."""
        if self._series is not None:
            if torch.equal(torch.get_rng_state(), self._series.start):
                self._mark()
            else:
                self._go_on(torch.get_rng_state())

    def _mark(self) -> None:
        assert self._series is not None
        torch.set_rng_state(marked(self._series.start, len(self._marks) - 1))

    def _go_on(self, state: Tensor) -> None:
        if self._series is not None:
            self._end(self._series.start)
        self._series = None
        torch.set_rng_state(state)

    def _after(self, series: _Series, count: int) -> Tensor:
        """The state after some operations of a series; the generator is left anywhere."""
        torch.set_rng_state(series.start)
        for draw in series.draws[:count]:
            draw()
        return torch.get_rng_state()
