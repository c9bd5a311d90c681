"""pseudo_collate: MMEngine's way of making a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.registry import FUNCTIONS


@FUNCTIONS.register_module()
def pseudo_collate(samples: Sequence[Any]) -> Any:
    """Gather the fields of the samples into lists, without stacking; MMEngine's default.

    Args:
        samples: what the dataset gives: dicts, tuples, lists or anything else, all alike.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: pseudo_collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(pseudo_collate(field) for field in zip(*samples, strict=True)))
    if isinstance(first, (list, tuple)):
        return [pseudo_collate(field) for field in zip(*samples, strict=True)]
    return list(samples)
