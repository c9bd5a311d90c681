"""PackedTokens: documents one after the other, cut into sequences of one length."""

from __future__ import annotations

import bisect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ....core.base.config import PositiveInt
from ....core.base.errors import ConfigError, DataError, one_of
from ....core.base.registry import DATASETS
from ....core.random.generators import nth_seed
from ....core.random.permutation import Indices, hashed
from ..dataset_wrappers import build_dataset, check_in_one_pass
from ..samplers import tell_epoch
from ..sources.file_source import SUFFIX, as_function, kept, print_of_parts
from ..stream_orders import Order, default_order

# DocumentIndex: finds the documents that a span of tokens is made of, with documents in stored or shuffled order.


GROUP = 1024
"""Documents in a group: the cumulative lengths are kept by group, and shuffled documents stay in theirs."""
_KEPT = 32
_CHUNK = 2**20

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def ends_of_groups(lengths: Any, extra: int = 0) -> Numbers:
    """Return the number of tokens up to the end of each group, int64, reading all lengths once.

    Args:
        lengths: tokens of each document: an array, or an object with a length whose slices are arrays.
        extra: tokens that are added to each document.
    """
    sums = [np.zeros(0, np.int64)]
    for at in range(0, len(lengths), _CHUNK):
        chunk = np.asarray(lengths[at : at + _CHUNK], np.int64) + extra
        sums.append(np.add.reduceat(chunk, np.arange(0, len(chunk), GROUP)))
    return np.cumsum(np.concatenate(sums))


