"""Cross entropy of logits that are divided by their classes: no process ever has those of all classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ....core.comm import collectives as dist
from ....core.rehearsing import rehearsing


def divided_cross_entropy(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy`` of a DTensor on a mesh of one dimension.

    The processes exchange three numbers for each sample, the largest logit, the sum of the exponentials and the logit of
    the target, in place of the logits of all classes.

    Returns:
        NotImplemented if the logits are not divided by classes, or the target is not indices.

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
    """
    if not isinstance(logits, DTensor) or logits.device_mesh.ndim != 1 or logits.ndim == 0:
        return NotImplemented
    dim = min(logits.ndim - 1, 1)  # (classes,), or (samples, classes, ...)
    if (
        logits.placements != (Shard(dim),)
        or target.is_floating_point()
        or size_average is not None
        or reduce is not None
    ):
        return NotImplemented
    mesh, classes = logits.device_mesh, logits.shape[dim]
    local = logits.to_local().movedim(dim, -1)
    each = -(-classes // mesh.size())  # as torch.chunk divides
    first = min(each * mesh.get_local_rank(), classes)
    indices = _whole(target)
    weights = None if weight is None else _whole(weight)
    losses = _Losses.apply(local, indices, weights, first, classes, ignore_index, label_smoothing, mesh.get_group())
    if reduction == "sum":
        losses = losses.sum()
    elif reduction == "mean":
        counted = indices != ignore_index
        shares = counted if weights is None else weights[indices.clamp(0, classes - 1)] * counted
        losses = losses.sum() / shares.sum()
    if not torch.is_autocast_enabled(mesh.device_type):  # under which torch's returns float32, as it is here
        losses = losses.to(logits.dtype)
    return DTensor.from_local(losses, mesh, (Replicate(),), run_check=False)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Losses(torch.autograd.Function):
    """The loss of every sample, from this process's logits in the last dimension."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, first: int, classes: int, ignored: int,
        smoothing: float, group: Any,
    ) -> Tensor:  # fmt: skip
        # Half precision is not enough for sums of exponentials.
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        count, counted = values.shape[-1], target != ignored
        at = target.masked_fill(~counted, 0)
        outside = (at < 0) | (at >= classes)
        # An accelerator would wait for the host.
        if target.device.type == "cpu" and not rehearsing() and outside.any():
            raise IndexError(f"Target {int(at[outside][0])} is out of bounds.")
        largest = values.amax(-1) if count else values.new_full(values.shape[:-1], -torch.inf)
        dist.all_reduce(largest, "max", group)
        shifted = values - largest.unsqueeze(-1)
        here = (at >= first) & (at < first + count)
        index = torch.where(here, at - first, 0).unsqueeze(-1)
        logit = shifted.gather(-1, index).squeeze(-1) * here if count else torch.zeros_like(largest)
        own = torch.ones_like(shifted[..., :1]) if weight is None else weight[first : first + count].to(values.dtype)
        sums = torch.stack([shifted.exp().sum(-1), logit, (shifted * own).sum(-1)])
        dist.all_reduce(sums, "sum", group)
        log_sum = sums[0].log()
        of_class = torch.ones_like(log_sum) if weight is None else weight[at.clamp(0, classes - 1)].to(values.dtype)
        of_target = (1 - smoothing) * of_class * counted
        of_all = smoothing / classes * counted.to(values.dtype)  # a number times a mask has the default dtype
        total = float(classes) if weight is None else weight.sum().to(values.dtype)
        loss = of_target * (log_sum - sums[1]) + of_all * (total * log_sum - sums[2])
        ctx.save_for_backward(
            logits, largest + log_sum, index, of_target, of_target * here, of_all, of_all * total, own
        )
        return loss.masked_fill(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, log_sum, index, of_target, of_own_target, of_all, of_all_total, own = ctx.saved_tensors
        chance = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp()
        found = chance * (of_target + of_all_total).unsqueeze(-1) - of_all.unsqueeze(-1) * own
        if logits.shape[-1]:
            found.scatter_add_(-1, index, -of_own_target.unsqueeze(-1))
        found *= gradients[0].to(found.dtype).unsqueeze(-1)
        return found.to(logits.dtype), *[None] * 7
