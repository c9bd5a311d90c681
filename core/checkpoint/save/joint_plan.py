"""Agree on the plan of a save: processes exchange hashes of what they offer, and only what differs, then plan alike.

Under FSDP over 4,096 processes, rank 0 gets a hash and the first rank of a mesh from each of them, and no list of tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ...comm.collectives import get_rank, get_world_size
from ...errors import CheckpointError
from ..participants import Participants, ranks_text
from .layout_rules import Kind
from .offer import Offer, offer_of, unpacked
from .planning import SharedPlan, plan_save


class _Alike(NamedTuple):
    """Ranks of the processes of one kind, and the first ranks of their meshes."""

    ranks: Sequence[int]
    firsts: Sequence[Sequence[int]]


def agree(participants: Participants, tensors: Mapping[str, Tensor]) -> SharedPlan:
    """The plan for saving the tensors of all processes; every process must call it.

    Raises:
        CheckpointError: on every process, if what they offer does not fit together.
    """
    own: list[Offer] = []

    def offer() -> tuple[bytes, tuple[int, ...]]:
        own[:] = [offer_of(tensors, get_rank(), get_world_size())]
        return own[0].digest, own[0].firsts

    alike = participants.round(offer, _kinds)
    offers = [own[0]] * len(alike)
    if len(alike) > 1:
        senders = [kind.ranks[0] for kind in alike]
        packed: list[bytes] = participants.ask(senders, lambda: zlib.compress(own[0].packed()), lambda sent: sent)
        offers = [unpacked(zlib.decompress(one)) for one in packed]
    kinds = [Kind(ranks, one, firsts) for (ranks, firsts), one in zip(alike, offers, strict=True)]
    plans: list[SharedPlan] = []

    def plan() -> str:
        plans[:] = [plan_save(kinds, get_world_size())]
        return plans[0].mark

    participants.round(plan, _check_same)
    return plans[0]


def _kinds(offered: list[tuple[bytes, tuple[int, ...]]]) -> list[_Alike]:
    """The kinds of processes, that of rank 0 first."""
    ranks: dict[bytes, list[int]] = {}
    firsts: dict[bytes, list[set[int]]] = {}
    for rank, (digest, own) in enumerate(offered):
        ranks.setdefault(digest, []).append(rank)
        known = firsts.setdefault(digest, [set() for _ in own])
        for found, first in zip(known, own, strict=True):
            found.add(first)
    return [_Alike(_compact(ranks[digest]), [_compact(sorted(found)) for found in firsts[digest]]) for digest in ranks]


def _compact(numbers: list[int]) -> Sequence[int]:
    """The numbers as a range, if they are evenly spaced: a message of any length otherwise."""
    if len(numbers) < 2:
        return numbers
    found = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])
    return found if list(found) == numbers else numbers


def _check_same(marks: list[str]) -> None:
    if strays := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
        raise CheckpointError(
            f"rank {ranks_text(strays)} plans another checkpoint than rank 0 from the same layouts; all "
            "processes need the same versions of flextrain and torch"
        )
