"""The values to log of an update, from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.torch_private import is_view


def kept(value: Tensor) -> Tensor:
    """Return a value to log, which is read only when a line is written.

    A parameter or a buffer, or a view of one, may change in place until then: it is copied.
    """
    return value.detach().clone() if value.grad_fn is None or is_view(value) else value.detach()


def mean_of(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of the values that all parts have."""
    total = dict(parts[0])
    for part in parts[1:]:
        total = {name: total[name] + part[name] for name in total if name in part}
    return {name: value / len(parts) for name, value in total.items()}


def weighted_mean(
    parts: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    factors: Sequence[float],
    device: torch.device,
    of_sums: bool = False,
) -> dict[str, Tensor]:
    """Return ``loss`` times the factors, so that its mean over processes is that over all items.

    Any other value is the mean over this process's items, and missing if it has none.

    Args:
        parts: the values of each micro-batch.
        weights: items of each micro-batch.
        factors: of each micro-batch's loss.
        device: of the losses.
        of_sums: the model divides sums by the items of the update, and all of its losses have the factors.
    """
    counted = [(weight, part) for weight, part in zip(weights, parts, strict=True) if weight]
    used = [factor for factor in factors if factor]
    losses = [part["loss"] * f for f, (_, part) in zip(used, counted, strict=True)]
    loss = _sum(losses) if losses else torch.zeros((), device=device)
    own = sum(weights)
    shares = [weight / own for weight, _ in counted]
    names = [n for n in (counted[0][1] if counted else ()) if n != "loss" and all(n in part for _, part in counted)]
    others = {}
    for name in names:
        by = used if of_sums and "loss" in name else shares
        others[name] = _sum([part[name] * share for share, (_, part) in zip(by, counted, strict=True)])
    return {"loss": loss, **others}


def of_filler(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the values of a window that has nothing but a filler, see Counted."""
    return {name: torch.zeros_like(value) for name, value in part.items()}


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
