"""Functions of torch on DTensors for which torch's rules gather what no process needs: replaced while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....core.errors import StrategyError
from ....core.torch_private import base_of, tree_flatten
from ....core.trees import tree_map_only
from .cross_entropy import divided_cross_entropy
from .gathered import tell_gathered

_NO_RULE = ("Sharding propagation failed", "does not have a sharding strategy", "does not support _StridedShard")
"""In the messages of errors that every process gets before anything was computed."""


class DTensorFunctions(TorchFunctionMode):
    """Context in which some functions of torch communicate less on DTensors; their results are the same.

    Args:
        sequence: the results of embeddings are divided along dimension 1.

    Attributes:
        throughout: layers give each other DTensors.
    """

    throughout: ClassVar[bool] = True

    def __init__(self, *, sequence: bool = False) -> None:
        super().__init__()
        self._sequence = sequence

    def __enter__(self) -> DTensorFunctions:
        _entered.append(self.throughout)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _entered.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if function is Tensor.backward:
            return backward_within(self, *args, **kwargs)
        if function is functional.embedding and _writes_to_table(*args, **kwargs):
            raise StrategyError(
                "model: Embedding(max_norm=...) writes to its table in forward, which tensor parallelism would lose; leave it out"
            )
        own = _FUNCTIONS.get(function)
        if own is not None and (result := own(*args, **kwargs)) is not NotImplemented:
            return result
        writes = "out" in kwargs or _writes(function)
        if writes and args and isinstance(args[0], DTensor):
            _check_writable(function, args[0])
        try:
            found = function(*args, **kwargs)
            return reduced_embedding(found, sequence=self._sequence) if function is functional.embedding else found
        except RuntimeError as error:
            if writes or function in _BACKWARD:  # nothing is repeated that has changed anything, or may have begun to
                raise
            if not any(text in str(error) for text in _NO_RULE):
                raise
            tell_gathered(f"calls {function.__name__} on a shard that torch has no rule for", "another style")
        return _on_whole(function, args, kwargs)


def backward_within(
    mode: TorchFunctionMode, loss: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any
) -> None:
    """``loss.backward(...)`` in a mode that has been asked for it: what backward computes again is as it was in forward."""
    if (
        gradient is not None
        or kwargs.get("inputs") is not None
        or len(args) > 2
        or not loss.requires_grad
        or loss.numel() != 1
    ):
        loss.backward(gradient, *args, **kwargs)  # type: ignore[no-untyped-call]
        return
    gradient, edge = torch.ones_like(loss), torch.autograd.graph.get_gradient_edge(loss)
    with mode:  # no mode is asked for the backward of an edge, and taken out while it answers
        torch.autograd.backward(edge, gradient, *args, **kwargs)


def computes_on_dtensors() -> bool:
    """Whether a model runs whose layers give each other DTensors."""
    return any(_entered)


_entered: list[bool] = []


def _writes_to_table(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **options: Any,
) -> bool:
    return max_norm is not None and isinstance(weight, DTensor)


def reduced_embedding(found: Any, *, sequence: bool) -> Any:
    """Return rows of a table whose entries are divided: summed over the processes, since torch can do that only once."""
    if not isinstance(found, DTensor) or not any(placement.is_partial() for placement in found.placements):
        return found
    layout = (Shard(1) if sequence and found.ndim > 2 else Replicate(),)
    found = found.redistribute(placements=layout)
    # Torch cannot turn a pending sum, which the gradient may be, into the layout of divided entries.
    return DTensor.from_local(
        found.to_local(), found.device_mesh, layout, run_check=False, shape=found.shape, stride=found.stride()
    )


def _on_whole(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with whole tensors, equal on all processes."""
    mesh = next(leaf.device_mesh for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DTensor))
    replicated = (Replicate(),) * mesh.ndim
    # Copies, because autograd lets nobody write to what full_tensor returns.
    args, kwargs = tree_map_only(DTensor, lambda tensor: tensor.full_tensor().clone(), (args, kwargs))
    found = function(*args, **kwargs)
    return tree_map_only(Tensor, lambda tensor: DTensor.from_local(tensor, mesh, replicated, run_check=False), found)


def _writes(function: Any) -> bool:
    """Whether a function changes its first argument: add_, __iadd__, __setitem__."""
    name: str = function.__name__
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))


def _check_writable(function: Any, tensor: DTensor) -> None:
    """Raise if an operation in place would write to a copy: some views of shards are gathered."""
    base = base_of(tensor)
    if not isinstance(base, DTensor):
        return
    with torch.no_grad():
        own, whole = (one.to_local().untyped_storage().data_ptr() for one in (tensor, base))
    if own != whole:
        raise StrategyError(
            f"model: {function.__name__} writes to a view of a tensor whose shards tensor parallelism has gathered for it, "
            "and would not change that tensor; compute a new one, as in q = q * scale"
        )


def _set_item(tensor: Any, index: Any, value: Any) -> Any:
    """``tensor[index] = value``: torch would write to a copy of what the index takes from several shards."""
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return NotImplemented
    whole = tensor.redistribute(placements=(Replicate(),) * tensor.device_mesh.ndim).clone()
    whole[index] = value
    tensor.copy_(whole)
    return None


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention with a mask that may differ between samples or heads: its layout follows the query's.

    Torch redistributes no keyword argument, and would give every process the mask of all.
    """
    if not isinstance(query, DTensor) or attn_mask is None or attn_mask.ndim < 3:
        return NotImplemented
    mesh, layout = query.device_mesh, query.placements[0]
    if query.ndim != 4 or layout not in (Shard(0), Shard(1)):
        layout = Replicate()
    while attn_mask.ndim < 4:
        attn_mask = attn_mask.unsqueeze(0)
    is_shared = isinstance(layout, Replicate) or attn_mask.shape[layout.dim] == 1

    def laid_out(tensor: Tensor, placement: Placement) -> Tensor:
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
        if tensor.placements == (placement,):
            return tensor
        return tensor.redistribute(placements=(placement,)).contiguous()

    query, key, value = (laid_out(tensor, layout) for tensor in (query, key, value))
    attn_mask = laid_out(attn_mask, Replicate() if is_shared else layout)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


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


_BACKWARD = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _set_item,
    functional.scaled_dot_product_attention: _attention,
    functional.cross_entropy: divided_cross_entropy,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.split: _split,
    Tensor.split: _split_method,
}
