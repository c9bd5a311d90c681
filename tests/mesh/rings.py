"""Ring attention of two pretended processes in one, one after the other, beside attention on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flextrain.core.torch_compat.torch_private import TorchDispatchMode
from flextrain.strategies.mesh.context.attention import Ring, ring_attention
from flextrain.strategies.mesh.context.batches import SequenceShards
from flextrain.strategies.mesh.context.masks import Mask
from flextrain.strategies.mesh.context.scores import USUAL, Scores

COUNT = 2


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of operations, and the shapes and strides of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.shapes: list[list[tuple[int, ...]]] = []
        self.strides: list[list[tuple[int, ...]]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.name().removeprefix("aten::"))
        given = [each for each in args if isinstance(each, Tensor)]
        self.shapes.append([tuple(each.shape) for each in given])
        self.strides.append([each.stride() for each in given])
        found = out if isinstance(out, (tuple, list)) else [out]
        self.largest = max([self.largest, *(tensor.numel() for tensor in found if isinstance(tensor, Tensor))])
        return out

    def kernels(self) -> list[str]:
        """The names of kernels, in their order."""
        return [name for name in self.names if name.startswith("_scaled_dot")]


@dataclass(frozen=True)
class Pretended(Ring):
    """A ring of two, of which the other process is not there: its keys and values come from the test, and no gradients.

    Args:
        others: the keys and values of the other process.

    Attributes:
        sent: what this process has sent, call by call: keys and values beside each other in forward and in backward, then the
            gradients of the other's.
    """

    others: Sequence[Tensor] = ()
    sent: list[Tensor] = field(default_factory=list)

    def send_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See Ring."""
        self.sent.append(tensor)
        if len(self.sent) % 3 == 0:
            return lambda: torch.zeros_like(tensor)
        widths = [other.shape[-1] for other in self.others]
        if tensor.shape[-1] != sum(widths):  # padded for kernels
            widths = [tensor.shape[-1] // 2] * 2
        sized = zip(self.others, widths, strict=True)
        together = torch.cat([functional.pad(other, (0, width - other.shape[-1])) for other, width in sized], -1)
        return lambda: together


def in_a_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    mask: Mask,
    scale: float | None = None,
    scores: Scores = USUAL,
) -> list[Tensor]:
    """Return the output and the gradients of queries, keys, values, and sinks or biases if there are any, by two pretended processes."""
    shards, of_keys = (
        SequenceShards(tensor.shape[2], COUNT, tensor.shape[2] % (2 * COUNT) == 0) for tensor in (query, key)
    )
    both = ((shards, query), (of_keys, key), (of_keys, value), (shards, gradient))
    cut = [[each.cut(tensor, 2, index) for each, tensor in both] for index in range(COUNT)]
    parts: list[list[Tensor]] = []
    sent: list[Sequence[Tensor]] = []
    of_learned: list[list[Tensor]] = []
    for index, (queries, keys, values, of_out) in enumerate(cut):
        given = [tensor.detach().clone().requires_grad_() for tensor in (queries, keys, values)]
        ring = Pretended(None, index, [0, 1], cut[1 - index][1:3])
        learned = _learned(scores)
        own = replace(scores, **learned)  # type: ignore[arg-type]
        found = ring_attention(given[0], given[1], given[2], mask, scale, shards, ring, own, of_keys)
        gradients = torch.autograd.grad(found, [*given, *learned.values()], of_out)
        parts.append([found.detach(), *gradients[:3]])
        of_learned.append([*gradients[3:]])
        together = ring.sent[2]
        is_padded = together.shape[-1] != key.shape[-1] + value.shape[-1]
        sent.append(together.chunk(2, -1) if is_padded else together.split((key.shape[-1], value.shape[-1]), -1))
    for index, part in enumerate(parts):
        for at, arrived in enumerate(sent[1 - index], 2):
            part[at] = (part[at].to(arrived.dtype) + arrived[..., : part[at].shape[-1]]).to(part[at].dtype)
    divided = (shards, shards, of_keys, of_keys)
    joined = [each.join(tensors, 2) for each, tensors in zip(divided, zip(*parts, strict=True), strict=True)]
    return [*joined, *(one + other for one, other in zip(*of_learned, strict=True))]


def _learned(scores: Scores, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies of what a model learns beside queries, keys and values, by name."""
    given = {"sinks": scores.sinks, "biases": scores.biases}
    return {name: each.detach().clone().to(dtype).requires_grad_() for name, each in given.items() if each is not None}


def on_one_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    mask: Mask,
    scale: float | None = None,
    scores: Scores = USUAL,
) -> list[Tensor]:
    """Return the same by torch in float64, with a mask of all pairs; queries that attend to none give zeros."""
    lengths = query.shape[2], key.shape[2]
    learned = _learned(scores, torch.float64)
    given = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    repeated = [given[0], *(tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in given[1:])]
    found = mask.tile((0, lengths[0]), (0, lengths[1]), query.device)
    allowed = found if isinstance(found, Tensor) else torch.tensor(found, device=query.device).view(1, 1, 1, 1)
    products = (repeated[0] @ repeated[1].transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if scores.slopes is not None and scores.positions is not None:
        products = products + scores.slopes.double()[:, None, None] * scores.positions[:, None, None]
    if "biases" in learned:
        distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]
        products = products + learned["biases"][:, distance + lengths[0] - 1]
    products = products.masked_fill(~allowed, -1e300)
    given += learned.values()
    if scores.sinks is None:
        weights = torch.softmax(products, -1)
    else:
        sinks = learned["sinks"].view(-1, 1, 1).expand(*products.shape[:3], 1)
        weights = torch.softmax(torch.cat([products, sinks], -1), -1)[..., :-1]
    out = weights.masked_fill(~allowed, 0.0) @ repeated[2]
    return [out.detach(), *torch.autograd.grad(out, given, gradient.double())]
