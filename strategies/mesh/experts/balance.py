"""The auxiliary loss with which transformers' models keep their experts equally busy, over the tokens of all processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....core.rehearsing import with_values

_logger = logging.getLogger("flextrain")
_NAME = "load_balancing_loss_func"
"""The function of a module of transformers' that a model calls; checked with 5.23."""


class BalanceLoss:
    """The product of two means over tokens, for which the mean over processes of each one's product is another number.

    Models call a function of their module for it. ``used`` puts this object in its place, for functions that compute what
    this one does.

    Args:
        model: the model, before it is changed.
        group: the processes that have different tokens; None if there are no others.

    Source: Fedus et al., "Switch Transformers: Scaling to Trillion Parameter Models", 2022, equations 4 to 6.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self._group = group
        self._namespaces: list[dict[str, Any]] = []
        for name in sorted({kind.__module__ for module in model.modules() for kind in type(module).__mro__}):
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            if callable(function := namespace.get(_NAME)):
                with with_values():
                    is_known = _is_known(function)
                if is_known:
                    self._namespaces.append(namespace)
                else:
                    _logger.warning(f"strategy.ep: {name}.{_NAME} is not known, and is left over each process's tokens")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which the models' modules call this object."""
        before = [namespace[_NAME] for namespace in self._namespaces]
        for namespace in self._namespaces:
            namespace[_NAME] = self
        try:
            yield
        finally:
            for namespace, function in zip(self._namespaces, before, strict=True):
                namespace[_NAME] = function

    def __call__(
        self, gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        """Return the loss over the tokens of all processes; the same on each, with the gradients that belong to it."""
        if not isinstance(gate_logits, tuple):
            return 0
        logits = [layer.full_tensor() if isinstance(layer, DTensor) else layer for layer in gate_logits]
        sums = _sums(logits, num_experts, top_k, attention_mask)
        return _loss(cast(Tensor, _Sum.apply(sums, self._group)))


def _sums(logits: list[Tensor], num_experts: int, top_k: int, mask: Tensor | None) -> Tensor:
    """Return by expert how many tokens chose it, and the sum of its probabilities; then the number of tokens."""
    rows, device = sum(len(layer) for layer in logits), logits[0].device
    chosen, probable = torch.zeros(2, num_experts, device=device, dtype=torch.float32)
    counted = chosen.new_ones(rows // len(logits)) if mask is None else mask.reshape(-1).to(chosen)
    for layer in logits:
        probabilities = layer.softmax(-1)
        ids = probabilities.topk(top_k, dim=-1).indices
        chosen = chosen.scatter_add(0, ids.reshape(-1), counted.repeat_interleave(top_k))
        probable = probable + (probabilities.float() * counted.unsqueeze(-1)).sum(0)
    return torch.cat([chosen, probable, counted.sum()[None] * len(logits)])


def _loss(sums: Tensor) -> Tensor:
    (chosen, probable), rows = sums[:-1].view(2, -1), sums[-1]
    loss: Tensor = len(chosen) * (chosen / rows * (probable / rows)).sum()
    return loss


def _is_known(function: Callable[..., Any]) -> bool:
    """Whether a model's own function computes what ``BalanceLoss`` does on one process."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(6, 4, generator=generator, dtype=torch.float32) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
        try:
            theirs = function(layers, 4, 2, mask)
        except (TypeError, ValueError, RuntimeError):  # it has other arguments
            return False
        if not isinstance(theirs, Tensor) or not torch.allclose(theirs, _loss(_sums([*layers], 4, 2, mask)), rtol=1e-4):
            return False
    return True


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient is the sum of the gradients on all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad, ctx.group), None


def _summed(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
