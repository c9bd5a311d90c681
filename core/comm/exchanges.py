"""Exchange values that most processes have alike: each sends a hash, and one process of each kind its value.

Gathering everything everywhere makes each process receive as much as there are processes, and all together the square of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..rehearsing import rehearsing
from .collectives import all_reduce, broadcast_object, gather_tensor, get_rank, get_world_size

T = TypeVar("T")


@dataclass(frozen=True)
class Kinds(Generic[T]):
    """The values of all processes.

    Attributes:
        values: the different ones, in the order of the first rank that has each.
        of_rank: number of the value of each rank.
    """

    values: Sequence[T]
    of_rank: Sequence[int]

    def by_rank(self) -> list[T]:
        """The value of each rank; ranks of one kind share the object."""
        return [self.values[number] for number in self.of_rank]


def all_same(digest: bytes, group: Any = None) -> bool:
    """Whether all processes give the same bytes, of which there are a multiple of 8; a collective of twice as many."""
    words = np.frombuffer(digest, dtype=np.int64)
    # Where the smallest is the largest too. The device is explicit, because the user may have set another default device.
    box = torch.tensor(np.concatenate([words, ~words]), device="cpu")
    all_reduce(box, "min", group)
    return torch.equal(box[: len(words)], ~box[len(words) :])


def gather_digests(digest: bytes, group: Any = None) -> list[bytes] | None:
    """The bytes of every process, equally many, by rank; on rank 0 alone."""
    found = gather_tensor(torch.tensor(list(digest), dtype=torch.uint8, device="cpu"), group)
    return None if found is None else [bytes(one.numpy()) for one in found]


def gather_kinds(own: T, digest: bytes, group: Any = None) -> Kinds[T]:
    """The values of all processes, on each of them; a collective.

    Args:
        own: the value of this process; it must be picklable.
        digest: a hash of it, of a multiple of 8 bytes.
        group: a gloo group of all processes.
    """
    if all_same(digest, group):
        return Kinds([own], [0] * get_world_size())
    numbers: list[int] = []
    firsts: list[int] = []
    if (digests := gather_digests(digest, group)) is not None:
        known: dict[bytes, int] = {}
        for rank, one in enumerate(digests):
            if one not in known:
                known[one] = len(known)
                firsts.append(rank)
            numbers.append(known[one])
    kind = np.min_scalar_type(len(firsts))  # a byte for each process, mostly
    firsts, packed = broadcast_object((firsts, np.array(numbers, dtype=kind)), group=group)
    values = broadcast_object(collect(firsts, own, group), group=group)
    assert values is not None
    return Kinds(values, packed.tolist())


def collect(ranks: Sequence[int], own: T, group: Any = None) -> list[T] | None:
    """The values of these processes, in their order, on rank 0; None elsewhere. The others send nothing.

    Args:
        ranks: the same on every process, which all call this.
        own: the value of this process; it must be picklable.
        group: a gloo group of all processes.
    """
    rank = get_rank()
    if rehearsing():
        return [own] * len(ranks) if rank == 0 else None
    if rank != 0:
        if rank in ranks:
            data = pickle.dumps(own)
            for message in (torch.tensor([len(data)], device="cpu"), _as_tensor(data)):
                dist.send(message, 0, group=group)
        return None
    return [own if sender == 0 else _received(sender, group) for sender in ranks]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _received(sender: int, group: Any) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, sender, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(data, sender, group=group)
    return pickle.loads(data.numpy().tobytes())
