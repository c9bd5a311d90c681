"""Which labels the loss of a model is a mean over: all of them, or all but the first of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...core.token_losses import labels_in_loss


def counts_first_label(model: nn.Module) -> bool | None:
    """Return whether the first label of a sequence counts; None: not known.

    Args:
        model: any. In a model that is not of transformers, the parts that are decide, if all of them say the same.
    """
    found = {_counts_first(part) for part in _of_transformers(model)} - {None}
    return found.pop() if len(found) == 1 else None


def _of_transformers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of transformers, with peft's wrapper around them."""
    if hasattr(model, "get_base_model") or _is_of_transformers(model):
        yield model
        return
    for child in model.children():
        yield from _of_transformers(child)


def _counts_first(model: Any) -> bool | None:
    if (labels := labels_in_loss(model)) is not None:
        return labels == "all"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return True
    return True if any(kind.__name__.endswith("ForMaskedLM") for kind in type(base).__mro__) else None


def _is_of_transformers(model: nn.Module) -> bool:
    """Without importing the package for the question."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    return "transformers.modeling_utils.PreTrainedModel" in kinds
