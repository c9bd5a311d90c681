"""pseudo_collate: MMEngine's way of making a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError
from ...core.registry import FUNCTIONS


@FUNCTIONS.register_module()
def pseudo_collate(samples: Sequence[Any]) -> Any:
    """Gather the fields of the samples into lists, without stacking; MMEngine's default.

    Args:
        samples: what the dataset gives: dicts, tuples, lists or anything else, all alike.

    Raises:
        ConfigError: they have lists of different lengths.
    """
    return _gathered(samples, None)


def _gathered(samples: Sequence[Any], key: Any) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: _gathered([sample[key] for sample in samples], key) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_gathered(field, key) for field in zip(*samples, strict=True)))
    if isinstance(first, (list, tuple)):
        if other := next((sample for sample in samples if len(sample) != len(first)), None):
            where = "samples" if key is None else f'"{key}" of samples'
            raise ConfigError(
                f"collate_fn: {where} of one batch are lists of different lengths, {len(first)} and {len(other)}; give a function "
                f"that pads, {PADDING}"
            )
        return [_gathered(field, key) for field in zip(*samples, strict=True)]
    return list(samples)


PADDING = (
    'for texts collate_fn=dict(type="transformers:DataCollatorForSeq2Seq", tokenizer=...), which pads labels too, or '
    "transformers:DataCollatorWithPadding"
)
