"""Scores of attention: what models do to them beside masks, and attention that is computed from them by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from .masks import AttentionBlock


@dataclass(frozen=True, eq=False)
class Scores:
    """What a model does to the scaled products of queries and keys, beside a mask, before their softmax.

    Args:
        softcap: they become ``softcap * tanh(products / softcap)``, as in Gemma 2; None: they stay.
        sinks: (heads,), learned numbers that take part in each softmax and stand for no value, as in gpt-oss.
        slopes: (heads,), by which the position of a key is multiplied and added (ALiBi), as in BLOOM.
        positions: (samples or 1, keys) of whole numbers, the positions of keys for ``slopes``.
        biases: (heads, 2 * length - 1), learned numbers that are added by the distance of a key from a query, from
            ``1 - length`` on, as in T5.
        biases_of_all: pairs that do not attend have biases too, which shows in the gradients of a position that attends to none.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    positions: Tensor | None = None
    biases: Tensor | None = None
    biases_of_all: bool = False

    @property
    def are_products(self) -> bool:
        """Whether kernels compute them: sinks are added to what kernels give."""
        return self.softcap is None and self.slopes is None and self.biases is None

    @property
    def are_usual(self) -> bool:
        """Whether there is nothing that kernels do not compute."""
        return self.are_products and self.sinks is None

    @property
    def by_head(self) -> dict[str, Tensor | None]:
        """What has an entry for each head, by name."""
        return {"sinks": self.sinks, "slopes": self.slopes, "biases": self.biases}

    def of_heads(self, index: int, count: int) -> Scores:
        """Return those of the heads that process ``index`` of ``count`` has, which are divided in their order."""
        found = {name: None if each is None else each.chunk(count)[index] for name, each in self.by_head.items()}
        return replace(self, **found)  # type: ignore[arg-type]

    def on_shards(self, mesh: DeviceMesh, layout: Sequence[Placement]) -> Scores:
        """Return those of this process's heads, which a mesh of tensor parallelism divides as ``layout`` says."""

        def own(heads: Tensor | None) -> Tensor | None:
            if heads is None:
                return None
            whole = heads if isinstance(heads, DTensor) else DTensor.from_local(heads, mesh, run_check=False)
            return whole.redistribute(placements=layout).to_local()

        return replace(self, **{name: own(each) for name, each in self.by_head.items()})  # type: ignore[arg-type]

    def of_block(
        self, query: Tensor, key: Tensor, scale: float, block: AttentionBlock, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a block, and ``tanh(products / softcap)`` if they are capped, else None.

        Args:
            query, key: (samples, heads, rows, width), and the same with columns; heads of keys divide those of queries.
            block: who attends to whom.
            positions: (samples or 1, columns), those of the keys.

        Returns:
            Each (samples, heads of keys, queries for each, rows, columns).
        """
        dtype, heads = accumulated(query), key.shape[1]
        found = (grouped(query, heads).to(dtype) @ key[:, :, None].to(dtype).transpose(-1, -2)).mul_(scale)
        capped = None
        if self.softcap is not None:
            capped = found.div_(self.softcap).tanh_()
            found = capped * self.softcap
        if self.slopes is not None:
            assert positions is not None
            found.add_(self.slopes.view(1, heads, -1, 1, 1) * positions[:, None, None, None])
        if self.biases is not None:
            rows, columns = found.shape[-2:]
            diagonals = self.biases[:, self.diagonals(block, rows, columns)]
            # Each row begins one diagonal before the row above it.
            found.add_(diagonals.unfold(-1, columns, 1).flip(-2).view(1, heads, -1, rows, columns))
        if block.allowed is not True:
            found = (
                found.fill_(-torch.inf)
                if block.allowed is False
                else found.masked_fill_(~block.allowed[:, :, None], -torch.inf)
            )
        if block.alone is not None and self.sinks is None:  # which would take all of their weights
            found = found.masked_fill_(block.alone[:, :, None], 0.0)
        return found, capped

    def diagonals(self, block: AttentionBlock, rows: int, columns: int) -> slice:
        """Return which of the biases a block has, from that of its last query and first key to that of its first and last."""
        assert self.biases is not None
        first = self.biases.shape[-1] // 2 + block.distance - (rows - 1)
        return slice(first, first + rows + columns - 1)

    def with_sinks(self, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the logarithms of the sums, with sinks; both are of all keys and in the dtype of sums."""
        if self.sinks is None:
            return out, sums
        whole = torch.logaddexp(sums, self.sinks.to(sums.dtype)[:, None])
        return out * (sums - whole).exp()[..., None], whole

    def gradient_of_sinks(self, gradient: Tensor, out: Tensor, sums: Tensor) -> Tensor | None:
        """Return the gradient of sinks, from that of the output, the output and the sums with them."""
        if self.sinks is None:
            return None
        product = (gradient.to(sums.dtype) * out.to(sums.dtype)).sum(-1)
        shares = (self.sinks.to(sums.dtype)[:, None] - sums).exp()
        return -(shares * product).sum((0, 2)).to(self.sinks.dtype)


USUAL = Scores()


def accumulated(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def grouped(tensor: Tensor, heads: int) -> Tensor:
    """(samples, heads of queries, ...) as (samples, heads of keys, queries for each, ...)."""
    return tensor.reshape(tensor.shape[0], heads, -1, *tensor.shape[2:])


def block_by_hand(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scale: float, scores: Scores = USUAL,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output of a block and the logarithms of its sums, without sinks."""
    found, _ = scores.of_block(query, key, scale, block, positions)
    sums = torch.logsumexp(found, -1)
    base = torch.where(sums == -torch.inf, 0.0, sums)  # of a position that attends to none
    weights = found.sub_(base[..., None]).exp_()
    return (weights @ value[:, :, None].to(weights.dtype)).flatten(1, 2), sums.flatten(1, 2)


def block_by_hand_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, block: AttentionBlock, scale: float,
    scores: Scores = USUAL, positions: Tensor | None = None, of_biases: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values; queries that share a head of keys add up.

    Args:
        out, sums: those of all blocks, with sinks.
        of_biases: the gradient of biases, to which that of this block is added.
    """
    dtype, heads = accumulated(query), key.shape[1]
    queries, to_values, outs = (grouped(tensor, heads).to(dtype) for tensor in (query, gradient, out))
    keys, values = (tensor[:, :, None].to(dtype) for tensor in (key, value))
    base = torch.where(sums == -torch.inf, 0.0, sums)
    found, capped = scores.of_block(query, key, scale, block, positions)
    weights = found.sub_(grouped(base, heads)[..., None]).exp_()
    delta = (to_values * outs).sum(-1, keepdim=True)
    of_scores = (to_values @ values.transpose(-1, -2)).sub_(delta).mul_(weights)
    if of_biases is not None:
        counted = of_scores
        if block.alone is not None and not scores.biases_of_all:
            counted = (
                of_scores * block.allowed if isinstance(block.allowed, bool) else of_scores * block.allowed[:, :, None]
            )
        of_biases[:, scores.diagonals(block, *of_scores.shape[-2:])] += _sums_of_diagonals(counted.sum(0).flatten(0, 1))
    of_scores = of_scores.mul_(scale)
    if capped is not None:  # the derivative of the cap
        of_scores.mul_(1.0 - capped.square_())
    of_key = (of_scores.transpose(-1, -2) @ queries).sum(2)
    return (of_scores @ keys).flatten(1, 2), of_key, (weights.transpose(-1, -2) @ to_values).sum(2)


def _sums_of_diagonals(matrices: Tensor) -> Tensor:
    """(heads, rows, columns) to (heads, rows + columns - 1): the sums along diagonals, from the lower left to the upper right."""
    heads, rows, columns = matrices.shape
    # From the last row on, each row begins a column further right.
    moved = functional.pad(matrices.flip(-2), (0, rows)).flatten(-2)[:, : rows * (rows + columns - 1)]
    return moved.reshape(heads, rows, -1).sum(-2)


def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float, scores: Scores, dropout: float
) -> Tensor:
    """Return the attention of a whole sequence, whose weights drop out; all of them are in memory, as in models' own."""
    whole = AttentionBlock((0, query.shape[2]), (0, key.shape[2]))
    found, _ = scores.of_block(query, key, scale, whole, scores.positions)
    found = found.flatten(1, 2)
    if allowed is not None:
        found = found + torch.zeros(allowed.shape, dtype=found.dtype, device=found.device).masked_fill_(
            ~allowed, torch.finfo(found.dtype).min
        )
    if scores.sinks is not None:
        sinks = scores.sinks.to(found.dtype).view(1, -1, 1, 1).expand(*found.shape[:3], 1)
        weights = torch.cat([found, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = found.softmax(-1)
    weights = functional.dropout(weights, dropout)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return (weights @ values.to(weights.dtype)).to(query.dtype)
