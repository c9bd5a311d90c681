"""Operations on DTensors that torch's rules compute wrongly, slowly or not at all."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....core.base.errors import StrategyError
from ....core.base.trees import tree_map_only
from ....core.comm import collectives as dist
from ....core.model.logits import LOOKS, Logits
from ....core.torch_compat.dtensor_private import (
    DRAWING_ATTENTION,
    differentiates_twice,
    dtensor_handlers,
    keep_derivatives,
    relax_views,
    replicate_without_rule,
)
from ....core.torch_compat.torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, has_values, tree_flatten
from ...divided import by_torch, check_writable, compute_whole
from ..axis import own_random_numbers

# Say once where a model gathers activations that its plan has divided: right, and slower than it could be.


_logger = logging.getLogger("flextrain")
_told: set[tuple[str, str]] = set()


@functools.cache
def register_gathering() -> None:
    """Let operations on DTensors gather what they cannot keep divided; once in a process. Derivatives of derivatives go through."""
    keep_derivatives()
    relax_views(_tell_view)
    replicate_without_rule(_tell_no_rule)


def _tell_view(schema: Any) -> None:
    shape, wanted = tuple(schema.args_schema[0].shape), schema.args_schema[1]
    tell_gathered(f"views {shape} as {tuple(wanted)}, which its plan cuts elsewhere", "another style")


def _tell_no_rule(schema: Any) -> None:
    tell_gathered(f"uses {schema.op}, which torch divides in no way", "another style")


def tell_gathered(what: str, instead: str) -> None:
    """Log that a module communicates because of what it does with divided features; once for each class of module.

    Args:
        what: what it does, after the name of the module.
        instead: the style of a plan with which it might not.
    """
    where = _calling_module()
    if (where, what) not in _told:
        _told.add((where, what))
        _logger.warning(f"plan: {where} {what}; right but slow, activations are gathered, {instead} may be faster")


def _calling_module() -> str:
    """Return the class and line of the innermost ``forward`` that is running and is not torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            return f"{type(owner).__name__}.{frame.f_code.co_name} (line {frame.f_lineno})"
        frame = frame.f_back
    return "backward"


# Cross entropy of logits that are divided by their classes: no process ever has those of all classes.


