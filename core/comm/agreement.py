"""What all processes have to have alike: a fingerprint is compared, and only if one differs is it looked for what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .collectives import get_world_size, side_group


@dataclass(frozen=True)
class Difference:
    """Where a process differs from rank 0.

    Attributes:
        name: of what differs first.
        rank: the first process that differs.
        first, other: what rank 0 and ``rank`` have; None: nothing of this name.
        is_order: both have all of the names, in another order; ``first`` and ``other`` are names then.
    """

    name: str
    rank: int
    first: str | None
    other: str | None
    is_order: bool = False

    def __str__(self) -> str:
        if self.is_order:
            return f"rank {self.rank} has {self.other} where rank 0 has {self.first}"
        if self.first is None or self.other is None:
            there, lacking = (0, self.rank) if self.other is None else (self.rank, 0)
            return f"{self.name}: is {self.first or self.other} on rank {there} and missing on rank {lacking}"
        return f"{self.name}: is {self.first} on rank 0 and {self.other} on rank {self.rank}"


def first_difference(own: Mapping[str, str]) -> Difference | None:
    """The first difference between the processes, the same on all; None if there is none. Every process must call it.

    One message of 16 bytes, and a second one with everything only if they differ.
    """
    size = get_world_size()
    if size == 1:
        return None
    items = list(own.items())
    digest = hashlib.blake2b(json.dumps(items).encode(), digest_size=16).digest()
    # The device is named, because a model may be under construction on another one by default.
    digests = [torch.empty(16, dtype=torch.uint8, device="cpu") for _ in range(size)]
    dist.all_gather(digests, torch.tensor(list(digest), dtype=torch.uint8, device="cpu"), group=side_group())
    if all(torch.equal(other, digests[0]) for other in digests):
        return None
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, items, group=side_group())
    rank, other = next((rank, found) for rank, found in enumerate(everyones) if found != everyones[0])
    return _between(dict(everyones[0]), dict(other), rank)


def _between(first: dict[str, str], other: dict[str, str], rank: int) -> Difference:
    for name, value in first.items():
        if other.get(name) != value:
            return Difference(name, rank, value, other.get(name))
    for name, value in other.items():
        if name not in first:
            return Difference(name, rank, None, value)
    names = next((a, b) for a, b in zip_longest(first, other) if a != b)
    return Difference(names[0], rank, *names, is_order=True)


def description(model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> dict[str, str]:
    """Of every parameter and buffer, by name and in order, what has to be the same on all processes.

    Args:
        shape_of: the shape of the whole parameter, where a process has a part of it.
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
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
