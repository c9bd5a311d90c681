"""Make a whole model of DTensors: whatever the plan, its results are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ....core.dtensor_private import using_in_place
from ....core.errors import StrategyError
from ....core.torch_private import version_of
from ....core.trees import map_tensors, tree_map_only
from ..replaced_forward import replace_forward
from .styles import Style


def check_styles(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Raise StrategyError if a parameter cannot be divided over ``size`` processes as its style says."""
    for name, style in styles.items():
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
            why = style.unfit(
                model.get_submodule(name), parameter, style.placement(model.get_submodule(name), key, parameter), size
            )
            if why is not None:
                raise StrategyError(f"strategy.plan: model.{name}.{key}: its {why}; choose another style or tp")


def distribute_model(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style], *, sequence: bool = False
) -> None:
    """Replace every parameter and buffer by a DTensor, sharded by the style of its module, replicated without one.

    DTensor derives the layout of every activation, and communicates where an operation needs it. Therefore a plan decides
    how fast a model is, and never what it computes.

    Args:
        styles: by name of the module.
        sequence: outside of divided modules, activations are divided along dimension 1.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            continue  # an axis before this one has divided it
        style = styles.get(name) or Style()
        for key, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) not in made:  # a tied one has the style of the first module that has it
                layout = style.placement(module, key, parameter)
                placed = distribute_tensor(parameter.detach(), mesh, [layout], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            setattr(module, key, made[id(parameter)])
        for key, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, key, distribute_tensor(buffer, mesh, (Replicate(),), src_data_rank=None))
        if style.local:
            replace_forward(module, partial(_LocalForward, module, mesh))
        inputs = style.inputs
        if inputs is None and isinstance(module, nn.MultiheadAttention):
            inputs = Replicate()  # it views what it has projected in ways that shards of positions do not allow
        if inputs is not None:
            module.register_forward_pre_hook(partial(_lay_out_inputs, inputs), with_kwargs=True)
        if style.sums or isinstance(module, nn.MultiheadAttention):  # whose forward does not call its last projection
            module.register_forward_hook(partial(_reduce, sequence))  # nothing may see a part of a sum
        elif style.outputs is not None:
            module.register_forward_hook(partial(_lay_out_output, style.outputs))


def _laid_out(values: Any, layout: Placement) -> Any:
    dim = getattr(layout, "dim", -1)

    def lay_out(tensor: DTensor) -> DTensor:
        if tensor.ndim <= dim or not tensor.is_floating_point():
            return tensor
        return _gathered_once(tensor) if isinstance(layout, Replicate) else tensor.redistribute(placements=(layout,))

    return tree_map_only(DTensor, lay_out, values)


def _gathered_once(tensor: DTensor) -> DTensor:
    """Return all of a tensor; the same for all modules that take it, such as those of queries, keys and values."""
    if torch.compiler.is_compiling() or tensor.is_inference():  # a graph has no attributes, and the latter no version
        return tensor.redistribute(placements=(Replicate(),))
    version, found = getattr(tensor, _GATHERED, (None, None))
    if found is None or version != version_of(tensor) or found.requires_grad != _has_graph(tensor):
        found = tensor.redistribute(placements=(Replicate(),))
        setattr(tensor, _GATHERED, (version_of(tensor), found))
    return cast(DTensor, found)


_GATHERED = "_flextrain_gathered"


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _lay_out_inputs(layout: Placement, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _laid_out(args, layout), _laid_out(kwargs, layout)


def _lay_out_output(layout: Placement, module: nn.Module, args: Any, output: Any) -> Any:
    return _laid_out(output, layout)


def _reduce(sequence: bool, module: nn.Module, args: Any, output: Any) -> Any:
    def reduce(tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=(Shard(1) if sequence and tensor.ndim > 2 else Replicate(),))

    return tree_map_only(DTensor, reduce, output)


class _LocalForward:
    """Takes the place of a module's forward, which computes with ordinary tensors: all of each."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, forward: Callable[..., Any]) -> None:
        self._module, self._mesh, self._forward = module, mesh, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {
            **dict(self._module.named_parameters(recurse=False)),
            **dict(self._module.named_buffers(recurse=False)),
        }
        with using_in_place(self._module, as_local(tensors)):
            output = self._forward(*as_local(args), **as_local(kwargs))
        return as_replicated(self._mesh, output)


def as_replicated(mesh: DeviceMesh, values: Any) -> Any:
    """Return ``values`` with every ordinary tensor as a replicated DTensor."""

    def replicate(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return cast(Tensor, DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False))

    return tree_map_only(torch.Tensor, replicate, values)


def as_local(values: Any, *, but_shards: bool = False) -> Any:
    """Return ``values`` with the whole of every DTensor.

    Args:
        but_shards: leave those of which processes have shards, such as logits by class, as they are.
    """

    def whole(tensor: DTensor) -> Tensor:
        if but_shards and any(hasattr(placement, "dim") for placement in tensor.placements):
            return tensor
        found: Tensor = tensor.full_tensor()
        return found.clone() if found.ndim == 0 else found  # a loss that is no view may be changed in place

    return map_tensors(DTensor, whole, values)
