"""Floating-point operations of torch's operations: those that torch counts, and the products with stacks of experts' matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry


def flops_of(operation: Any) -> Callable[..., int] | None:
    """Return what counts the operations of a call, from its arguments and ``out_val``; None: they are not counted.

    Torch 2.15 has no formula for grouped products, with which mixtures of experts compute.
    """
    found: Callable[..., int] | None = flop_registry.get(operation.overloadpacket)
    return found or _GROUPED.get(operation.name().partition(".")[0])


def _grouped(one: Any, other: Any, *_: Any, **options: Any) -> int:
    """A product of rows in groups, each with the matrix of its group; every row counts, also if it is of no group."""
    if one.ndim == 3 and other.ndim == 2:  # columns in groups
        return 2 * int(one.shape[1] * one.shape[2] * other.shape[1])
    return 2 * int(one.numel() * other.shape[-1])


def _grouped_backward(one: Any, other: Any, *rest: Any, **options: Any) -> int:
    return 2 * _grouped(one, other)  # the gradients of both


_GROUPED: dict[str, Callable[..., int]] = {
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
}
