"""BLOOM: attention with linear biases (ALiBi), which its layers compute by hand, for sequences that are cut."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ....core.hugging_face.transformers_private import bloom_slopes
from .masks import Mask
from .scores import Scores


def replace_forward(layer: nn.Module, attend: Callable[..., Any]) -> None:
    """Let a layer call ``attend`` where it gets a mask for sequences that are cut, until ``restore_forward``.

    Args:
        layer: of ``bloom_layers``.
        attend: has the arguments of transformers' attention interface, and ``scores``.
    """

    def forward(self: Any, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Mask):
            return type(self).forward(self, hidden_states, residual, *args, **kwargs)
        fused = self.query_key_value(hidden_states).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = (each.transpose(1, 2) for each in fused.unbind(-2))
        # Its positions do not count padding; those that it is called with are of one process.
        scores = Scores(slopes=bloom_slopes(self), positions=mask.key_positions(query.device))
        dropout = self.attention_dropout.p if self.training else 0.0
        found, _ = attend(self, query, key, value, mask, dropout, self.inv_norm_factor, scores=scores)
        mixed = self.dense(found.flatten(2))
        return residual + functional.dropout(mixed, self.hidden_dropout, self.training), None

    layer.forward = MethodType(forward, layer)


def restore_forward(layer: nn.Module) -> None:
    """Undo ``replace_forward``."""
    vars(layer).pop("forward", None)
