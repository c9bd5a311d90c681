"""Masks over a sequence that several processes share: which position attends to which, as blocks or as tiles of a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from ....core.base.errors import StrategyError
from ....core.torch_compat.torch_private import has_values
from .batches import Span


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

TILE = 1024
"""Positions of queries, and of keys, whose scores are in memory at the same time."""
SHORTEST = 128
"""Positions of a document, on average, from which on each is computed for itself: a call for fewer costs more than a mask."""


@dataclass(frozen=True)
class AttentionBlock:
    """Queries of this process and keys of another one, of which some attend to some.

    Args:
        rows, columns: the local indices of queries and of keys.
        allowed: who attends to whom: all (True), none (False, beside ``alone``), or a boolean tensor (samples or 1, 1, queries,
            keys).
        is_causal: as ``scaled_dot_product_attention`` has it; there are as many queries as keys, and ``allowed`` is True.
        alone: (samples, 1, queries, 1) of bool: those whose weights are equal for all keys; None: none.
        sample: the only sample; None: all.
        distance: of the first key from the first query, in positions of the sequence; the others follow them, if it is a tile.
    """

    rows: Span
    columns: Span
    allowed: Tensor | bool = True
    is_causal: bool = False
    sample: int | None = None
    alone: Tensor | None = None
    distance: int = 0

    @property
    def takes_kernel(self) -> bool:
        """Whether a kernel without a mask can compute it. Torch gives a single key to no kernel of cuDNN, whose backward may refuse it."""
        return self.allowed is True and self.columns[1] - self.columns[0] != 1

    def of_rows(self, tensor: Tensor) -> Tensor:
        """A view of the rows of a tensor (samples, heads, queries, ...)."""
        return self._cut(tensor, self.rows)

    def of_columns(self, tensor: Tensor) -> Tensor:
        """A view of the columns of a tensor (samples, heads, keys, ...)."""
        return self._cut(tensor, self.columns)

    def _cut(self, tensor: Tensor, span: Span) -> Tensor:
        tensor = tensor if self.sample is None else tensor.narrow(0, self.sample, 1)
        return tensor if span == (0, tensor.shape[2]) else tensor.narrow(2, span[0], span[1] - span[0])


@dataclass(frozen=True)
class DocumentSpans:
    """The positions of a document, and those of the keys in it to which any attends."""

    queries: Span
    keys: Span


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule, and what the batch adds to it.

    Args:
        rule: by position.
        keys: (samples, length) of bool: positions to which none attends are False, such as padding. None: there are none.
        documents: (samples, length) of numbers: a position attends to those of its own document only. None: one document.
        averages: a position that attends to none has equal weights for all, as in models' own attention, and not zeros.
        length: number of positions; None: it is not known.
        queries: number of positions of queries that are of another sequence than keys, as a decoder's are; None: they are of the same.
    """

    rule: Rule
    keys: Tensor | None = None
    documents: Tensor | None = None
    averages: bool = False
    length: int | None = None
    queries: int | None = None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            _refuse(f"asks for {name} of")
        return self.__getattribute__(name)  # raises what it has raised

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("takes a part of")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise StrategyError: a function of torch was given a mask."""
        _refuse(f"calls {getattr(function, '__name__', function)} with")

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

    @cached_property
    def is_in_blocks(self) -> bool:
        """Whether ``blocks`` has no mask: there is no window, and what the batch adds are not too many documents."""
        return self.rule.window is None and (self.by_rule or self._by_sample is not None)

    def blocks(self, own: Sequence[Span], others: Sequence[Span], device: torch.device) -> Iterator[AttentionBlock]:
        """The blocks in which some query of the spans ``own`` attends to some key of the spans ``others``.

        Tiles of a mask, unless it ``is_in_blocks``.
        """
        if not self.is_in_blocks:
            yield from self.tiles(own, others, device)
            return
        for block in _by_rule(self.rule, own, others):
            if self.by_rule:
                yield block
                continue
            assert self._by_sample is not None
            for sample, documents in self._by_sample:
                for spans in documents:
                    rows, columns = (
                        _both(block.rows, _within(own, spans.queries)),
                        _both(block.columns, _within(others, spans.keys)),
                    )
                    yield from _of_document(rows, columns, block.is_causal, sample)

    def tiles(self, own: Sequence[Span], others: Sequence[Span], device: torch.device) -> Iterator[AttentionBlock]:
        """The same as ``blocks``, of at most ``TILE`` queries and keys."""
        for queries, rows in _tiles(own):
            for keys, columns in _tiles(others):
                allowed = self.tile(queries, keys, device)
                alone = None if self.alone is None else self.alone[:, None, slice(*queries), None].to(device)
                if allowed is not False or alone is not None:
                    yield AttentionBlock(rows, columns, allowed, alone=alone, distance=keys[0] - queries[0])

    @cached_property
    def _by_sample(self) -> list[tuple[int | None, list[DocumentSpans]]] | None:
        """The documents of each sample, or of all alike; None: they are too many, or what belongs together does not follow each other.

        Read on the host, once for a mask.
        """
        given = [tensor for tensor in (self.keys, self.documents) if tensor is not None]
        if not all(has_values(tensor) for tensor in given):
            return None
        size, length = given[0].shape
        keys, documents = (None if tensor is None else tensor.cpu() for tensor in (self.keys, self.documents))
        found = []
        for sample in range(size):
            spans = _documents(
                None if keys is None else keys[sample], None if documents is None else documents[sample], length
            )
            if spans is None or len(spans) * SHORTEST > length:
                return None
            if self.queries is not None:
                spans = [DocumentSpans((0, self.queries), each.keys) for each in spans]
            found.append(spans)
        return [(None, found[0])] if all(spans == found[0] for spans in found) else [*enumerate(found)]

    @cached_property
    def _dense(self) -> dict[tuple[int, torch.device], Tensor | bool]:
        return {}

    def key_positions(self, device: torch.device) -> Tensor:
        """Return the positions of keys, (samples or 1, length) of whole numbers: padding is not counted and has position 0."""
        if self.keys is None:
            assert self.length is not None
            return torch.arange(self.length, device=device)[None]
        keys = self.keys.to(device)
        return (keys.cumsum(-1) - 1) * keys

    @cached_property
    def alone(self) -> Tensor | None:
        """(samples, queries) of bool: the positions that attend to none; None: ``averages`` does not ask for them, or there are none."""
        if not self.averages or self.keys is None or not has_values(self.keys):
            return None
        length = self.keys.shape[1]
        found = []
        for queries, _ in _tiles([(0, length if self.queries is None else self.queries)]):
            some = torch.zeros(len(self.keys), queries[1] - queries[0], dtype=torch.bool, device=self.keys.device)
            for keys, _ in _tiles([(0, length)]):
                allowed = self.tile(queries, keys, self.keys.device)
                some |= allowed[:, 0].any(-1) if isinstance(allowed, Tensor) else allowed
            found.append(~some)
        alone = torch.cat(found, 1)
        return alone if bool(alone.any()) else None

    def dense(self, length: int, device: torch.device) -> Tensor | None:
        """Return ``tile`` of whole sequences, with ``length`` keys, made once; None: all attend to all."""
        if (key := (length, device)) not in self._dense:
            self._dense[key] = self.tile((0, length if self.queries is None else self.queries), (0, length), device)
        found = self._dense[key]
        return found if isinstance(found, Tensor) else None


_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "rand", "or", "ror", "xor", "rxor", "invert", "neg",
    "eq", "ne", "lt", "le", "gt", "ge", "bool", "setitem",
)  # fmt: skip


def _refusing(operator: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        _refuse(f"calls {operator} with")

    return refuse


for _operator in _OPERATORS:  # a comparison would answer by itself, and others with an error of Python
    setattr(Mask, f"__{_operator}__", _refusing(_operator))


def _refuse(what: str) -> NoReturn:
    raise StrategyError(
        f"model: {what} the mask of its attention, which cp has as a rule and not as a tensor; use dp_shard or tp instead"
    )


class BatchMasks:
    """The masks of a forward over one sequence.

    Args:
        keys, documents, averages, length, queries: what its batch and its model add to them, see Mask.

    Attributes:
        length: see Mask.
        positions: (positions of this process,), where they are in the sequence, for a model that counts them; None: it does not.
        encoder: beside those of a decoder, the masks of its encoder.
        across: beside those of a decoder, the masks from its positions to those of its encoder.
        is_by_hand: the model has its own attention, which adds biases to scores that are masked too, see Scores.
    """

    def __init__(
        self,
        keys: Tensor | None = None,
        documents: Tensor | None = None,
        averages: bool = False,
        length: int | None = None,
        queries: int | None = None,
    ) -> None:
        self.length = length
        self.positions: Tensor | None = None
        self.encoder: BatchMasks | None = None
        self.across: BatchMasks | None = None
        self.is_by_hand = False
        self._added = keys, documents, averages, length, queries
        self._made: dict[Rule, Mask] = {}

    def of(self, rule: Rule) -> Mask:
        """Return the mask of a rule; one for all layers, so that what it keeps is made once."""
        return self._made.setdefault(rule, Mask(rule, *self._added))


def _by_rule(rule: Rule, own: Sequence[Span], others: Sequence[Span]) -> Iterator[AttentionBlock]:
    """The blocks of a rule without window, as few as possible."""
    rows, columns = (list(accumulate((stop - start for start, stop in spans), initial=0)) for spans in (own, others))
    if not rule.causal or own == others:
        yield AttentionBlock((0, rows[-1]), (0, columns[-1]), is_causal=rule.causal)
        return
    # A span of queries attends to all keys of the spans before it: queries with as many of them are one block.
    before = [sum(stop <= start for _, stop in others) for start, _ in own]
    edges = [at for at in range(len(own) + 1) if at in (0, len(own)) or before[at] != before[at - 1]]
    for first, last in pairwise(edges):
        if before[first]:
            yield AttentionBlock((rows[first], rows[last]), (0, columns[before[first]]))


def _of_document(rows: Span, columns: Span, is_causal: bool, sample: int | None) -> Iterator[AttentionBlock]:
    """The blocks of a document, whose keys lie within its queries if ``is_causal``."""
    if rows[0] >= rows[1] or columns[0] >= columns[1]:
        return
    if not is_causal:
        yield AttentionBlock(rows, columns, sample=sample)
        return
    yield AttentionBlock(columns, columns, is_causal=True, sample=sample)
    if columns[1] < rows[1]:  # such as padding, which attends to all that it follows
        yield AttentionBlock((columns[1], rows[1]), columns, sample=sample)


def _documents(keys: Tensor | None, documents: Tensor | None, length: int) -> list[DocumentSpans] | None:
    """The documents of one sample; None: positions of a document, or keys in it, do not follow each other."""
    edges = [0, length]
    if documents is not None:
        edges[1:1] = (torch.diff(documents).nonzero()[:, 0] + 1).tolist()
        if len(set(documents[edges[:-1]].tolist())) < len(edges) - 1:
            return None
    found = []
    for start, stop in pairwise(edges):
        if keys is None:
            found.append(DocumentSpans((start, stop), (start, stop)))
            continue
        at = keys[start:stop].nonzero()[:, 0]
        if not len(at):
            continue
        first, last = start + int(at[0]), start + int(at[-1]) + 1
        if last - first != len(at):
            return None
        found.append(DocumentSpans((start, stop), (first, last)))
    return found


def _within(spans: Sequence[Span], positions: Span) -> Span:
    """The local indices of those positions that lie in the spans; what lies between two of them is in neither, or all of it is."""
    first, last = (sum(min(max(at - start, 0), stop - start) for start, stop in spans) for at in positions)
    return first, last


def _both(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _tiles(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """The spans in tiles, each with its local indices."""
    offset = 0
    for start, stop in spans:
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            yield (at, end), (offset + at - start, offset + end - start)
        offset += stop - start
