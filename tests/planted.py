"""Faults of distributed training, planted in the library or in a user's model, by name; each runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

from flextrain.optim import gradients
from flextrain.strategies.mesh import strategy as mesh
from flextrain.strategies.mesh.context.context_parallel import Context
from flextrain.strategies.mesh.experts import ExpertParallel
from flextrain.strategies.mesh.pipeline.pipeline_parallel import Ties
from flextrain.strategies.mesh.tensor import local_tensors

Build = Callable[[], nn.Module]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


class _Added(torch.autograd.Function):
    """The sum over a group; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        found = tensor.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def row_without_sum(model: Build) -> None:
    def by_rows(self: Any, input: Tensor) -> Any:
        self._local.close()
        return local_tensors._Linear.apply(input, self._module.weight, self._module.bias, None, None)

    local_tensors._LocalLinear._by_rows = by_rows  # type: ignore[method-assign]


def row_summed_twice(model: Build) -> None:
    _replace(
        local_tensors._LocalLinear,
        "_by_rows",
        lambda own: lambda self, input: _Added.apply(own(self, input), self._local.group),
    )


def _by_rows(make: Callable[[Tensor, Any, Any], Tensor]) -> None:
    """Let ``make(input, weight, bias)`` take the place of a row-wise product, and add up what it returns."""

    def by_rows(self: Any, input: Tensor) -> Any:
        self._local.close()
        return _Added.apply(make(input, self._module.weight, self._module.bias), self._local.group)

    local_tensors._LocalLinear._by_rows = by_rows  # type: ignore[method-assign]


def bias_of_each(model: Build) -> None:
    _by_rows(lambda input, weight, bias: local_tensors._Linear.apply(input, weight, bias, None, None))


def sum_after_activation(model: Build) -> None:
    _by_rows(lambda input, weight, bias: functional.gelu(local_tensors._Linear.apply(input, weight, None, None, None)))


def column_input_gradient_not_summed(model: Build) -> None:
    local_tensors.LocalTensors.add_up = lambda self, gradient: gradient  # type: ignore[method-assign]


def _instead_of_averages(make: Callable[[Any, Tensor, Any], None]) -> None:
    """Let ``make(all_reduce, tensor, group)`` take the place of all-reduces that average: FSDP's over replicas."""

    def changed(own: Any) -> Any:
        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            return make(own, tensor, group) if op == dist.ReduceOp.AVG else own(tensor, op, group, async_op)

        return all_reduce

    _replace(dist, "all_reduce", changed)


def gradient_not_averaged(model: Build) -> None:
    _instead_of_averages(lambda all_reduce, tensor, group: None)


def gradient_summed_twice(model: Build) -> None:
    def twice(all_reduce: Any, tensor: Tensor, group: Any) -> None:
        all_reduce(tensor, dist.ReduceOp.AVG, group)
        all_reduce(tensor, dist.ReduceOp.SUM, group)

    _instead_of_averages(twice)


def norm_gradient_not_summed(model: Build) -> None:
    """The gradients of vectors, which under sequence parallelism are sums over the positions of each process."""

    def reduced(own: Any) -> Any:
        def reduce(self: Any, tensor: Tensor, *args: Any) -> Any:
            return tensor if tensor.ndim == 1 else own(self, tensor, *args)

        return reduce

    _replace(Partial, "_reduce_value", reduced)


class _Apart(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        torch.manual_seed(dist.get_rank())
        return super().forward(input)


def dropout_apart(model: Build) -> Build:
    def build() -> nn.Module:
        found: Any = model()
        for layer in found.layers:
            layer.drop = _Apart(0.1)
        return found

    return build


def sequence_loss_not_summed(model: Build) -> None:
    Context._averaged = lambda self, outputs, window: outputs  # type: ignore[method-assign]


def _before_updates(change: Callable[[Any, Any], None]) -> None:
    """Let ``change(strategy, wrapper)`` run before gradients are clipped."""

    def later(own: Any) -> Any:
        def setup(self: Any, *args: Any) -> Any:
            called, optim = own(self, *args)
            for wrapper in optim.wrappers.values():
                wrapper.register_step_pre_hook(lambda wrapper: change(self, wrapper))
            return called, optim

        return setup

    _replace(mesh.MeshStrategy, "setup", later)


def expert_gradient_averaged(model: Build) -> None:
    def average(strategy: Any, wrapper: Any) -> None:
        axis = next(axis for axis in strategy._axes if isinstance(axis, ExpertParallel))
        for name, parameter in strategy.module.named_parameters():
            if ".experts." in name:
                dist.all_reduce(parameter.grad.to_local().div_(axis.size), group=axis.mesh.get_group())

    _before_updates(average)


def norm_of_own_shards(model: Build) -> None:
    def total_norm(grads: list[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        own = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in own]))

    gradients.total_norm = total_norm
    from flextrain.optim import adapters

    adapters.OptimizerAdapter.clip = lambda self, max_norm, norm_type: None  # type: ignore[method-assign]


