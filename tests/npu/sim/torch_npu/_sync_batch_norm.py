"""The operators of torch.nn.SyncBatchNorm, for which torch has no kernels on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _shaped(value: Tensor, x: Tensor) -> Tensor:
    return value.view(1, -1, *[1] * (x.dim() - 2))


def _operator(function):
    torch.library.impl(f"aten::{function.__name__}", "PrivateUse1")(function)
    return function


@_operator
def batch_norm_stats(x, eps):
    """Mean and inverse standard deviation of each channel on this process."""
    x = x.float()
    return x.mean(_dims(x)), (x.var(_dims(x), unbiased=False) + eps).rsqrt()


@_operator
def batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """The same over all processes, from what each has found of how many values."""
    weights = counts.view(-1, 1).to(mean.dtype)
    total = weights.sum()
    whole = (mean * weights).sum(0) / total
    variance = ((invstd**-2 - eps + (mean - whole) ** 2) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole.to(running_mean.dtype), alpha=momentum)
        unbiased = variance * total / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return whole, (variance + eps).rsqrt()


@_operator
def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    """The normalised values."""
    y = (x - _shaped(mean, x)) * _shaped(invstd, x)
    if weight is not None:
        y = y * _shaped(weight, x)
    if bias is not None:
        y = y + _shaped(bias, x)
    return y.to(x.dtype)


@_operator
def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    """The sums that backward needs from every process, and the gradients of weight and bias."""
    grad, centered = grad.float(), x.float() - _shaped(mean, x)
    total, product = grad.sum(_dims(x)), (grad * centered).sum(_dims(x))
    return total, product, (product * invstd).clone(), total.clone()


@_operator
def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    """The gradient of the input."""
    number = count.sum()
    slope = _shaped(sum_dy_xmu / number * invstd**2, x)
    out = grad - _shaped(sum_dy / number, x) - (x - _shaped(mean, x)) * slope
    out = out * _shaped(invstd, x)
    if weight is not None:
        out = out * _shaped(weight, x)
    return out.to(x.dtype)
