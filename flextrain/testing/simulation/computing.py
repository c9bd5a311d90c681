"""What collectives compute, given the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .turns import SimulationError

_BITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_ELEMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    **_BITS,
}


def operation_name(operation: Any) -> str:
    """Name of a ReduceOp, such as "SUM"."""
    return str(getattr(operation, "op", operation).name)


def combined(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    """The tensors combined as ReduceOp ``operation`` says, in their order."""
    name = operation_name(operation)
    if name == "PREMUL_SUM":
        factor = operation.factor
        tensors, name = [tensor * factor for tensor in tensors], "SUM"
    if name not in _ELEMENTS:
        raise SimulationError(f"ReduceOp.{name} is not simulated")
    result = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        result = _ELEMENTS[name](result, tensor.detach())
    return result.div_(len(tensors)) if name == "AVG" else result


def all_reduce(given: list[list[Tensor]], operation: dist.ReduceOp) -> None:
    """Combine the tensors of each position, for all."""
    for tensors in zip(*given, strict=True):
        result = combined(tensors, operation)
        for tensor in tensors:
            tensor.detach().copy_(result.view_as(tensor))


def reduce(given: list[list[Tensor]], operation: dist.ReduceOp, root: int) -> None:
    """Combine the tensors of each position, for one rank."""
    for tensors in zip(*given, strict=True):
        tensors[root].detach().copy_(combined(tensors, operation))


def broadcast(given: list[list[Tensor]], root: int) -> None:
    """Copy the tensors of one rank to all others."""
    for number, tensors in enumerate(given):
        if number != root:
            for own, theirs in zip(tensors, given[root], strict=True):
                own.detach().copy_(theirs.detach().view_as(own))


def all_gather(given: list[list[tuple[Sequence[Tensor], Tensor]]]) -> None:
    """Copy the tensor of every rank into a list of each rank, for several tensors."""
    for inputs in zip(*given, strict=True):
        sent = [own.detach().clone() for _, own in inputs]  # an input may be a chunk of its own output
        for outputs, _ in inputs:
            for output, one in zip(outputs, sent, strict=True):
                output.detach().copy_(one.view_as(output))


def reduce_scatter(given: list[list[tuple[Tensor, Sequence[Tensor]]]], operation: dist.ReduceOp) -> None:
    """Combine the lists of all ranks, and copy one tensor of the result to each rank, for several lists."""
    for lists in zip(*given, strict=True):
        results = [combined([parts[number] for _, parts in lists], operation) for number in range(len(lists))]
        for (output, _), result in zip(lists, results, strict=True):
            output.detach().copy_(result.view_as(output))


def all_to_all(given: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
    """Copy tensor i of rank j's list into place j of rank i's list."""
    sent = [[one.detach().clone() for one in inputs] for _, inputs in given]
    for target, (outputs, _) in enumerate(given):
        for source, output in enumerate(outputs):
            found = sent[source][target]
            if found.numel() != output.numel():
                raise SimulationError(
                    f"all_to_all: rank {source} of the group sends {found.numel()} elements to rank {target}, which expects "
                    f"{output.numel()}"
                )
            output.detach().copy_(found.view_as(output))


def gather(given: list[tuple[Sequence[Tensor], Tensor]], root: int) -> None:
    """Copy the tensor of every rank into the list of one rank."""
    for output, (_, one) in zip(given[root][0], given, strict=True):
        output.detach().copy_(one.detach().view_as(output))


def scatter(given: list[tuple[Tensor, Sequence[Tensor]]], root: int) -> None:
    """Copy one tensor of the list of one rank to every rank."""
    for (output, _), one in zip(given, given[root][1], strict=True):
        output.detach().copy_(one.detach().view_as(output))