def divided_cross_entropy(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy`` of a DTensor on a mesh of one dimension.

    The processes exchange three numbers for each sample, the largest logit, the sum of the exponentials and the logit of
    the target, in place of the logits of all classes.

    Returns:
        NotImplemented if the logits are not divided by classes, or the target is not indices.

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
    """
    if not isinstance(logits, DTensor) or logits.device_mesh.ndim != 1 or logits.ndim == 0:
        return NotImplemented
    dim = min(logits.ndim - 1, 1)  # (classes,), or (samples, classes, ...)
    if (
        logits.placements != (Shard(dim),)
        or target.is_floating_point()
        or size_average is not None
        or reduce is not None
    ):
        return NotImplemented
    mesh, classes = logits.device_mesh, logits.shape[dim]
    local = logits.to_local().movedim(dim, -1)
    each = -(-classes // mesh.size())  # as torch.chunk divides
    first = min(each * mesh.get_local_rank(), classes)
    indices = _whole(target)
    weights = None if weight is None else _whole(weight)
    losses = _Losses.apply(local, indices, weights, first, classes, ignore_index, label_smoothing, mesh.get_group())
    if reduction == "sum":
        losses = losses.sum()
    elif reduction == "mean":
        counted = indices != ignore_index
        shares = counted if weights is None else weights[indices.clamp(0, classes - 1)] * counted
        losses = losses.sum() / shares.sum()
    if not torch.is_autocast_enabled(mesh.device_type):  # under which torch's returns float32, as it is here
        losses = losses.to(logits.dtype)
    return DTensor.from_local(losses, mesh, (Replicate(),), run_check=False)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Losses(torch.autograd.Function):
    """The loss of every sample, from this process's logits in the last dimension."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, first: int, classes: int, ignored: int,
        smoothing: float, group: Any,
    ) -> Tensor:  # fmt: skip
        # Half precision is not enough for sums of exponentials.
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        count, counted = values.shape[-1], target != ignored
        at = target.masked_fill(~counted, 0)
        outside = (at < 0) | (at >= classes)
        # An accelerator would wait for the host.
        if target.device.type == "cpu" and has_values(outside) and outside.any():
            raise IndexError(f"Target {int(at[outside][0])} is out of bounds.")
        largest = values.amax(-1) if count else values.new_full(values.shape[:-1], -torch.inf)
        dist.all_reduce(largest, "max", group)
        shifted = values - largest.unsqueeze(-1)
        here = (at >= first) & (at < first + count)
        index = torch.where(here, at - first, 0).unsqueeze(-1)
        logit = shifted.gather(-1, index).squeeze(-1) * here if count else torch.zeros_like(largest)
        own = torch.ones_like(shifted[..., :1]) if weight is None else weight[first : first + count].to(values.dtype)
        sums = torch.stack([shifted.exp().sum(-1), logit, (shifted * own).sum(-1)])
        dist.all_reduce(sums, "sum", group)
        log_sum = sums[0].log()
        of_class = torch.ones_like(log_sum) if weight is None else weight[at.clamp(0, classes - 1)].to(values.dtype)
        of_target = (1 - smoothing) * of_class * counted
        of_all = smoothing / classes * counted.to(values.dtype)  # a number times a mask has the default dtype
        total = float(classes) if weight is None else weight.sum().to(values.dtype)
        loss = of_target * (log_sum - sums[1]) + of_all * (total * log_sum - sums[2])
        ctx.save_for_backward(
            logits, largest + log_sum, index, of_target, of_target * here, of_all, of_all * total, own
        )
        return loss.masked_fill(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StrategyError(
                "model: asks for gradients of gradients (create_graph=True) through cross_entropy of logits of which processes have "
                'shards; give the module that computes them the style "colwise_gather_output"'
            )
        logits, log_sum, index, of_target, of_own_target, of_all, of_all_total, own = ctx.saved_tensors
        chance = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp()
        found = chance * (of_target + of_all_total).unsqueeze(-1) - of_all.unsqueeze(-1) * own
        if logits.shape[-1]:
            found.scatter_add_(-1, index, -of_own_target.unsqueeze(-1))
        found *= gradients[0].to(found.dtype).unsqueeze(-1)
        return found.to(logits.dtype), *[None] * 7


_NO_RULE = ("Sharding propagation failed", "does not have a sharding strategy", "does not support _StridedShard",
            "in-place operations that require placement changes", "from one partial type",
            "view size is not compatible")  # fmt: skip
"""In the messages of errors that every process gets before anything was computed; the last three of torch 2.11,
for ``rms_norm`` of divided features, the sum of a pending sum and a pending mean, and ``linear`` of divided positions."""


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
        if Logits in types and function not in LOOKS:  # they are computed in this call
            with self:
                return Logits.__torch_function__(function, types, args, kwargs)
        if not differentiates_twice() and keeps_graph_of_backward(function, args, kwargs):
            raise StrategyError(
                f"model: asks for gradients of gradients (create_graph=True), which torch {torch.__version__} computes wrongly "
                "for tensors of which processes have shards; take torch 2.15, or leave out strategy.tp"
            )
        if function is Tensor.backward:
            return backward_within(self, *args, **kwargs)
        if function is functional.embedding:
            check_lookup(*args, **kwargs)
        own = _FUNCTIONS.get(function)
        if own is not None and (result := own(*args, **kwargs)) is not NotImplemented:
            return result
        writes = "out" in kwargs or _writes(function)
        args, kwargs = _joined(args, kwargs, writes=_writes(function))
        if writes and args and isinstance(args[0], DTensor):
            check_writable(args[0], function.__name__)
        try:
            found = function(*args, **kwargs)
            return reduced_embedding(found, sequence=self._sequence) if function is functional.embedding else found
        except (RuntimeError, AssertionError) as error:
            if writes or function in _BACKWARD:  # nothing is repeated that has changed anything, or may have begun to
                raise
            if not any(text in str(error) for text in _NO_RULE):
                raise
            tell_gathered(f"calls {function.__name__} on a shard that torch has no rule for", "another style")
        return _on_whole(function, args, kwargs)


def as_replicated(mesh: DeviceMesh, values: Any) -> Any:
    """Return ``values`` with every ordinary tensor as a replicated DTensor."""

    def replicate(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return cast(Tensor, DTensor.from_local(tensor, mesh, (Replicate(),) * mesh.ndim, run_check=False))

    return tree_map_only(torch.Tensor, replicate, values)


def _joined(args: Any, kwargs: Any, *, writes: bool) -> Any:
    """Arguments of one operation, all DTensors or none: what computed an ordinary tensor takes no gradient that is a DTensor."""
    mesh, ordinary = None, False
    for each in (*args, *kwargs.values()):
        for one in each if type(each) in (list, tuple) else (each,):
            if isinstance(one, DTensor):
                mesh = one.device_mesh
            elif isinstance(one, Tensor) and one.requires_grad:
                ordinary = True
    if mesh is not None and writes and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
        # The memory is that of an ordinary tensor, which others may have too.
        return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
    if mesh is None or writes or not ordinary or not torch.is_grad_enabled():
        return args, kwargs
    return tree_map_only(Tensor, lambda one: as_replicated(mesh, one) if one.requires_grad else one, (args, kwargs))


def keeps_graph_of_backward(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call asks for gradients that can be differentiated again."""
    position = {Tensor.backward: 3, torch.autograd.grad: 4}.get(function)
    return position is not None and bool(kwargs.get("create_graph", args[position] if len(args) > position else False))


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
        torch.autograd.backward((edge,), gradient, *args, **kwargs)  # torch 2.6 takes an edge alone for two tensors


def computes_on_dtensors() -> bool:
    """Whether a model runs whose layers give each other DTensors."""
    return any(_entered)


_entered: list[bool] = []


def check_lookup(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **options: Any,
) -> None:
    """Raise what a lookup in a table of which processes have parts would leave out.

    An index beyond the table is on no process, and torch gives zeros for what other processes have. A table without memory is
    looked up in instead, whose error is that of one device, and which nobody waits for where the device makes it.

    Raises:
        StrategyError: the lookup changes the table.
        IndexError: an index is not in the table.
    """
    if not isinstance(weight, DTensor):
        return
    if max_norm is not None:
        raise StrategyError(
            "model: Embedding(max_norm=...) writes to its table in forward, which tensor parallelism would lose; leave it out"
        )
    if any(placement.is_shard(0) for placement in weight.placements):
        indices = input.to_local() if isinstance(input, DTensor) else input
        functional.embedding(indices.flatten(), torch.zeros(1, 1, device=indices.device).expand(len(weight), 1))


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


# Operations that torch's rules for DTensors compute wrongly: computed from whole tensors on every process.
#
# Found with torch 2.15, by every operation of a list with every layout against one device. Some of them raise, and
# some give other numbers without an error: the mean of squared differences has a gradient that is as many times too
# large as there are shards, a convolution of a pending sum adds its bias for every process, and ``item`` gives a
# summand of a pending sum.


_ATEN = torch.ops.aten
WHOLE = (
    _ATEN.convolution.default, _ATEN.convolution_backward.default,
    _ATEN.native_group_norm.default, _ATEN.native_group_norm_backward.default,
    _ATEN.mse_loss.default, _ATEN.mse_loss_backward.default,
    _ATEN.smooth_l1_loss.default, _ATEN.smooth_l1_loss_backward.default,
    _ATEN.huber_loss.default, _ATEN.huber_loss_backward.default,
    _ATEN.binary_cross_entropy.default, _ATEN.binary_cross_entropy_backward.default,
    _ATEN.soft_margin_loss.default, _ATEN.soft_margin_loss_backward.default,
)  # fmt: skip


@functools.cache
def register_whole_operations() -> None:
    """Compute these operations from whole tensors wherever DTensors are used; once in a process."""
    handlers = dtensor_handlers()
    handlers.update(dict.fromkeys(WHOLE, compute_whole))
    # Autograd writes the gradient of what was written to a view into this, by the strides of the whole tensor.
    handlers[_ATEN.new_empty_strided.default] = _make_whole


@torch.no_grad()
def _make_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    found = operation(tensor.to_local(), *args[1:], **kwargs)
    return DTensor.from_local(found, tensor.device_mesh, (Replicate(),) * tensor.device_mesh.ndim, run_check=False)


# The layouts in which torch's attention on the CPU may be divided; DTensor knows only those of accelerators.


@functools.cache
def register_cpu_attention() -> None:
    """Teach DTensor that samples and heads are independent in attention on the CPU; once in a process."""
    independent = (Replicate(), Shard(0), Shard(1))  # (samples, heads, length, width)

    @register_sharding(CPU_ATTENTION)  # type: ignore[untyped-decorator]
    def forward(
        query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return [([one, one], [one, one, one, None, None, *_mask(attn_mask, one)]) for one in independent]

    @register_sharding(CPU_ATTENTION_BACKWARD)  # type: ignore[untyped-decorator]
    def backward(
        grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool, *,
        attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return [([one] * 3, [one] * 6 + [None, None, *_mask(attn_mask, one)]) for one in independent]


def _mask(mask: Any, of_query: Placement) -> list[Placement | None]:
    """The layouts of a mask and a scale; a mask may have the size 1 where there are several samples or heads."""
    if mask is None:
        return []
    dim = getattr(of_query, "dim", None)
    is_shared = dim is None or len(mask.shape) < 4 or mask.shape[dim] == 1
    return [Replicate() if is_shared else of_query, None]


# Attention by kernels that draw the masks of dropout themselves; other random numbers are those of one device everywhere.


@functools.cache
def register_attention() -> None:
    """Let the heads of each process be dropped apart; once in a process."""
    dtensor_handlers().update(dict.fromkeys(DRAWING_ATTENTION, _attend))


@torch.no_grad()
def _attend(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention by a kernel that draws its masks itself: other ones for the heads of every process."""
    query = args[0]
    position = [argument.name for argument in operation._schema.arguments].index("dropout_p")
    apart: AbstractContextManager[Any] = nullcontext()
    if (args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)) > 0.0:
        # Torch's rule must not gather what would then differ, or divide what would repeat.
        heads = query.placements == (Shard(1),)
        layout = (Shard(1) if heads else Replicate(),) * query.device_mesh.ndim
        args = (*(each.redistribute(placements=layout) for each in args[:3]), *args[3:])
        if heads:
            apart = own_random_numbers(query.device_mesh.device_type, query.device_mesh.get_local_rank())
    with apart:
        return by_torch(operation, args, kwargs)
