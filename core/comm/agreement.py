"""Compare names and values over all processes: first by digests, and only if those differ by everything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import counted
from ..rehearsing import rehearsing
from ..torch_private import gradient_hooks
from .collectives import broadcast_object, get_world_size, side_group
from .exchanges import all_same, collect, gather_digests


@dataclass(frozen=True)
class Difference:
    """The first item in which a process differs from the first process of its kind.

    Attributes:
        name: name of the first item that differs.
        rank: the first process that differs.
        first, other: the values on ``first_rank`` and on ``rank``; None: no item of this name.
        is_order: both have the same names in a different order; ``first`` and ``other`` are names then.
        first_rank: the process that ``rank`` is compared with.
    """

    name: str
    rank: int
    first: str | None
    other: str | None
    is_order: bool = False
    first_rank: int = 0

    def __str__(self) -> str:
        if self.is_order:
            return f"rank {self.rank} has {self.other} where rank {self.first_rank} has {self.first}"
        if self.first is None or self.other is None:
            there, lacking = (self.first_rank, self.rank) if self.other is None else (self.rank, self.first_rank)
            return f"{self.name}: is {self.first or self.other} on rank {there} and missing on rank {lacking}"
        return f"{self.name}: is {self.first} on rank {self.first_rank} and {self.other} on rank {self.rank}"


def first_difference(own: Mapping[str, str], kind: str = "") -> Difference | None:
    """Return the first difference between the processes, the same one on each; None without any. A collective.

    It sends 64 bytes, and items of two processes only if there is a difference.

    Args:
        own: the values of this process, by name.
        kind: processes are compared only with those of the same kind, each with the first of them.
    """
    size = get_world_size()
    if size == 1 or rehearsing():
        return None
    items, group = list(own.items()), side_group()
    digest = _digest(kind) + _digest(items)
    if all_same(digest, group):
        return None
    pair = broadcast_object(_first_stray(gather_digests(digest, group)), group=group)
    if pair is None:
        return None
    found = collect(pair, items, group)
    return broadcast_object(
        None if found is None else _between(dict(found[0]), dict(found[1]), *reversed(pair)), group=group
    )


def _first_stray(digests: list[bytes] | None) -> tuple[int, int] | None:
    """The first process of a kind, and the first rank that differs from that of its kind; None: there is none."""
    firsts: dict[bytes, int] = {}
    for rank, digest in enumerate(digests or ()):
        first = firsts.setdefault(digest[:16], rank)
        if digests is not None and digest != digests[first]:
            return first, rank
    return None


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _between(first: dict[str, str], other: dict[str, str], rank: int, first_rank: int) -> Difference:
    for name, value in first.items():
        if other.get(name) != value:
            return Difference(name, rank, value, other.get(name), first_rank=first_rank)
    for name, value in other.items():
        if name not in first:
            return Difference(name, rank, None, value, first_rank=first_rank)
    names = next((a, b) for a, b in zip_longest(first, other) if a != b)
    return Difference(names[0], rank, *names, is_order=True, first_rank=first_rank)


def description(model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> dict[str, str]:
    """Describe every parameter and buffer, by name and in order, by what must be the same on all processes.

    Args:
        shape_of: returns the shape of the whole parameter, of which a process may hold a shard.
    """
    found, names = {}, dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = names.setdefault(id(parameter), name)
        found[name] = _form(parameter, shape_of) if tied == name else f"tied to {tied}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        tied = names.setdefault(id(buffer), name)
        found[name] = f"buffer {_form(buffer, shape_of)}" if tied == name else f"tied to {tied}"
    return found


def _form(tensor: Tensor, shape_of: Callable[[Tensor], Sequence[int]]) -> str:
    if is_lazy(tensor):
        return "not initialised"
    shape = "x".join(map(str, shape_of(tensor))) or "scalar"
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    hooks = f", {counted(n, 'gradient hook')}" if (n := gradient_hooks(tensor)) else ""
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}{hooks}"
