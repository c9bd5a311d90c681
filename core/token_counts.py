"""Count the tokens that the loss of a model is a mean of, so that each counts the same in an update."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .errors import ConfigError
from .token_losses import IGNORED, labels_in_loss

NUMBER = "num_items_in_batch"
"""The argument in which transformers gives a model the number of labels that count in the whole update."""
logger = logging.getLogger("flextrain")
_WAY_OUT = "or set model.loss_weight = None, and each batch counts the same"


class TokenCount:
    """A model's ``loss_weight``: the number of labels in a batch that are not -100, of tokens or of whole samples.

    If the first batch has none to count, the loss is taken to be a mean over something else: each batch counts the same.

    Args:
        shifts: the first label of each sequence does not count.

    Attributes:
        is_known: whether the labels of the first batch could be counted; None: there was no batch yet.
    """

    def __init__(self, shifts: bool) -> None:
        self.shifts = shifts
        self.is_known: bool | None = None

    def __call__(self, data: Any) -> Tensor | int:
        """Return the number, as a 0-dim tensor where the labels are; 1 if there is nothing to count.

        Raises:
            ConfigError: the batch has a number of its own, or no labels where others had some.
        """
        count = self._count(data)
        if self.is_known is None:
            self.is_known = count is not None
            if count is None:
                logger.warning(
                    "model: what its loss is a mean of is not known from the first batch, which has no labels of tokens or "
                    "samples; each batch counts the same, unless the model defines loss_weight(data)"
                )
        if not self.is_known:
            return 1
        if count is None:
            raise ConfigError(
                f"batch: has no labels to count, and others had some; give all of them labels, {_WAY_OUT}"
            )
        return count

    def _count(self, data: Any) -> Tensor | None:
        if not isinstance(data, Mapping):
            return None
        if data.get("num_items_in_batch") is not None:
            raise ConfigError(
                "batch: has num_items_in_batch, but the tokens of an update are counted over all of its batches and "
                f"processes; leave it out, {_WAY_OUT}"
            )
        if isinstance(shifted := data.get("shift_labels"), Tensor):
            return (shifted != IGNORED).sum()
        labels = data.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < (2 if self.shifts else 1):
            return None
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
