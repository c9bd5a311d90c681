"""ModelOutline: how many parameters the parts of a model have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

MOST_ROWS = 12
_LARGE = 0.5
"""A part with a larger share of the parameters is shown by its own parts, if there is room."""
_SEVERAL = 3
"""Blocks of one class in a row from which on they share a row."""


@dataclass(frozen=True)
class ModelPart:
    """A module of a model, or several equal ones in a row.

    Attributes:
        name: in the model; ``blocks.0-11`` for several; empty for the model itself.
        kind: the class; ``12 x Block`` for several.
        total: number of parameters; what modules share belongs to the first of them.
        trained: those of them that require a gradient.
    """

    name: str
    kind: str
    total: int
    trained: int
    is_group: bool = False


@dataclass(frozen=True)
class ModelOutline:
    """The parts of a model, the whole of it, and what each transform has changed in it, by the transform's name."""

    parts: tuple[ModelPart, ...]
    whole: ModelPart
    transforms: tuple[tuple[str, str], ...] = ()


def outline(
    model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]], transforms: tuple[tuple[str, str], ...] = ()
) -> ModelOutline:
    """Return the parts of a model by their number of parameters, at most twelve.

    Args:
        model: a model that no strategy has set up yet, because a process may have a part of it afterwards.
        shape_of: returns the whole shape of a parameter, which may be sharded already.
        transforms: what each transform has changed, by its name.
    """
    counts: dict[str, tuple[int, int]] = {"": (0, 0)}
    for name, parameter in model.named_parameters():
        if is_lazy(cast(Any, parameter)):  # which set-up refuses, with what to do
            continue
        number = math.prod(shape_of(parameter))
        path = name.split(".")
        for prefix in (".".join(path[:depth]) for depth in range(len(path))):
            total, trained = counts.get(prefix, (0, 0))
            counts[prefix] = total + number, trained + (number if parameter.requires_grad else 0)
    whole = ModelPart("", type(model).__name__, *counts[""])
    rows = [whole]
    while True:
        largest = max(rows, key=lambda row: (not row.is_group, row.total))
        if largest.is_group or (len(rows) > 1 and largest.total <= _LARGE * whole.total):
            break
        inner = _inside(model, largest, counts)
        if len(inner) < 1 or inner == [largest] or (len(rows) > 1 and len(rows) + len(inner) - 1 > MOST_ROWS):
            break
        index = rows.index(largest)
        rows[index : index + 1] = inner
    return ModelOutline(tuple(_shortened([row for row in rows if row is not whole])), whole, transforms)


def _inside(model: nn.Module, part: ModelPart, counts: dict[str, tuple[int, int]]) -> list[ModelPart]:
    """The modules directly in a part that have parameters, and the part's own parameters; empty if it has no modules."""
    module, prefix = model.get_submodule(part.name), f"{part.name}." if part.name else ""
    found = [
        ModelPart(prefix + name, type(child).__name__, *counts[prefix + name])
        for name, child in module.named_children()
        if prefix + name in counts
    ]
    if not found:
        return []
    own = part.total - sum(each.total for each in found), part.trained - sum(each.trained for each in found)
    rest = [ModelPart(f"{part.name} (own)".strip(), part.kind, *own, is_group=True)] if own[0] else []
    return [*rest, *_grouped(found)]


def _grouped(parts: Sequence[ModelPart]) -> Iterator[ModelPart]:
    """Yield the parts, those of one class whose names are numbers in a row as one."""
    for (is_number, kind), members in groupby(parts, lambda part: (part.name.rpartition(".")[2].isdigit(), part.kind)):
        same = list(members)
        if not is_number or len(same) < _SEVERAL:
            yield from same
            continue
        last = same[-1].name.rpartition(".")[2]
        total, trained = sum(part.total for part in same), sum(part.trained for part in same)
        yield ModelPart(f"{same[0].name}-{last}", f"{len(same)} x {kind}", total, trained, is_group=True)


def _shortened(rows: list[ModelPart]) -> list[ModelPart]:
    if len(rows) <= MOST_ROWS:
        return rows
    kept = sorted(rows, key=lambda row: row.total, reverse=True)[: MOST_ROWS - 1]
    others = [row for row in rows if row not in kept]
    rest = replace(
        others[0],
        name=f"{len(others)} others",
        kind="",
        total=sum(row.total for row in others),
        trained=sum(row.trained for row in others),
    )
    return [*(row for row in rows if row in kept), rest]
