"""The tensors of ZeRO's stages on one rank, by formula, as DeepSpeed 0.19.8 makes them; see ``rehearsed``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.rehearsing import announce
from .config import ZeroOptimization

_REDUCED_AT_ONCE = 500_000_000
"""Elements of gradients that stage 0 reduces at a time."""

Updated = tuple[Tensor, Mapping[str, Any], Sequence[nn.Parameter]]
"""A tensor that the optimizer updates, its group, and the parameters that are in it."""


class ZeroState:
    """The base of both: what the engine does at each moment of an update.

    Args:
        zero: the options.
        dtype: of the model.
        sent: dtype of gradients in collectives.
        rank, world_size: of this process.
    """

    def __init__(
        self, zero: ZeroOptimization, dtype: torch.dtype, sent: torch.dtype, rank: int, world_size: int
    ) -> None:
        self.zero, self.dtype, self.sent, self.rank, self.world_size = zero, dtype, sent, rank, world_size
        self.total = 0
        self._updated: list[tuple[Tensor, list[nn.Parameter]]] = []

    @property
    def bucket_size(self) -> int:
        """Elements of gradients that are reduced at a time."""
        return min(int(self.zero.reduce_bucket_size), self.total + self.total % 2)

    def adopt(self, model: nn.Module) -> None:
        """Take a model's parameters over, in the dtype of the model."""
        self.total = sum(parameter.numel() for parameter in model.parameters())

    def shard(self, optimizer: Optimizer) -> None:
        """Replace the parameters of an optimizer by this rank's masters."""
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            group["params"] = self.masters_of(trained) if trained else []
            group.pop("param_names", None)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]

    def masters_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Return what the optimizer updates in place of these parameters of one group."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Do what the engine does after backward of each micro-batch."""

    def before_update(self) -> None:
        """Give the masters their gradients."""

    def after_update(self) -> None:
        """Give the model the updated weights."""

    def updated(self, optimizer: Optimizer) -> Iterator[Updated]:
        """Yield what the optimizer updates."""
        groups = {id(master): group for group in optimizer.param_groups for master in group["params"]}
        for master, parameters in self._updated:
            yield master, groups[id(master)], parameters

    def _to_dtype(self, parameter: Tensor) -> Tensor:
        return parameter.data.to(self.dtype) if parameter.is_floating_point() else parameter.data

    def _agree(self) -> None:
        """Share a number, as for the norm of gradients."""
        dist.all_reduce(torch.zeros(1))


