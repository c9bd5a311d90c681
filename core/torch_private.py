"""All that is used of torch though its name is private; everything else in this library keeps to public names.

Each entry says what it is for, and which versions of torch it was checked with. A test finds private names elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_map_only"]
# These three (2.6, 2.15) show every operation on a tensor, and walk through its arguments.

# Operations on lists of tensors

foreach_clamp_min_ = torch._foreach_clamp_min_  # 2.6, 2.15: documented as beta, with these names
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_mul_ = torch._foreach_mul_
foreach_lerp_ = torch._foreach_lerp_
foreach_copy_ = torch._foreach_copy_

# Tensors

TO_COPY = torch.ops.aten._to_copy.default
"""What ``Tensor.to`` becomes when it is dispatched. 2.6, 2.15."""

INITIALIZERS = ("_no_grad_trunc_normal_",)
"""Functions of ``nn.init`` that others import by their private names, as timm does. 2.6, 2.15."""

REBUILD_TENSOR, REBUILD_TENSOR_OF_DTYPE = torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3
"""Functions that a file of ``torch.save`` names where a tensor stands. 2.6, 2.15; the format keeps them."""


def wrapper_subclass(cls: type[Tensor], shape: Iterable[int], like: Tensor) -> Any:
    """A tensor of class ``cls`` without memory of its own. 2.6, 2.15."""
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)


def storage_key(tensor: Tensor) -> int:
    """What tells the memory of one tensor from that of another, views of one alike, as long as both live. 2.6, 2.15.

    On the meta device ``data_ptr`` is 0 for all.
    """
    return int(tensor.untyped_storage()._cdata)


# Modules

NORM_BASE = nn.modules.batchnorm._NormBase
"""Base of batch and instance normalisation, which may have running statistics. 2.6, 2.15."""

BATCH_NORM_BASE = nn.modules.batchnorm._BatchNorm
"""Base of those that normalise over the samples of a batch. 2.6, 2.15."""

LOADING_METHODS = ("_load_from_state_dict", "load_state_dict")
"""Methods of a module that load a state dict; the first is documented for overriding. 2.6, 2.15."""


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer, as ``Module.to`` does, so that FSDP learns of the new memory. 2.6, 2.15."""
    module._apply(function)  # type: ignore[no-untyped-call]


def call_loaded_hooks(module: nn.Module) -> None:
    """Call what ``register_load_state_dict_post_hook`` has registered, with nothing missing. 2.6, 2.15."""
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, _IncompatibleKeys([], []))


def has_loading_hooks(module: nn.Module) -> bool:
    """Whether ``register_load_state_dict_pre_hook`` was called. 2.6, 2.15."""
    return bool(module._load_state_dict_pre_hooks)


class DeviceFollower(nn.Module):
    """A module without parameters that knows where it is, because every ``.to()`` moves a probe. 2.6, 2.15.

    Attributes:
        device: the CPU at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeviceFollower:
        self.device = fn(torch.empty(0, device=self.device)).device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


# Loading data

LOADER_ITERATOR = _BaseDataLoaderIter
"""What iterating over a DataLoader gives. 2.6, 2.15."""

KEPT_ITERATOR = "_iterator"
"""Attribute in which a DataLoader keeps its workers from one epoch to the next; None: there are none. 2.6, 2.15."""

MAKE_ITERATOR = "_get_iterator"
"""Method with which a DataLoader starts reading. 2.6, 2.15."""

# Several processes


def default_store() -> Any:
    """The store that the default process group was formed with. 2.6, 2.15."""
    return dist.distributed_c10d._get_default_store()


def settle_unit(unit: nn.Module) -> None:
    """Have an FSDP unit's parts lie now where they will lie in training, since hooks keep hold of them. 2.6 to 2.9.

    torch before 2.10 moves those that it pads at the first forward (pytorch/pytorch#163130); later ones need nothing.
    """
    if Version(torch.__version__) < Version("2.10"):
        group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        if group is not None:
            group.lazy_init()


class GroupedGradScaler(GradScaler):
    """torch's GradScaler for gradients of several layouts, which torch divides in one call that takes only one. 2.6, 2.15.

    Args:
        groups: gives the parameters of an optimizer in groups whose gradients are alike.
        arguments: of GradScaler.
    """

    def __init__(self, groups: Callable[[Any], list[list[Tensor]]], *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._groups = groups
        self.agree: Callable[[Tensor], Tensor] | None = None
        """Combines what several processes have found, also those without a gradient."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = self._groups(optimizer)
        for group in groups:
            part = cast(Any, SimpleNamespace(param_groups=[{"params": group}]))
            for found in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).values():
                found_inf = torch.maximum(found_inf, found.to(found_inf.device))
        if self.agree is not None:
            found_inf = self.agree(found_inf)
        return {found_inf.device: found_inf} if groups or self.agree is not None else {}


# Compiling


def build_folder(name: str) -> Path:
    """Where ``torch.utils.cpp_extension`` compiles the extension of this name. 2.6, 2.15.

    It is below TORCH_EXTENSIONS_DIR, or in a folder for this Python and this kind of torch.
    """
    return Path(importlib.import_module("torch.utils.cpp_extension")._get_build_directory(name, verbose=False))
