"""Logits of a model of transformers that stay divided by the vocabulary for the model's own loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ....core.trees import map_tensors, tree_map_only
from .distribute import as_local, as_replicated
from .replaced_functions import DTensorFunctions

_LEFT = "_flextrain_left_model"  # of a DTensor: True, or all of it, once it was read
_LOOKS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "grad_fn", "is_leaf")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, torch.is_floating_point, torch.numel,
}  # fmt: skip
"""What of a DTensor is as of all of it."""


class DividedLogits:
    """The matrix that makes logits, of which each process has some rows; its model's own plan gathers what it returns.

    Where the model is called with labels, it returns a DTensor, from which the model computes its loss. Whatever reads these
    logits outside of the model gets all of them, see LogitsFunctions. Without labels they are all that is asked for, and gathered.

    Args:
        model: the model whose forward computes the loss.
        head: the matrix.
        mesh: of one dimension.
    """

    def __init__(self, model: nn.Module, head: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh, self._has_loss = mesh, False
        self._signature = inspect.signature(model.forward)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)
        head.register_forward_pre_hook(self._spread)
        head.register_forward_hook(self._gather)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # It stays for a backward that computes the matrix again.
        self._has_loss = self._signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = as_local(output, but_shards=True)
        map_tensors(DTensor, _mark, output)
        return output

    def _spread(self, module: nn.Module, args: Any) -> Any:
        return as_replicated(self._mesh, args)

    def _gather(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._has_loss else as_local(output)


def _mark(tensor: DTensor) -> DTensor:
    setattr(tensor, _LEFT, True)
    return tensor


class LogitsFunctions(DTensorFunctions):
    """Context for a model of ordinary tensors whose logits alone are DTensors, until they leave it."""

    throughout = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        given = [*args, *(kwargs or {}).values()]
        found = [one for each in given for one in (each if isinstance(each, (list, tuple)) else (each,))]
        spread = next((one for one in found if isinstance(one, DTensor)), None)
        if spread is not None and function not in _LOOKS:
            args, kwargs = tree_map_only(DTensor, _whole_if_left, (args, kwargs or {}))
            if any(isinstance(one, DTensor) and not hasattr(one, _LEFT) for one in found):
                # Torch itself would give an ordinary tensor the gradient of a DTensor.
                args, kwargs = tree_map_only(Tensor, lambda one: _replicated(one, spread.device_mesh), (args, kwargs))
        return super().__torch_function__(function, types, args, kwargs)


def _whole_if_left(tensor: DTensor) -> Tensor:
    found = getattr(tensor, _LEFT, None)
    if found is None:
        return tensor
    if not isinstance(found, Tensor) or found.requires_grad != (tensor.requires_grad and torch.is_grad_enabled()):
        found = tensor.full_tensor()
        setattr(tensor, _LEFT, found)  # for the next who reads them
    return found


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    needs = tensor.requires_grad and torch.is_grad_enabled() and not isinstance(tensor, DTensor)
    return as_replicated(mesh, tensor) if needs else tensor
