"""Streams of Hugging Face's datasets: which continue exactly from their own state, and which have to be read again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from ..samplers import tell_epoch

_EXACT = frozenset(
    (
        "ArrowExamplesIterable",
        "CyclingMultiSourcesExamplesIterable",
        "ExamplesIterable",
        "FilteredExamplesIterable",
        "FormattedExamplesIterable",
        "HorizontallyConcatenatedMultiSourcesExamplesIterable",
        "MappedExamplesIterable",
        "RandomlyCyclingMultiSourcesExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "RepeatExamplesIterable",
        "SelectColumnsIterable",
        "ShuffledDataSourcesArrowExamplesIterable",
        "ShuffledDataSourcesExamplesIterable",
        "SkipExamplesIterable",
        "StepExamplesIterable",
        "TakeExamplesIterable",
        "VerticallyConcatenatedMultiSourcesExamplesIterable",
    )
)
"""Parts of a stream that go on at their next sample, in every position, also when they go on three times."""
_BUFFER = "BufferShuffledExamplesIterable"
_OF_THE_WHOLE = {"TakeExamplesIterable": "take()", "SkipExamplesIterable": "skip()"}
_ENDING_EARLY = dict.fromkeys(
    ("CyclingMultiSourcesExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable"), "interleave_datasets()"
)
_SEEDED = 2**64
"""A NumPy generator without a seed draws one of 128 bits."""


def is_of_hugging_face(dataset: Any) -> bool:
    """Whether an object is a stream of Hugging Face's datasets."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def why_read_again(dataset: Any, workers: int = 0) -> str | None:
    """Why the state of a stream of Hugging Face's does not lead to its next sample; None if it does, or for other streams.

    Args:
        dataset: the stream.
        workers: of a loader that asks the stream itself where it is.
    """
    if not is_of_hugging_face(dataset):
        return None
    if not _advances():
        return f"{_version()} begins anew when it goes on for the second time; update it"
    if not begins_anew():
        return f"{_version()} begins every pass after a resumed one where that went on; update it"
    if workers > 1 and not _tells_before_reading():
        return "in a worker that has not read since it was resumed its state is that of the beginning"
    for part in _parts(dataset._ex_iterable):
        name = type(part).__name__
        if name == _BUFFER:
            return "its shuffle buffer is not in its state"
        if name not in _EXACT:
            return f"its {name} is not known to go on exactly"
        formatting = getattr(part, "formatting", None)
        if getattr(part, "batched", False) and getattr(formatting, "is_table", False):
            return "a batched map over tables may skip a batch"
    return None


def why_not_by_shards(dataset: Any, training: bool) -> str | None:
    """The operation of a stream that gives other samples of some of its shards than of all; None if there is none.

    In training an interleaved stream may end a little earlier or later.
    """
    kinds = _OF_THE_WHOLE if training else _OF_THE_WHOLE | _ENDING_EARLY
    names = (kinds.get(type(part).__name__) for part in _parts(dataset._ex_iterable))
    return next(filter(None, names), None)


def has_no_seed(dataset: Any) -> bool:
    """Whether a stream draws an order that nobody can draw again: it was shuffled, or interleaved by chance, without a seed."""
    generators = (getattr(part, "generator", None) for part in _parts(dataset._ex_iterable))
    bits = [getattr(each, "bit_generator", None) for each in generators]
    # NumPy 1.25 made it public.
    seeds = (getattr(each, "seed_seq", None) or getattr(each, "_seed_seq", None) for each in bits)
    entropies = (getattr(seed, "entropy", None) for seed in seeds)
    return any(isinstance(entropy, int) and entropy >= _SEEDED for entropy in entropies)


def _parts(part: Any) -> Iterator[Any]:
    yield part
    inner = [part.ex_iterable] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", ())
    for one in inner:
        yield from _parts(one)


@functools.cache
def _advances() -> bool:
    """Whether the state of a stream follows it after it was restored: https://github.com/huggingface/datasets/issues/8308."""
    stream = _three_rows()
    for expected in range(3):
        if next(iter(stream))["number"] != expected:
            return False
        stream.load_state_dict(stream.state_dict())
    return True


@functools.cache
def _tells_before_reading() -> bool:
    """Whether a stream that was restored tells its state at once."""
    stream = _three_rows()
    next(iter(stream))
    state, other = stream.state_dict(), _three_rows()
    other.load_state_dict(state)
    return bool(other.state_dict() == state)


@functools.cache
def begins_anew() -> bool:
    """Whether the pass after a restored one has all samples; since datasets 3.4."""
    stream, other = _three_rows(), _three_rows()
    next(iter(stream))
    other.load_state_dict(stream.state_dict())
    for _ in other:
        pass
    tell_epoch(other, 1)
    return bool(next(iter(other))["number"] == 0)


def _version() -> str:
    import datasets  # type: ignore[import-untyped]

    return f"datasets {datasets.__version__}"


def _three_rows() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"number": [0, 1, 2]}).to_iterable_dataset()
