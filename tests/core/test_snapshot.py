"""Snapshot: objects hold again what they held, wherever Python lets them keep it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flextrain.core.base.snapshot import Snapshot


class Base:
    __slots__ = ("__dict__", "count")


class Slotted(Base):
    __slots__ = ("__private", "items", "unset")

    def __init__(self) -> None:
        self.count, self.items, self.__private, self.plain = 1, [1], torch.zeros(2), "before"

    def change(self) -> None:
        self.items.append(2)
        self.__private.add_(1)
        self.count, self.unset, self.plain = 2, "set", "after"
        self.items = [3]

    def held(self) -> list[Any]:
        return [self.count, self.items, self.__private.tolist(), hasattr(self, "unset"), self.plain]


@dataclasses.dataclass(slots=True)
class Tally:
    total: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


def test_slots_are_restored_also_those_of_bases_and_those_that_were_empty() -> None:
    one, before = Slotted(), Slotted().held()
    items = one.items
    snapshot = Snapshot([one])
    one.change()
    assert one.held() != before
    snapshot.restore()
    assert one.held() == before
    assert one.items is items


def test_a_deleted_slot_and_a_dataclass_inside_a_list() -> None:
    one, tally = Slotted(), Tally()
    snapshot = Snapshot([one, [tally]])
    del one.count
    tally.total += 5
    tally.seen.append(1)
    snapshot.restore()
    assert (one.count, tally) == (1, Tally())
