"""Gradient norm, clipping, averaging over processes, and zero gradients, for ordinary tensors and DTensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..core.base.errors import ConfigError
from ..core.comm import collectives as dist
from ..core.comm.collectives import all_reduce
from ..core.comm.topology import DataShard
from ..core.torch_compat.torch_private import (
    call_first,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    has_values,
    with_values,
)


def gradients(param_groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The gradients of all parameters that have one, settled."""
    return [cast(Tensor, p.grad) for p in settled(p for group in param_groups for p in group["params"])]


def settled(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that have a gradient; that of a DTensor gets the layout of its parameter if it has another one.

    It may be a pending sum over processes, whose summands cannot be clipped.
    """
    found = [p for p in parameters if p.grad is not None]
    for one in found:
        if isinstance(one, DTensor) and isinstance(one.grad, DTensor) and one.grad.placements != one.placements:
            one.grad = one.grad.redistribute(placements=one.placements)
    return found


def by_layout(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """The parameters that have a gradient, in groups whose gradients have the same layout over processes and devices.

    One foreach call cannot take ordinary tensors and DTensors, or DTensors of two meshes.
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_layout(parameter.grad), []).append(parameter)
    return list(groups.values())


def total_norm(grads: list[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """The norm of all gradients as if they were one vector on one device; 0-dim, without synchronisation.

    One foreach call cannot take ordinary tensors and DTensors, so each layout has its norm and these are combined.
    Raises RuntimeError on every process for a non-finite norm if ``error_if_nonfinite``, which waits for the device.
    """
    norms = [_norm(group, norm_type) for group in _alike(grads)]
    norms = [norm.to(norms[0].device) for norm in norms]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite:
        require_finite(total, norm_type)
    return total


def require_finite(total: Tensor, norm_type: float) -> None:
    """Raise RuntimeError if a total norm is not finite; this waits for the device."""
    if has_values(total) and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad: the total norm of order {norm_type} is {total.item()}, gradients were not clipped"
        )


def average(parameters: list[Tensor], data: DataShard) -> None:
    """Replace the gradients of replicated parameters by their means over the shards of the data.

    The gradient of a parameter that a process did not use counts as zero there, as under DistributedDataParallel.
    """
    # A parameter that no process used must not get a gradient, or weight decay would change it. The flags are on the
    # CPU, so that no device waits.
    if data.count > 1:
        average_used(parameters, most([p.grad is not None for p in parameters], data), data)


def most(flags: Sequence[bool], data: DataShard) -> list[int]:
    """Return the flags with 1 where one of the processes has True, and 0 elsewhere; a collective."""
    with with_values():
        own = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        return all_reduce(own, "max", data.group).tolist()


def average_used(parameters: list[Tensor], used: Sequence[int], data: DataShard) -> None:
    """See ``average``; ``used`` says which of the parameters a process has used."""
    for parameter, is_used in zip(parameters, used, strict=True):
        if is_used and parameter.grad is None:
            parameter.grad = parameter.new_zeros(parameter.shape)
    data.average([local for p in settled(parameters) for local in _local([cast(Tensor, p.grad)])])


def clip_by_norm(
    grads: list[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor | None:
    """Scale all gradients so that their total norm is at most ``max_norm``; return the norm before, None without any.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """
    if not grads:
        return None
    total = total_norm(grads, norm_type, error_if_nonfinite)
    scale_down(grads, total, max_norm)
    return total


def scale_down(grads: list[Tensor], total: Tensor, max_norm: float) -> None:
    """Scale gradients whose total norm is ``total`` so that it is at most ``max_norm``."""
    # torch.nn.utils.clip_grads_with_norm_ is not used: it collects the gradients again and dispatches on DTensors,
    # takes up to twice as long, and torch 2.6 does not scale those that are Partial.
    # The factor stays on the device; a maximum of 1 replaces a branch on its value.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    multiply(grads, factor)


def clip_by_value(grads: list[Tensor], clip_value: float) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value]."""
    for group in _alike(grads):
        if group[0].is_sparse:
            raise ConfigError(
                'clip_grad.type: "value" is not possible for sparse gradients, give "norm", or sparse=False to the layer'
            )
        local = _local(group)
        foreach_clamp_min_(local, -clip_value)
        foreach_clamp_max_(local, clip_value)


def multiply(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a number on the device, in place."""
    for group in _alike(grads):
        foreach_mul_(_local(group), factor.to(group[0].device))


@contextmanager
def giving_nothing(loss: Tensor, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Context with a loss of zero whose backward gives every parameter a gradient of exactly zero.

    A mean over no items is 0/0, and its gradient stays NaN whatever factor the loss gets. Backward runs through the
    whole graph nevertheless, because other processes wait for its collectives.

    Args:
        loss: 0-dim, of any value.
        parameters: those of the model; needed for code that runs its own backward, whose graph the loss does not show.
    """
    leaves = {id(leaf): leaf for leaf in (*_leaves(loss), *parameters) if leaf.requires_grad}
    handles = [call_first(leaf, torch.zeros_like) for leaf in leaves.values()]
    try:
        yield torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0
    finally:
        for handle in handles:
            handle.remove()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaf tensors from which a loss was computed; under FSDP they are not the model's parameters."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead += [before for before, _ in node.next_functions]


def _norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The total norm of gradients of one layout."""
    first = grads[0]
    if first.is_sparse:  # torch 2.6 has no norm of them; a row that stands in one several times is the sum
        grads = [grad.coalesce().values() for grad in grads]
        first = grads[0]
    if math.isinf(norm_type):
        # torch raises for the maximum of no elements, and the shard of an unevenly sharded tensor may be empty.
        parts = _local(grads)
        filled = [part for part in parts if part.numel()]
        largest = torch.nn.utils.get_total_norm(filled, norm_type) if filled else parts[0].new_zeros(())
        if not isinstance(first, DTensor):
            return largest
        layout = [Replicate() if placement.is_replicate() else Partial("max") for placement in first.placements]
        return DTensor.from_local(largest, first.device_mesh, layout).full_tensor()
    if not isinstance(first, DTensor) or not norm_type or any(one.is_partial() for one in first.placements):
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # DTensor reduces over one dimension of the mesh after the other too, and warns of it.
    norm = torch.nn.utils.get_total_norm(_local(grads), norm_type)
    powers = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** norm_type
    for axis, placement in enumerate(first.placements):
        if not placement.is_replicate():
            all_reduce(powers, "sum", first.device_mesh.get_group(axis))
    return (powers ** (1 / norm_type)).to(norm.dtype)


@torch.no_grad()
def _local_parts(grads: list[DTensor]) -> list[Tensor]:
    return [grad.to_local() for grad in grads]  # several times as fast without an autograd graph


def _local(grads: list[Tensor]) -> list[Tensor]:
    """The local shards of gradients of one layout."""
    return _local_parts(cast(list[DTensor], grads)) if isinstance(grads[0], DTensor) else grads


def _alike(grads: list[Tensor]) -> list[list[Tensor]]:
    """Gradients in groups of one layout and device, so that one foreach call can take each group."""
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(_layout(grad), []).append(grad)
    return list(groups.values())


def _layout(grad: Tensor) -> Any:
    return (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.is_sparse, grad.device


# ModelGroup: gradient norms and overflows over the processes that share one replica of a model.


class ModelGroup:
    """Combines gradient norms and overflows of processes that hold different parameters of one replica of a model.

    Args:
        group: the process group, ``Topology.model``.
        elsewhere: parameters of the optimizer that a lower rank of the group holds too; that rank counts them.
        dtype: of the norms that are sent, the same on all processes.
        device: of the gradients.
    """

    def __init__(self, group: Any, elsewhere: Collection[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.group, self.dtype, self.device = group, dtype, device
        self._elsewhere = {id(parameter) for parameter in elsewhere}

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients, 0-dim on the device; a collective of the group."""
        grads = [p.grad for p in parameters if p.grad is not None and id(p) not in self._elsewhere]
        own = total_norm(grads, norm_type) if grads else torch.zeros((), device=self.device)
        parts = dist.all_gather(own.to(self.device, self.dtype), self.group)
        total: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        return total

    def clip(
        self, parameters: Collection[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients so that their norm over the group is at most ``max_norm``; return the norm before."""
        total = self.total_norm(parameters, norm_type)
        if error_if_nonfinite:
            require_finite(total, norm_type)
        scale_down([p.grad for p in parameters if p.grad is not None], total, max_norm)
        return total

    def any(self, flag: Tensor) -> Tensor:
        """Return a number that is above 0 if ``flag``, 0-dim, is above 0 on any process of the group; a collective."""
        return dist.all_reduce(flag.clone(), "max", self.group)
