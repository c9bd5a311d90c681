"""Mask: which position attends to which, in a form of which every process can compute any tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sequence import Span


@dataclass(frozen=True)
class Rule:
    """Which position attends to which, by their distance alone.

    Args:
        causal: to itself and to earlier ones only.
        window: to fewer than this number of positions before it, itself included; if not ``causal``, to those at a
            distance of at most this number on both sides. None: to any number.
    """

    causal: bool
    window: int | None = None

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a boolean tensor, broadcast from the positions of queries and of keys."""
        allowed = key <= query if self.causal else (key == key) & (query == query)
        if self.window is not None:
            near = key > query - self.window if self.causal else (query - key).abs() <= self.window
            allowed = allowed & near
        return allowed

    def of_all(self, queries: Span, keys: Span) -> bool | None:
        """Return whether all of the ``queries`` attend to all of the ``keys`` (True), none to any (False), or some."""
        first, last = queries[0], queries[1] - 1
        start, end = keys[0], keys[1] - 1
        if self.causal and start > last:
            return False
        reach = None if self.window is None else self.window - 1 if self.causal else self.window
        if reach is not None and (first - end > reach or (not self.causal and start - last > reach)):
            return False
        if self.causal and end > first:
            return None
        if reach is not None and (last - start > reach or (not self.causal and end - first > reach)):
            return None
        return True


CAUSAL, FULL = Rule(True), Rule(False)


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule, and what the batch adds to it.

    Args:
        rule: by position.
        keys: (samples, length) of bool: positions to which none attends are False, such as padding. None: there are none.
        documents: (samples, length) of numbers: a position attends to those of its own document only. None: one document.
    """

    rule: Rule
    keys: Tensor | None = None
    documents: Tensor | None = None

    @property
    def by_rule(self) -> bool:
        """Whether the rule says all."""
        return self.keys is None and self.documents is None

    def tile(self, queries: Span, keys: Span, device: torch.device) -> Tensor | bool:
        """Return who attends to whom: all (True), none (False), or a boolean tensor (samples or 1, 1, queries, keys)."""
        found = self.rule.of_all(queries, keys)
        if found is False:
            return False
        allowed = None
        if found is None:
            rows = torch.arange(*queries, device=device)[:, None]
            allowed = self.rule.allows(rows, torch.arange(*keys, device=device))[None, None]
        if self.keys is not None:
            counted = self.keys[:, keys[0] : keys[1]].to(device)[:, None, None]
            allowed = counted if allowed is None else allowed & counted
        if self.documents is not None:
            of_query = self.documents[:, queries[0] : queries[1]].to(device)
            of_key = self.documents[:, keys[0] : keys[1]].to(device)
            same = (of_query[:, :, None] == of_key[:, None])[:, None]
            allowed = same if allowed is None else allowed & same
        return True if allowed is None else allowed