class DocumentIndex:
    """Documents one after the other as one sequence of tokens; finds what a span of it is made of.

    A look-up reads the ends of groups by bisection, and the lengths of the one or two groups that it needs: the time does
    not depend on the number of documents.

    Args:
        lengths: see ``ends_of_groups``.
        group_ends: result of ``ends_of_groups`` with the same ``extra``.
        extra: tokens that are added to each document.
        seed: seed of the order in a group; None: the documents stay as they are stored.
    """

    def __init__(self, lengths: Any, group_ends: Numbers, extra: int = 0, seed: int | None = None) -> None:
        self.lengths, self.group_ends, self.extra, self.seed = lengths, group_ends, extra, seed
        self._kept: OrderedDict[tuple[int, int], tuple[list[int], list[int]]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.group_ends[-1]) if len(self.group_ends) else 0

    def documents(self, start: int, stop: int, number: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, first token, token after the last) for each document in a span of tokens.

        Args:
            start: first token, of those of all documents one after the other.
            stop: token after the last, at most ``num_tokens``.
            number: the pass, which determines the shuffled order.
        """
        group = bisect.bisect_right(self.group_ends, start)
        while start < stop:
            begin = int(self.group_ends[group - 1]) if group else 0
            documents, ends = self._group(group, number)
            at = bisect.bisect_right(ends, start - begin)
            while start < stop and at < len(ends):
                first = begin + (ends[at - 1] if at else 0)
                last = begin + ends[at]
                if last > start:  # not an empty document
                    yield documents[at], start - first, min(stop, last) - first
                    start = min(stop, last)
                at += 1
            group += 1

    def _group(self, group: int, number: int) -> tuple[list[int], list[int]]:
        """The documents of a group in their order, and the tokens of the group up to the end of each."""
        key = (group, number if self.seed is not None else 0)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        lengths = np.asarray(self.lengths[group * GROUP : (group + 1) * GROUP], np.int64) + self.extra
        before = int(self.group_ends[group - 1]) if group else 0
        if before + int(lengths.sum()) != int(self.group_ends[group]):
            raise DataError(
                f"documents from number {group * GROUP} on have {int(lengths.sum())} tokens, they had {int(self.group_ends[group]) - before} when "
                "they were counted; remove the index of their lengths, lengths-*.ftindex"
            )
        order = np.arange(len(lengths))
        if self.seed is not None:
            order = _shuffled(len(lengths), nth_seed(nth_seed(self.seed % 2**64, number), group))
        if len(self._kept) >= _KEPT:
            self._kept.popitem(last=False)
        self._kept[key] = found = (order + group * GROUP).tolist(), np.cumsum(lengths[order]).tolist()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}


def _shuffled(size: int, seed: int) -> Any:
    """A random order of a few numbers: sorted by their hashes, which are all different."""
    keys = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    keys = hashed(keys)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys)


IGNORED = -100
"""The label of what is no token; cross entropy leaves it out."""
_SMALL = 2**20  # with fewer documents whose lengths are known, their sums are not worth a file
_RECENT = 16

logger = logging.getLogger("flextrain")


@DATASETS.register_module()
class PackedTokens(Dataset[Any]):
    """Sequences of one length, cut from documents one after the other: each token is in one sequence of a pass.

    Sequence ``k`` has tokens ``k * length`` to ``(k + 1) * length`` of all documents in their order, so it follows from
    ``k`` alone. The sampler shuffles sequences; ``shuffle_documents`` also shuffles the documents of which they are cut,
    in groups of 1024 neighbours, anew in every pass.

    A sample is ``dict(input_ids=..., labels=...)`` of int64 tensors of shape (length,).

    Args:
        source: a dataset of documents, or ``dict(type=...)``. A document is a list, array or tensor of token numbers, or a
            mapping that has one.
        length: tokens in a sequence.
        key: key of the tokens in a document that is a mapping.
        labels: "same": labels are the tokens, as models of Transformers take them; "next": labels are the tokens that
            follow, and sequences overlap by one token; None: no labels.
        end_token: a token to put after every document.
        shuffle_documents: shuffle documents within their groups.
        seed: seed of that; sequences follow the run's.
        last: "drop" the tokens after the last whole sequence, or "pad" it with ``pad_token``, labelled -100.
        pad_token: the token to pad with.
        position_ids: add ``position_ids`` (length,), which count from the beginning of each document's tokens.
        segment_ids: add ``segment_ids`` (length,), the number of the document in the sequence, from 0; -1 for padding.
        vocab_size: tokens have to be below it; checked when they are read.
        transform: function of a sequence's dict that returns what the dataset gives, its name, or ``dict(type=...)``.
        index_dir: folder for the lengths of the documents, if the source does not know them: they are counted once. None:
            beside the source's first file, or in the user's cache.

    Raises:
        ConfigError: an argument cannot be honoured, or there are too few tokens for one sequence.
        DataError: a document is no list of token numbers, or changed after it was counted.

    Example:
        train_dataloader = dict(
            batch_size=8,
            dataset=dict(type="PackedTokens", source=dict(type="TokenFiles", paths="tokens/*.bin", end_token=0), length=2048),
        )
    """

    inner_datasets: ClassVar[str] = "source"
    """See Mixture."""

    def __init__(
        self,
        source: Any,
        length: PositiveInt,
        *,
        key: str = "input_ids",
        labels: Literal["same", "next"] | None = "same",
        end_token: int | None = None,
        shuffle_documents: bool = False,
        seed: int = 0,
        last: Literal["drop", "pad"] = "drop",
        pad_token: int | None = None,
        position_ids: bool = False,
        segment_ids: bool = False,
        vocab_size: PositiveInt | None = None,
        transform: Any = None,
        index_dir: str | Path | None = None,
        where: str = "",
    ) -> None:
        where = where or "PackedTokens"
        self.source = build_dataset(source, f"{where}.source")
        if isinstance(self.source, IterableDataset) or not hasattr(self.source, "__len__"):
            raise ConfigError(f"{where}.source: {type(self.source).__name__} has no length, give a dataset with one")
        check_in_one_pass(self.source, f"{where}.source")
        _check_options(length, labels, last, pad_token, where)
        for name, token in (("end_token", end_token), ("pad_token", pad_token)):
            if token is not None and not 0 <= token < (vocab_size or 2**63):
                raise ConfigError(f"{where}.{name}: {token} is not allowed, give a token from 0{_below(vocab_size)}")
        _check_ends(self.source, end_token, where, "source")
        self.length, self.key, self.labels, self.end_token = length, key, labels, end_token
        self.shuffle_documents, self.last, self.pad_token = shuffle_documents, last, pad_token
        self.position_ids, self.segment_ids, self.vocab_size = position_ids, segment_ids, vocab_size
        self.transform = as_function(transform, f"{where}.transform")
        self._recent: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()
        extra, size = int(end_token is not None), len(self.source)
        # Tokens that stand one after the other in files need no index of documents.
        is_stored = hasattr(self.source, "span") and getattr(self.source, "transform", None) is None
        self._is_flat = is_stored and not (extra or shuffle_documents or position_ids or segment_ids)
        self._has_spans = is_stored and not extra
        self._index: DocumentIndex | None = None
        if not self._is_flat:
            lengths, ends = self._lengths(extra, index_dir)
            self._index = DocumentIndex(lengths, ends, extra, seed if shuffle_documents else None)
        self.num_tokens = self._index.num_tokens if self._index else int(self.source.num_tokens)
        """Tokens of all documents, ``end_token`` included."""
        usable = self.num_tokens - (labels == "next")
        self._count = -(-usable // length) if last == "pad" else usable // length
        if self._count < 1:
            raise ConfigError(
                f"{where}.length: {length} is more than the {self.num_tokens} tokens of all documents"
                f'{", of which the last has no label" if labels == "next" else ""}; give less, or last="pad"'
            )
        own = (length, key, labels, end_token, shuffle_documents, seed, last, self.num_tokens)
        # The source's fingerprint does not know what its transform does: tokens of three documents tell.
        probe = [] if is_stored else [self._document(i).tolist() for i in sorted({0, size // 2, size - 1} - {-1})]
        self.fingerprint = print_of_parts(
            "PackedTokens", self._count, [getattr(self.source, "fingerprint", size), *own, *probe]
        )
        """Changes with the source's fingerprint and with the arguments that decide on the sequences."""

    def __len__(self) -> int:
        return self._count

    def order_of_pass(self, seed: int, number: int, shuffle: bool) -> Order:
        """Return the order of pass ``number``; with shuffled documents its indices are beyond the length, pass by pass."""
        order = default_order(self._count, seed, number, shuffle)
        return _Later(order, number * self._count) if self.shuffle_documents else order

    def set_epoch(self, epoch: int) -> None:
        """Tell the source the number of the epoch."""
        tell_epoch(self.source, epoch)

    def __getitem__(self, index: int) -> Any:
        """Return sequence ``index``; ``index + n * len(self)`` is the one in pass ``n`` with shuffled documents."""
        if not 0 <= index < self._count * (2**62 if self.shuffle_documents else 1):
            index = range(self._count)[index]
        number, sequence = divmod(index, self._count)
        start = sequence * self.length
        stop = min(start + self.length + (self.labels == "next"), self.num_tokens)
        if self._is_flat:
            sample = self._sample(self._checked(self.source.span(start, stop), "a token file"), [], [])
        else:
            tokens, positions, segments = self._cut(start, stop, number)
            sample = self._sample(tokens, positions, segments)
        return sample if self.transform is None else self.transform(sample)

    # Reading

    def _cut(self, start: int, stop: int, number: int) -> tuple[Any, list[Any], list[Any]]:
        assert self._index is not None
        found, positions, segments = [], [], []
        for segment, (document, first, last) in enumerate(self._index.documents(start, stop, number)):
            found.append(self._document_span(document, first, last))
            if self.position_ids:
                # From the document's first token here: what a model sees of it begins there.
                positions.append(np.arange(last - first))
            if self.segment_ids:
                segments.append(np.full(last - first, segment))
        # A document that is kept must not be changed by those who get the sequence.
        return found[0] if len(found) == 1 and self._has_spans else np.concatenate(found), positions, segments

    def _document_span(self, number: int, first: int, last: int) -> np.ndarray[Any, Any]:
        if self._has_spans:
            return self._checked(
                self.source.document_span(number, first, last), f"document {number} of the token files"
            )
        return self._document(number)[first:last]

    def _document(self, number: int) -> np.ndarray[Any, Any]:
        if number in self._recent:
            self._recent.move_to_end(number)
            return self._recent[number]
        tokens = self._tokens(number)
        if self.end_token is not None:
            tokens = np.append(tokens, self.end_token)
        assert self._index is not None
        said = int(self._index.lengths[number : number + 1][0]) + self._index.extra
        if len(tokens) != said:
            raise DataError(
                f"document {number} of {type(self.source).__name__} has {len(tokens)} tokens, it had {said} when they were "
                "counted; a transform must give the same tokens at every call, or remove the index"
            )
        if len(self._recent) >= _RECENT:
            self._recent.popitem(last=False)
        self._recent[number] = tokens
        return tokens

    def _tokens(self, number: int) -> np.ndarray[Any, Any]:
        document = self.source[number]
        what = f"document {number} of {type(self.source).__name__}"
        if isinstance(document, Mapping):
            if self.key not in document:
                raise DataError(
                    f'{what} has no "{self.key}", it has {one_of(document) if document else "nothing"}; give the source a '
                    "transform that tokenizes, or say key=..."
                )
            document = document[self.key]
        try:
            tokens = np.asarray(document)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{what} is no list of token numbers, {error}") from None
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "ui"):
            kind = type(document).__name__ if tokens.ndim == 0 else f"{tokens.dtype} of shape {tokens.shape}"
            raise DataError(
                f"{what} is no list of token numbers but {kind}; give the source a transform that makes them"
            )
        return self._checked(tokens.astype(np.int64), what)

    def _checked(self, tokens: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
        if not tokens.size:
            return tokens
        least, most = int(tokens.min()), int(tokens.max())
        if self.vocab_size is not None and not 0 <= least <= most < self.vocab_size:
            wrong = most if most >= self.vocab_size else least
            raise DataError(f"{what} has token {wrong}, it must be from 0{_below(self.vocab_size)} (vocab_size)")
        if least < 0:
            raise DataError(f"{what} has token {least}, it must be 0 or more")
        return tokens

    def _sample(self, tokens: Any, positions: list[Any], segments: list[Any]) -> dict[str, Tensor]:
        length = self.length
        inputs = self._filled(tokens[:length] if len(tokens) > length else tokens, self.pad_token or 0)
        sample = {"input_ids": inputs}
        if self.labels is not None:
            # In memory of their own: a transform may write to them.
            is_whole = self.labels == "same" and len(tokens) == length
            labels = inputs if is_whole else self._filled(tokens[self.labels == "next" :], IGNORED)
            sample["labels"] = labels.clone() if len(tokens) >= length else labels
        if self.position_ids:
            sample["position_ids"] = self._filled(np.concatenate(positions)[:length], 0)
        if self.segment_ids:
            sample["segment_ids"] = self._filled(np.concatenate(segments)[:length], -1)
        return sample

    def _filled(self, numbers: Any, filling: int) -> Tensor:
        if len(numbers) == self.length:
            return torch.from_numpy(numbers)
        filled = torch.full((self.length,), filling, dtype=torch.int64, device="cpu")
        filled[: len(numbers)] = torch.from_numpy(np.ascontiguousarray(numbers, np.int64))
        return filled

    # Lengths of the documents

    def _lengths(self, extra: int, index_dir: str | Path | None) -> tuple[Any, Numbers]:
        known = getattr(self.source, "lengths", None)
        own = known() if callable(known) else None
        if own is not None and len(own) <= _SMALL:
            return own, ends_of_groups(own, extra)

        def make() -> dict[str, Any]:
            lengths = self._count_tokens() if own is None else own
            ends = ends_of_groups(lengths, extra)
            return {"group_ends": ends} if own is not None else {"group_ends": ends, "lengths": lengths}

        print_ = getattr(self.source, "fingerprint", None) or getattr(self.source, "_fingerprint", None)
        if not isinstance(print_, str):  # nobody could say whether a file is still right
            arrays: Mapping[str, Any] = make()
        else:
            facts = {
                "kind": "lengths 1",
                "source": print_,
                "key": self.key,
                "extra": extra,
                "tokens": _name_of(getattr(self.source, "transform", None)),
            }
            files = getattr(self.source, "files", None)
            own_dir = index_dir if index_dir is not None else getattr(self.source, "index_dir", None)
            name = f"lengths-{print_.rpartition('(')[2].strip(')')}{'-1' * extra}{SUFFIX}"
            whose = f"{type(self.source).__name__} {print_}"
            arrays = kept(name, whose, facts, make, files[0].parent if files else None, own_dir)
        return own if own is not None else arrays["lengths"], arrays["group_ends"]

    def _count_tokens(self) -> Numbers:
        count = len(self.source)
        logger.info(f"PackedTokens: counts the tokens of {count} documents of {type(self.source).__name__} once")
        return np.fromiter((len(self._tokens(number)) for number in range(count)), np.int64, count)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recent": OrderedDict()}


class _Later:
    """An order whose indices are moved to those of a later pass."""

    def __init__(self, order: Order, offset: int) -> None:
        self._order, self._offset = order, offset

    def __getitem__(self, positions: Indices) -> Indices:
        return self._order[positions] + self._offset


def _check_ends(source: Any, end_token: int | None, where: str, at: str) -> None:
    if end_token is not None and getattr(source, "end_token", None) == end_token:
        raise ConfigError(
            f"{where}.end_token: {end_token} ends the documents of {where}.{at} already, leave out one of them"
        )
    for number, part in enumerate(getattr(source, "sources", ())):
        _check_ends(part, end_token, where, f"{at}.sources[{number}]")


def _check_options(length: int, labels: Any, last: Any, pad_token: int | None, where: str) -> None:
    if isinstance(length, bool) or length < 1:
        raise ConfigError(f"{where}.length: {length!r} is not allowed, give 1 or more")
    if labels not in ("same", "next", None):
        raise ConfigError(f'{where}.labels: {labels!r} is not allowed, choose "same", "next" or None')
    if last not in ("drop", "pad"):
        raise ConfigError(f'{where}.last: {last!r} is not allowed, choose "drop" or "pad"')
    if (last == "pad") != (pad_token is not None):
        if last == "pad":
            raise ConfigError(f'{where}.pad_token: missing, last="pad" needs it')
        raise ConfigError(f'{where}.pad_token: has no effect with last="drop", give last="pad" or leave it out')


def _below(vocab_size: int | None) -> str:
    return "" if vocab_size is None else f" to {vocab_size - 1}"


def _name_of(function: Callable[..., Any] | None) -> str:
    """A name for a function and its plain arguments, by which an index is found again."""
    inner = getattr(function, "func", function)
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__name__)}"
    arguments = getattr(function, "keywords", {})
    return f"{name} {[f'{key}={value}' for key, value in sorted(arguments.items()) if isinstance(value, (str, int, float))]}"
