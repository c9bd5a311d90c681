"""Count the tokens that the loss of a model of transformers is a mean of, so that each counts the same in an update.

These models give a mean over the labels of a batch that are not -100. Whether the first label of a sequence counts, which no
position predicts in a causal model, is found by calling the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .rehearsing import with_values

IGNORED = -100
_POSITIONS = 4
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
    """Give a model of transformers the ``loss_weight`` that its loss calls for; return whether it was given one.

    A model with an attribute ``loss_weight``, also None, keeps it. So do models with a ``train_step`` or a
    ``data_preprocessor``, models of other libraries, and those whose loss is not a mean over labels.
    """
    if hasattr(model, "loss_weight") or hasattr(model, "train_step") or hasattr(model, "data_preprocessor"):
        return False
    shifts = _shifts(_of_transformers(model))
    if shifts is None:
        return False
    model.loss_weight = TokenCount(shifts)  # type: ignore[assignment]
    return True


def _of_transformers(model: nn.Module) -> Any:
    """The model of transformers, also inside of peft's wrapper, whose forward calls its ``loss_function``; or None."""
    if type(model).__module__.partition(".")[0] == "peft" and callable(found := getattr(model, "get_base_model", None)):
        model = found()
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in kinds:
        return None
    forward = inspect.unwrap(type(model).forward)
    return model if "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ()) else None


def _shifts(model: Any) -> bool | None:
    """Whether the loss leaves out the first label; None: it is no mean over the others, or cannot be called so."""
    if model is None:
        return None
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < 2:
        return None
    with with_values(), torch.no_grad():
        # As different as the losses of positions should be; no random numbers are drawn.
        logits = torch.zeros(1, _POSITIONS, size, dtype=torch.float32, device="cpu")
        logits[0, :, 0] = torch.arange(1.0, _POSITIONS + 1, device="cpu")

        def loss(positions: list[int]) -> float:
            labels = torch.full((1, _POSITIONS), IGNORED, device="cpu")
            labels[0, positions] = 1
            return float(model.loss_function(logits=logits.clone(), labels=labels, vocab_size=size))

        try:
            each = [loss([position]) for position in range(_POSITIONS)]
            together = loss(list(range(_POSITIONS)))
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            return None
    counted = [value for value in each if math.isfinite(value)]
    is_mean = bool(counted) and math.isclose(together, math.fsum(counted) / len(counted), rel_tol=1e-5)
    if not is_mean or len(set(counted)) != len(counted):
        return None
    if len(counted) == _POSITIONS:
        return False
    return True if counted == each[1:] else None