class WholeParameters(ZeroState):
    """Stages 0 to 2: every rank has all parameters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._flats: list[_Flat] = []
        self._bucket: Tensor | None = None
        self._waiting: list[nn.Parameter] = []
        self._kept: Tensor | None = None  # gradients of the micro-batch, and of those before it
        self._summed: Tensor | None = None

    def adopt(self, model: nn.Module) -> None:
        """See ZeroState."""
        super().adopt(model)
        for parameter in model.parameters():
            parameter.data = self._to_dtype(parameter)

    def masters_of(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """See ZeroState."""
        if self.zero.stage > 0:
            flat = _Flat(parameters, self.dtype, self.rank, self.world_size)
            self._flats.append(flat)
            self._updated.append((flat.master, parameters))
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            return [flat.master]
        masters: list[Tensor] = list(parameters)
        if self.dtype is not torch.float32:
            masters = [parameter.detach().float() for parameter in parameters]
            announce("optimizer_state", masters)
        self._updated += [(master, [own]) for master, own in zip(masters, parameters, strict=True)]
        return masters

    def _take(self, parameter: Any) -> None:
        """Move a gradient to the bucket; reduce the bucket first, if it is full."""
        if self._bucket is None:
            self._bucket = torch.empty(self.bucket_size, dtype=self.dtype)
            announce("communication", [self._bucket])
        if self.zero.stage == 1:  # reduces at the update
            return
        waiting = sum(each.numel() for each in self._waiting)
        if self._waiting and waiting + parameter.numel() > self.bucket_size:
            self._reduce()
            waiting = 0
        if parameter.numel() <= self.bucket_size:
            self._bucket.narrow(0, waiting, parameter.numel()).copy_(parameter.grad.reshape(-1))
            parameter.grad = None
        self._waiting.append(parameter)
        if parameter.numel() > self.bucket_size:
            self._reduce()
            parameter.grad = None

    def _reduce(self) -> None:
        """Reduce the gradients in the bucket, and keep those of parameters of which this rank has a part."""
        if self._waiting:
            sent = torch.empty(sum(each.numel() for each in self._waiting), dtype=self.sent)
            announce("communication", [sent])
            dist.all_reduce(sent)
            self._waiting.clear()
        if self._kept is None:
            self._kept = torch.empty(sum(flat.own for flat in self._flats), dtype=self.dtype)
            announce("gradients", [self._kept])

    def after_backward(self) -> None:
        """See ZeroState; stage 2 reduces what is left, and adds to the gradients of other micro-batches."""
        if self.zero.stage != 2:
            return
        self._reduce()
        self._bucket = None
        if self._summed is None:
            self._summed = self._kept
        self._kept = None

    def before_update(self) -> None:
        """See ZeroState."""
        if self.zero.stage == 0:
            self._reduce_all()
            self._give_whole_gradients()
            return
        if self.zero.stage == 1:
            self._reduce_at_once()
        self._agree()
        for flat in self._flats:
            grad = torch.empty(flat.size, dtype=self.dtype).to(torch.float32)
            announce("gradients", [grad])
            flat.master.grad = grad
        self._summed = None

    def _reduce_all(self) -> None:
        trained = [parameter for _, parameters in self._updated for parameter in parameters]
        for some in _chunked(trained, _REDUCED_AT_ONCE):
            sent = torch.empty(sum(each.numel() for each in some), dtype=self.sent)
            announce("communication", [sent])
            dist.all_reduce(sent)

    def _give_whole_gradients(self) -> None:
        if self.dtype is torch.float32:
            return
        for master, (parameter, *_) in self._updated:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                announce("gradients", [master.grad])

    def _reduce_at_once(self) -> None:
        trained = [parameter for flat in self._flats for parameter in flat.parameters]
        for some in _chunked(trained, self.bucket_size):
            sent = torch.empty(sum(each.numel() for each in some), dtype=self.sent)
            announce("communication", [sent])
            dist.all_reduce(sent)
            for parameter in some:  # its gradient is in the bucket
                parameter.grad = None
        self._summed = torch.empty(sum(flat.own for flat in self._flats), dtype=self.dtype)
        announce("gradients", [self._summed])
        self._bucket = None

    def after_update(self) -> None:
        """See ZeroState."""
        if self.zero.stage == 0:
            for master, (parameter, *_) in self._updated if self.dtype is not torch.float32 else ():
                parameter.data.copy_(master)
                parameter.grad = None
            return
        for flat in self._flats:
            flat.master.grad = None
            flat.partition.copy_(flat.master.detach())
            at_once = max(1, int(self.zero.allgather_bucket_size) // self.world_size)
            for begin in range(0, flat.size, at_once):
                length = min(at_once, flat.size - begin)
                # Of the right size; in DeepSpeed, it is a list of parts.
                whole = flat.whole.narrow(0, begin * self.world_size, length * self.world_size)
                dist.all_gather_into_tensor(whole, flat.partition.narrow(0, begin, length))


class _Flat:
    """A group of parameters as one tensor, padded so that ranks share it evenly, and this rank's partition of it.

    Attributes:
        whole, partition: the tensor, which parameters are views of, and this rank's part of it.
        master: float32 copy of the partition.
        size: elements of the partition.
        own: elements of all parameters of which the partition has a part.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, rank: int, world_size: int) -> None:
        self.parameters = parameters
        alignment = 2 * world_size
        self.size = -(-sum(parameter.numel() for parameter in parameters) // alignment) * alignment // world_size
        self.whole = torch.empty(self.size * world_size, dtype=dtype)
        self.own = begin = 0
        first, last = rank * self.size, (rank + 1) * self.size
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.data = self.whole.narrow(0, begin, parameter.numel()).view(parameter.shape)
            self.own += parameter.numel() if begin < last and end > first else 0
            begin = end
        self.partition = self.whole.narrow(0, first, self.size)
        self.master = torch.empty(self.size, dtype=torch.float32).requires_grad_()
        announce("parameters", [self.whole])
        announce("optimizer_state", [self.master])


def _chunked(parameters: Iterable[nn.Parameter], size: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters together, with at most ``size`` elements, or one that has more."""
    found: list[nn.Parameter] = []
    count = 0
    for parameter in parameters:
        if found and count + parameter.numel() > size:
            yield found
            found, count = [], 0
        found.append(parameter)
        count += parameter.numel()
    if found:
        yield found
