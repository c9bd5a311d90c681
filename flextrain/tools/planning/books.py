"""Books of one update, and those of an update with more equal micro-batches, reckoned from a few."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core.torch_private import tree_flatten
from .plan import Kind, Moment, Phase, Traffic, Work

EXECUTED = (2, 3, 4)
"""Numbers of micro-batches of the updates from which one with more is reckoned. The first micro-batch finds no gradients and
the last one reduces them; those between are alike."""
REPEATED = 8
"""From so many micro-batches on, an update is reckoned."""

_OF_LOSSES = 1024
"""Bytes that a micro-batch may leave until the update: its loss and other values to log."""

_Numbers = Mapping[Any, Sequence[float]]
_Memory = Mapping[Kind, int]


@dataclass(frozen=True)
class Books:
    """What one update needed.

    Attributes:
        traffic: calls, payload, bytes sent inside and between, by (collective, axis, ranks, phase).
        work: operations, floating-point operations and bytes moved, by (phase, dtype, whether they are products).
        moments: the memory over the update.
        peak: the moment with the most memory.
        between_updates: bytes by kind at its end.
    """

    traffic: _Numbers
    work: _Numbers
    moments: list[Moment]
    peak: Moment
    between_updates: dict[Kind, int]

    def as_traffic(self) -> list[Traffic]:
        """The collectives of the update."""
        return [
            Traffic(collective, axis, count, int(calls), int(payload), round(inside), round(between), phase)
            for (collective, axis, count, phase), (calls, payload, inside, between) in self.traffic.items()
        ]

    def as_work(self) -> list[Work]:
        """The computation of the update."""
        found: list[Work] = []
        key: tuple[Phase, str, bool]
        for key, (operations, flops, moved) in self.work.items():
            phase, dtype, is_matrix = key
            kind: Any = "matrix" if is_matrix else "other"
            found.append(Work(phase, dtype, kind, int(operations), int(flops), int(moved)))
        return found


def are_alike(window: Sequence[Any]) -> bool:
    """Whether all micro-batches have the same structure, and tensors of the same shapes and dtypes."""
    first, *others = map(_form, window)
    return first is not None and all(other == first for other in others)


def _form(batch: Any) -> Hashable:
    found: list[Hashable] = []
    if (
        isinstance(batch, dict) and type(batch) is not dict
    ):  # what it knows of itself, such as whether any target counts
        found += [(key, value) for key, value in vars(batch).items() if isinstance(value, (bool, int, str))]
        batch = dict(batch)
    leaves, structure = tree_flatten(batch)
    found.append(str(structure))
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype))
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            found.append((type(leaf), leaf))
        else:
            return None  # nobody knows what a model makes of it
    return tuple(found)


def reckoned(first: Books, few: Sequence[Books], count: int) -> Books | None:
    """Return the books of an update of ``count`` micro-batches; None if it does not follow from those of few.

    Args:
        first: of the first update, with ``EXECUTED[0]`` micro-batches, which creates the optimizer's state. Its peak may be
            higher.
        few: of the updates after it, with ``EXECUTED`` micro-batches. All of them have the inputs of ``count``.
    """
    one, two, three = few
    more = count - EXECUTED[-1]
    traffic = _extended(one.traffic, two.traffic, three.traffic, more)
    work = _extended(one.work, two.work, three.work, more)
    each = _growth(*(books.peak.by_kind for books in few))
    at_the_end = _growth(*(books.between_updates for books in few))
    if traffic is None or work is None or each is None or at_the_end is None:
        return None
    # Of equal ones the later: in the first update, nobody has said yet what the new state of the optimizer is.
    peaks = (_later(three.peak, each, more), _later(first.peak, each, count - EXECUTED[0]))
    return Books(
        traffic,
        work,
        [_later(moment, each, more) for moment in three.moments],
        max(peaks, key=lambda peak: peak.total),
        _grown(three.between_updates, at_the_end, more),
    )


def _growth(one: _Memory, two: _Memory, three: _Memory) -> dict[Kind, int] | None:
    """The bytes by which memory grows with each micro-batch; None if it does not grow evenly, or by more than losses."""
    found: dict[Kind, int] = {}
    for kind in {**one, **two, **three}:
        step = three.get(kind, 0) - two.get(kind, 0)
        if step != two.get(kind, 0) - one.get(kind, 0) or abs(step) > _OF_LOSSES:
            return None
        found[kind] = step
    return found


def _extended(one: _Numbers, two: _Numbers, three: _Numbers, more: int) -> _Numbers | None:
    if not one.keys() == two.keys() == three.keys():
        return None
    found: dict[Any, list[float]] = {}
    for key, values in three.items():
        steps = [c - b for b, c in zip(two[key], values, strict=True)]
        before = [b - a for a, b in zip(one[key], two[key], strict=True)]
        if not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-3) for a, b in zip(before, steps, strict=True)):
            return None
        found[key] = [value + more * step for value, step in zip(values, steps, strict=True)]
    return found


def _grown(by_kind: _Memory, each: _Memory, times: int) -> dict[Kind, int]:
    kinds = {**by_kind, **each}
    return {kind: size for kind in kinds if (size := by_kind.get(kind, 0) + times * each.get(kind, 0))}


def _later(moment: Moment, each: _Memory, times: int) -> Moment:
    """A moment after more micro-batches."""
    by_kind = _grown(moment.by_kind, each, times)
    return dataclasses.replace(moment, total=moment.total + times * sum(each.values()), by_kind=by_kind)
