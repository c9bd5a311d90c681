"""Count the tokens that the loss of a model is a mean of, so that each counts the same in an update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .errors import ConfigError
from .token_losses import IGNORED, labels_in_loss

NUMBER = "num_items_in_batch"
"""The argument in which transformers gives a model the number of labels that count in the whole update."""
_WAY_OUT = "or set model.loss_weight = None, and each batch counts the same"


class TokenCount:
    """A model's ``loss_weight``: the number of labels in a batch that are not -100.

    Args:
        shifts: the first label of each sequence does not count.
    """

    def __init__(self, shifts: bool) -> None:
        self.shifts = shifts

    def __call__(self, data: Any) -> Tensor:
        """Return the number, as a 0-dim tensor where the labels are.

        Raises:
            ConfigError: the batch has no labels of tokens, or a number of its own.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"batch: is {type(data).__name__}, give a dict with labels, whose tokens are counted, {_WAY_OUT}"
            )
        if data.get("num_items_in_batch") is not None:
            raise ConfigError(
                "batch: has num_items_in_batch, but the tokens of an update are counted over all of its batches and "
                f"processes; leave it out, {_WAY_OUT}"
            )
        if isinstance(shifted := data.get("shift_labels"), Tensor):
            return (shifted != IGNORED).sum()
        labels = data.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2:
            what = f"labels of shape {list(labels.shape)}" if isinstance(labels, Tensor) else "no tensor labels"
            raise ConfigError(f"batch: has {what}, give one label for each token, {_WAY_OUT}")
        return ((labels[..., 1:] if self.shifts else labels) != IGNORED).sum()


def count_tokens(model: nn.Module) -> bool:
    """Give a model the ``loss_weight`` that its loss calls for; return whether it was given one.

    These are models of transformers whose loss is a mean over labels, also in peft's wrapper, and models whose forward
    has an argument ``num_items_in_batch``. A model with an attribute ``loss_weight``, also None, keeps it. So do models
    with a ``train_step``, and models of transformers with a ``data_preprocessor``.
    """
    if hasattr(model, "loss_weight") or hasattr(model, "train_step"):
        return False
    takes_number = takes_number_of_items(model)
    if hasattr(model, "data_preprocessor") and not takes_number:
        return False
    labels = labels_in_loss(model)
    if labels is None and not takes_number:
        return False
    model.loss_weight = TokenCount(labels == "all but the first")  # type: ignore[assignment]
    return True


def takes_number_of_items(model: nn.Module) -> bool:
    """Whether forward has an argument ``num_items_in_batch``, by which it divides the sum of a batch's losses."""
    return NUMBER in inspect.signature(type(model).forward).parameters
