"""Dispatch: the forward of a stack of experts of which each process has some. Tokens travel to their experts and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ....core.dtensor_private import using_in_place
from ....core.errors import StrategyError
from ....core.rehearsing import rehearsing

_SEPARATE = 0.05
"""Relative difference, by magnitude, below which two ways to compute a tiny sum count as equal in every dtype."""


class Dispatch:
    """Takes the place of ``module.forward``: every (token, expert) pair is computed by the process that has the expert.

    Its result is ``sum(forward(token, expert, weight))`` over a token's experts, which is checked at the first call.

    Args:
        name: the module's name in the model, for messages.
        module: the stack of experts; its parameters are DTensors, the experts of this process in each.
        mesh: the processes over which they are divided, of one dimension.
        sharing: the processes that have the same tokens, each of which sends some; None: every process has its own.
        scale: factor of the gradients of the experts, for an average over all processes by one over fewer.
        forward: the module's own forward.

    Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        mesh: DeviceMesh,
        sharing: DeviceMesh | None,
        scale: float,
        forward: Callable[..., Tensor],
    ) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._signature = inspect.signature(forward)
        self._mesh, self._sharing, self._scale = mesh, sharing, scale
        self._everyones = int(module.num_experts)  # type: ignore[arg-type]
        self._own = self._everyones // mesh.size()
        self._is_tried = self.is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the whole stack for the tokens of this process, as ``forward`` would."""
        given = self._signature.bind(*args, **kwargs).args
        self._check(*given)
        self.is_running = True  # tokens are taken in spans, which is no choice of positions
        try:
            return self._called(*given)
        finally:
            self.is_running = False

    def _called(self, *given: Tensor) -> Tensor:
        tokens, ids, weights = (self._rows_to_send(tensor) for tensor in given)
        if not self._is_tried and len(tokens) and not rehearsing():
            self._check_sum(tokens, weights)
        output = self._send_and_compute(tokens, ids, weights)
        return self._whole(output, given[0])

    def _check(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> None:
        if tokens.ndim != 2 or ids.ndim != 2 or ids.shape != weights.shape or len(ids) != len(tokens):
            raise StrategyError(
                f"model.{self._name}: is called with tokens, expert ids and weights of shapes {tuple(tokens.shape)}, "
                f"{tuple(ids.shape)} and {tuple(weights.shape)}; strategy.ep needs (n, width), (n, k) and (n, k)"
            )

    # Tokens that several processes have: each sends some of them

    def _rows_to_send(self, tensor: Tensor) -> Tensor:
        if self._sharing is None:
            return tensor
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self._sharing, (Replicate(),), run_check=False)
        return tensor.redistribute(placements=(Shard(0),)).to_local()

    def _whole(self, output: Tensor, tokens: Tensor) -> Tensor:
        if self._sharing is None:
            return output
        shape = torch.Size((len(tokens), output.shape[1]))
        rows = DTensor.from_local(
            output.contiguous(), self._sharing, (Shard(0),), run_check=False, shape=shape, stride=(shape[1], 1)
        )
        whole = rows.redistribute(placements=(Replicate(),))
        return whole if isinstance(tokens, DTensor) else whole.to_local()

    # To the experts and back

    def _send_and_compute(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        count, choices = ids.shape
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)  # by expert, hence by process
        numbers = flat.new_zeros(self._everyones).scatter_add_(0, flat, torch.ones_like(flat))
        theirs = torch.empty_like(numbers)
        dist.all_to_all_single(theirs, numbers, group=self._mesh.get_group())
        if rehearsing():  # all experts get equally many, from each process
            sent = received = _even(len(flat), self._mesh.size())
        else:
            by_process = torch.stack([numbers, theirs]).view(2, -1, self._own)
            sent, received = by_process.sum(2).tolist()  # the one wait of the host: sizes of messages

        rows = self._exchange(tokens[order // choices], received, sent)
        factors = self._exchange(weights.reshape(-1, 1)[order], received, sent)
        # In groups by the process that sent them, and in each by expert.
        own_ids = torch.arange(self._own, device=ids.device, dtype=ids.dtype).repeat(self._mesh.size())
        experts = own_ids.repeat_interleave(theirs, output_size=sum(received)).unsqueeze(1)
        if not sum(received):  # a row of zeros: backward and FSDP's reductions run on every process
            rows, factors = rows.sum(0, keepdim=True), factors.sum(0, keepdim=True)
            experts = experts.new_zeros((1, 1))
        with self._own_experts():
            output = self._forward(rows, experts, factors)
        back = self._exchange(output[: sum(received)], sent, received)
        return back[torch.argsort(order)].view(count, choices, -1).sum(1)

    def _exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return cast(Tensor, _Exchange.apply(rows, received, sent, self._mesh.get_group()))

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """Context in which the module is a stack of this process's experts alone."""
        module, own = self._module, {}
        for key, parameter in module.named_parameters(recurse=False):
            local = cast(DTensor, parameter).to_local()
            own[key] = cast(Tensor, _ScaleGradient.apply(local, self._scale))
        module.num_experts = self._own  # type: ignore[assignment]
        try:
            with using_in_place(module, own):
                yield
        finally:
            module.num_experts = self._everyones  # type: ignore[assignment]

    @torch.no_grad()
    def _check_sum(self, tokens: Tensor, weights: Tensor) -> None:
        """Raise StrategyError unless the output for two experts is the sum of those for one each."""
        token = tokens[:1]
        ids = torch.tensor([[0, self._own - 1]], device=tokens.device)
        factors = torch.tensor([[0.75, 0.5]], device=tokens.device, dtype=weights.dtype)
        was_training = self._module.training
        self._module.eval()  # dropout would differ
        try:
            with self._own_experts():
                both = self._forward(token, ids, factors)
                one, other = (self._forward(token, ids[:, i : i + 1], factors[:, i : i + 1]) for i in range(2))
        finally:
            self._module.train(was_training)
        difference, size = (both - one - other).abs().max().item(), (one + other).abs().max().item()
        if not 0.0 < size < float("inf"):
            return  # it shows nothing
        if difference > _SEPARATE * size:
            raise StrategyError(
                f"model.{self._name}: its output for two experts is not the sum of its outputs for each of them, as strategy.ep "
                "needs; normalise the weights before it is called"
            )
        self._is_tried = True


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, of which every process receives some from every other; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.sent, ctx.received, ctx.group), None, None, None


def _even(total: int, count: int) -> list[int]:
    return [total // count + (i < total % count) for i in range(count)]


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class _ScaleGradient(torch.autograd.Function):
    """The identity; backward multiplies by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.scale == 1.0 else grad * ctx.scale, None
