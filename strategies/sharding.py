"""Parameters and optimizers that strategies cut into shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor.placement_types import Placement

from ..core.base.errors import StrategyError, unchecked
from ..core.base.tensors import QUANTISERS
from ..core.comm import collectives as dist
from ..core.torch_compat.torch_private import has_values, storage_key, tables_of, with_values
from ..optim.trial import Samples, why_not_dtensors, why_not_flat_shards
from ..optim.wrapper import OptimWrapper

_logger = logging.getLogger("flextrain")


def check_real(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if a parameter is complex, whose shards would be joined with those of real ones, or quantised.

    Also if two of them share memory, which their shards would not.
    """
    check_not_quantised(model, strategy)
    check_apart(model, strategy)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise StrategyError(
                f"model.{name}: is {str(parameter.dtype).removeprefix('torch.')}, and {strategy} shards real parameters "
                "only; hold it as pairs of real numbers (torch.view_as_real), make it a buffer, or choose DDPStrategy"
            )


def check_dense(model: nn.Module, strategy: str, instead: str = "choose DDPStrategy") -> None:
    """Raise StrategyError if a layer gives sparse gradients, which have no elements to divide or to join."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise StrategyError(
                f"model.{name}: has sparse=True, and {strategy} takes dense gradients only; give sparse=False, freeze it, or {instead}"
            )


def check_tables(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if a layer writes to its table in forward: a copy of it, or rows that other processes keep.

    Log those whose gradients depend on how samples are divided.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.scale_grad_by_freq and module.weight.requires_grad:
            _logger.warning(
                f"model.{name}: has scale_grad_by_freq=True, which counts words in the samples of each process and micro-batch; gradients differ "
                "from those of one device with all samples at once"
            )
        if module.max_norm is not None:
            raise StrategyError(
                f"model.{name}: has max_norm={module.max_norm}, by which forward writes to its rows, and {strategy} would lose that or "
                "make processes differ; leave it out, or train on one device"
            )


FLOAT8_WIDTHS = 16
"""Kernels that multiply float8 need widths that this number divides."""


def computes_in_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer of torchao that computes in float8, which needs no import of torchao."""
    return any(kind.__module__ == "torchao.float8.float8_linear" for kind in type(module).__mro__)


