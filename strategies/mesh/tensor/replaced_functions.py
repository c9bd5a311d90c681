"""Functions of torch on DTensors for which torch's rules gather what no process needs: replaced while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....core.torch_private import tree_map_only
from .cross_entropy import divided_cross_entropy
from .gathered import tell_gathered

_NO_RULE = "Sharding propagation failed"
"""In the message of the error that every process gets before anything was computed."""


class DTensorFunctions(TorchFunctionMode):
    """Context in which some functions of torch communicate less on DTensors; their results are the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        own = _FUNCTIONS.get(function)
        if own is not None and (result := own(*args, **kwargs)) is not NotImplemented:
            return result
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if _NO_RULE not in str(error) or "out" in kwargs or function.__name__.endswith("_"):
                raise
            tell_gathered(f"calls {function.__name__} on a shard that torch has no rule for", "another style")
        return function(*_whole(args), **_whole(kwargs))


def _whole(values: Any) -> Any:
    def gather(tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=(Replicate(),) * tensor.device_mesh.ndim)

    return tree_map_only(DTensor, gather, values)


def _chunk(tensor: Any, chunks: int, dim: int = 0) -> Any:
    return _apart(tensor, chunks, dim)


def _split(tensor: Any, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Any:
    return _split_of(tensor, split_size_or_sections, dim)


def _split_method(tensor: Any, split_size: int | Sequence[int], dim: int = 0) -> Any:
    return _split_of(tensor, split_size, dim)


def _split_of(tensor: Any, sizes: int | Sequence[int], dim: int) -> Any:
    if not isinstance(tensor, DTensor):
        return NotImplemented
    whole = tensor.shape[dim]
    if isinstance(sizes, int):
        return _apart(tensor, whole // sizes, dim) if sizes and whole % sizes == 0 else NotImplemented
    return _apart(tensor, len(sizes), dim) if len(set(sizes)) == 1 else NotImplemented


def _apart(tensor: Any, count: int, dim: int) -> Any:
    """Matrices that were joined, each of which every process has a shard of: a shard of each, without communication.

    ``split`` of DTensors gathers them. A dimension of their number leaves nothing to gather, in backward neither.
    """
    if not isinstance(tensor, DTensor) or count < 2:
        return NotImplemented
    dim %= max(tensor.ndim, 1)
    layouts = [placement for placement in tensor.placements if getattr(placement, "dim", None) == dim]
    if not layouts or tensor.shape[dim] % count:
        return NotImplemented
    if len(layouts) > 1 or getattr(layouts[0], "split_factor", 1) != count:
        tell_gathered(f"splits features of which each process has a shard into {count}", f'"packed_colwise:{count}"')
        return NotImplemented
    return tensor.unflatten(dim, (count, -1)).unbind(dim)  # type: ignore[no-untyped-call]


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: divided_cross_entropy,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.split: _split,
    Tensor.split: _split_method,
}
