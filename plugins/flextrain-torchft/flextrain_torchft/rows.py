"""Division of a batch: the consecutive samples of it that one of several groups computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from flextrain import StrategyError


def span_of(rows: int, index: int, count: int) -> tuple[int, int]:
    """Return [start, stop) of shard ``index`` of ``count`` of so many rows; some are empty where rows are fewer."""
    return rows * index // count, rows * (index + 1) // count


def rows_in(batch: Any) -> int:
    """Return the number of samples in a batch: the first size of its tensors, and the length of lists of other things.

    A list or tuple with a tensor in it is one of fields, such as inputs and labels, as ``default_collate`` makes it.

    Raises:
        StrategyError: the sizes differ, or there is nothing to count.
    """
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        found = f"has tensors or lists of {', '.join(map(str, sorted(sizes)))} rows" if sizes else "has no tensor"
        raise StrategyError(
            f"train_dataloader: a batch {found}, TorchFTStrategy divides batches with a row for each sample"
        )
    return sizes.pop()


def some_rows(batch: Any, start: int, stop: int) -> Any:
    """Return the samples [start, stop) of a batch that ``rows_in`` can count; tensors are views."""
    return _mapped(batch, lambda leaf: leaf[start:stop])


def _is_leaf(value: Any) -> bool:
    """Whether this is a tensor, or a list of what is neither a tensor nor has any in it."""
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and not any(map(_has_fields, value)))


def _has_fields(value: Any) -> bool:
    return isinstance(value, (Tensor, Mapping, list, tuple))


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, Tensor):
        yield len(value) if value.dim() else 0
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sizes(item)
    elif _is_leaf(value):
        yield len(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _sizes(item)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if _is_leaf(value):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: _mapped(item, function) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, function) for item in value)
    return value