def has_shards(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be divided: it has a dimension, and elements."""
    return parameter.ndim > 0 and parameter.numel() > 0


def check_apart(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if two parameters begin at the same memory, as ``Parameter(other.data)`` does.

    Also if a buffer or another tensor that a module has does, as ``weight.detach()``: it would not change with the parameter.
    """
    first: dict[tuple[int, Any], str] = {}
    for name, parameter in model.named_parameters():
        position = (storage_key(parameter), parameter.storage_offset())
        if parameter.numel() and (other := first.setdefault(position, name)) != name:
            raise StrategyError(
                f"model.{name}: is another parameter than model.{other} in the same memory, which {strategy} cannot keep; assign the "
                "same parameter to both, or clone() its values"
            )
    own = {*map(id, model.parameters())}
    for name, module in model.named_modules():
        for key, tensor in _other_tensors(module):
            shared = first.get((storage_key(tensor), tensor.storage_offset()))
            if shared is not None and id(tensor) not in own and model.get_parameter(shared).requires_grad:
                raise StrategyError(
                    f"model.{name}{'.' if name else ''}{key}: is another tensor than model.{shared} in the same memory, and would keep the "
                    f"values of now under {strategy}; clone() it, or read the parameter in forward"
                )


def _other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a module has besides parameters, also in lists, tuples and dicts; not those that it computes from parameters."""
    for key, value in chain(module.named_buffers(recurse=False), vars(module).items()):
        if f"{key}_orig" in tables_of(module)[0]:  # torch.nn.utils.spectral_norm
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for each in values:
            if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided and each.numel():
                yield key, each


def check_not_quantised(model: nn.Module, strategy: str) -> None:
    """Raise StrategyError if a parameter is of a package whose tensors are more than numbers in rows."""
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.partition(".")[0] in QUANTISERS:
            if hasattr(parameter, "fsdp_pre_all_gather"):
                raise StrategyError(
                    f"model.{name}: is a {type(parameter).__name__}, which torchao makes with enable_fsdp_float8_all_gather=True; leave "
                    "that out, FSDPStrategy gathers weights of Float8Linear in float8 by itself"
                )
            raise StrategyError(
                f"model.{name}: is quantised ({type(parameter).__name__}), which {strategy} cannot share between processes; train "
                "on one device, or leave the weights as they are"
            )


def make_contiguous(model: nn.Module) -> None:
    """Give parameters in another order of memory, such as ``channels_last``, the usual one; log their names.

    Values, shapes and results do not change.
    """
    names = []
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
            names.append(name)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _logger.warning(
            f"model.{names[0]}{more}: memory_format (channels_last or another) is not kept by a strategy that shards "
            "parameters, they are stored contiguously; channels_last inputs still make layers compute in that format"
        )


# ShardedOptimizers: check that optimizers can train DTensors, and create their state in the right layout.


_ROWS_EACH = 16


class ShardedOptimizers:
    """The optimizers of parameters that are sharded in their first dimension over the last dimension of a mesh.

    Args:
        mesh: the device mesh; if it has two dimensions, the first is for replicas of the shards.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        self._layouts: dict[int, dict[tuple[int, str], tuple[Placement, ...]]] = {}

    def check(self, wrapper: OptimWrapper) -> None:
        """Try the optimizer on small parameters sharded like the model's, unless it is known to work; a collective.

        Raises:
            StrategyError: on every process, if the result on any differs from that of whole parameters.
        """
        if wrapper.adapter.takes_shards:
            return
        if not all(has_values(p) for group in wrapper.param_groups for p in group["params"]):
            unchecked.warning(
                f"{wrapper.where}.optimizer: {type(wrapper.optimizer).__name__} was not tried on shards; a real run tries it before "
                "training, and may refuse it"
            )
            return
        # Not divisible by the number of processes, as parameters may be, but with a shard for every process.
        samples = Samples.like(wrapper.optimizer, rows=_ROWS_EACH * self._mesh.size(-1) - 1)
        reason, self._layouts[id(wrapper)] = why_not_dtensors(wrapper.make_another, samples, self._spread)
        if found := next((one for one in dist.all_gather_object(reason) if one is not None), None):
            raise StrategyError(
                f"{wrapper.where}.optimizer: {type(wrapper.optimizer).__name__} {found}; FSDP shards every "
                "parameter, choose AdamW, or DDPStrategy"
            )

    def _spread(self, whole: Tensor) -> Tensor:
        if whole.ndim == 0:
            return whole  # as FSDP leaves them
        size, index = self._mesh.size(-1), self._mesh.get_local_rank(-1)
        local = whole.chunk(size)[index].contiguous()
        spread = DTensor.from_local(
            local, self._mesh, self._placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return spread.to(whole.device)

    def empty_state(self, wrapper: OptimWrapper, parameter: Tensor, key: str, info: Any) -> Tensor | None:
        """Return an empty tensor of ``info.shape`` and ``info.dtype``, sharded like the optimizer's state ``key``.

        None if the optimizer's state is no DTensor.
        """
        placements = self._layouts.get(id(wrapper), {}).get((parameter.ndim, key))
        if placements is None or not isinstance(parameter, DTensor):
            return None
        made = empty_dtensor(info.shape, dtype=info.dtype, device_mesh=self._mesh, placements=placements)
        return torch.empty_like(made, device=parameter.device)


def check_divided(wrapper: OptimWrapper, what: str, instead: str) -> None:
    """Try an optimizer on small parameters of which it gets any elements, unless it is known to work.

    Args:
        wrapper: with its optimizer.
        what: what divides the parameters, for the message.
        instead: what to give otherwise, for the message.

    Raises:
        StrategyError: the result differs from that of whole parameters.
    """
    if wrapper.adapter.takes_shards:
        return
    with with_values():
        reason = why_not_flat_shards(wrapper.make_another, Samples.like(wrapper.optimizer))
    if reason is not None:
        raise StrategyError(
            f"{wrapper.where}.optimizer: {type(wrapper.optimizer).__name__} {reason}; {what}, choose AdamW, or {instead}"
        )