def ties_not_summed(model: Build) -> None:
    Ties.add = lambda self, optim: None  # type: ignore[method-assign]


def norm_of_own_shards_and_shared(model: Build) -> None:
    """Squares are added up of what each process has a shard of, and of what all have."""

    def total_norm(grads: list[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        own = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
        square = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in own])) ** 2
        dist.all_reduce(square)
        return square.sqrt()

    gradients.total_norm = total_norm
    from flextrain.optim import adapters

    adapters.OptimizerAdapter.clip = lambda self, max_norm, norm_type: None  # type: ignore[method-assign]


class _Average(nn.Module):
    """A layer that keeps the mean of what it has seen of its own samples."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(input.detach().mean((0, 1)), alpha=0.1)
        return input


def buffer_of_own_samples(model: Build) -> Build:
    def build() -> nn.Module:
        found: Any = model()
        found.layers[0].drop = _Average()
        return found

    return build


def _local_gradients(strategy: Any) -> list[Tensor]:
    found = [parameter.grad for parameter in strategy.module.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def update_by_rank(model: Build) -> None:
    def change(strategy: Any, wrapper: Any) -> None:
        for each in _local_gradients(strategy):
            each.mul_(1.0 + strategy.topology.rank)

    _before_updates(change)


def update_by_tensor_of_rank(model: Build) -> None:
    def change(strategy: Any, wrapper: Any) -> None:
        factor = torch.tensor(1.0 + strategy.topology.rank)
        for each in _local_gradients(strategy):
            each.mul_(factor)

    _before_updates(change)


def gradient_summed_over_pairs(model: Build) -> None:
    def change(strategy: Any, wrapper: Any) -> None:
        first = strategy.topology.rank // 2 * 2
        group = dist.new_group([first, first + 1])
        for each in _local_gradients(strategy):
            dist.all_reduce(each, group=group)

    _before_updates(change)


class _Table(nn.Module):
    """A layer that adds the sum of its shard of a table, where that of the table is due."""

    table: Any

    def forward(self, input: Tensor) -> Tensor:
        return input + self.table.to_local().sum()


def shard_of_a_buffer(model: Build) -> Build:
    def build() -> nn.Module:
        found: Any = model()
        found.layers[0].drop = _Table()
        return found

    def with_table(own: Any) -> Any:
        def setup(self: Any, *args: Any) -> Any:
            found = own(self, *args)
            layout = next(each for each in self.module.parameters() if isinstance(each, DTensor)).device_mesh
            table = DTensor.from_local(torch.ones(4), layout, [Shard(0)])
            self.module.layers[0].drop.register_buffer("table", table)
            return found

        return setup

    _replace(mesh.MeshStrategy, "setup", with_table)
    return build


class _Choice(nn.Module):
    """A layer whose shapes or branches depend on values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input: Tensor) -> Tensor:
        if self.kind == "mask":
            return input + input[input > 0].mean()
        if self.kind == "nonzero":
            return input + (input > 0).nonzero().sum()
        return -input if input.mean() < 0 else input


def _choosing(kind: str) -> Callable[[Build], Build]:
    def plant(model: Build) -> Build:
        def build() -> nn.Module:
            found: Any = model()
            found.layers[1].drop = _Choice(kind)
            return found

        return build

    return plant


def shards_not_reduced(model: Build) -> None:
    """FSDP scatters gradients without adding them: each process keeps its part of its own."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def scattered(own: Any) -> Any:
        def call(
            self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            index = dist.get_rank(group)
            output_tensor.copy_(input_tensor[index * len(output_tensor) : (index + 1) * len(output_tensor)])

        return call

    for kind in ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter"):
        if hasattr(collectives, kind):
            _replace(getattr(collectives, kind), "__call__", scattered)


FAULTS: dict[str, Callable[[Build], Build | None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == __name__
}
FAULTS |= {
    kind: _choosing(kind) for kind in ("mask", "nonzero", "branch")
}  # no faults, but what no rehearsal can follow
