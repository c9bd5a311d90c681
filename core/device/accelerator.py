"""What an accelerator can do, and what follows where the user has chosen nothing. A run on the CPU does not import this."""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import suppress
from typing import Any

import torch

from ..torch_compat.torch_private import has_kernel, set_allocator


def _module(device: torch.device) -> Any:
    """torch's module for a device, such as ``torch.cuda``; None if it has none."""
    return getattr(torch, device.type, None)


# Precision


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 by itself; True for one that is only pretended, as plans do."""
    module = _module(device)
    ask = getattr(module, "is_bf16_supported", None)
    if ask is None or not module.is_available():
        return ask is not None
    emulates = "including_emulation" in inspect.signature(ask).parameters
    return bool(ask(including_emulation=False) if emulates else ask())


def float32_advice(device: torch.device) -> str | None:
    """What makes products of float32 matrices faster; None if nothing does, or if the user has chosen."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    with suppress(RuntimeError):  # torch does not tell after a switch of its newer interface
        if torch.get_float32_matmul_precision() == "highest":
            return 'torch.set_float32_matmul_precision("high") makes products of float32 matrices several times as fast'
    return None


# Updates


def is_fused(optimizer: str, device: torch.device) -> bool:
    """Whether torch has a kernel of its own for the device that makes the update of this optimizer, by its name."""
    return has_kernel(f"aten::_fused_{optimizer.lower()}_", device.type)


# Memory


_CHOOSES_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@functools.cache
def let_segments_grow(kind: str) -> bool:
    """Let the allocator's segments grow, against fragmentation; return whether it was done, once for a process.

    Left as it is where the user has set the allocator, and where something may have been allocated already.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF"
    """
    if kind != "cuda" or torch.version.hip or any(name in os.environ for name in _CHOOSES_ALLOCATOR):
        return False
    if torch.get_device_module("cuda").is_initialized() or torch.cuda.memory.get_allocator_backend() != "native":
        return False
    set_allocator("expandable_segments:True")
    return True


@functools.cache
def can_pin(kind: str) -> bool:
    """Whether memory of the host can be page-locked for devices of this type."""
    if kind == "mps":  # torch warns, and locks nothing
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, AssertionError):
        return False


# Copies to the device


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """The stream of a device for copies to it; None if it has no streams."""
    module = _module(device)
    has_streams = hasattr(module, "Stream") and hasattr(module, "stream") and torch.accelerator.is_available()
    # A plan only pretends to have the device, and one without a number is the current one, which may be another later.
    return module.Stream(device=device) if has_streams and device != torch.device(device.type) else None


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host, made beside the work that the device still has; later work waits for the copy.

    The host is ahead of the device, so that a batch is copied while the device computes the update before. From page-locked
    memory the host does not wait either; from other memory it waits for the copy, and not for the device's work.

    Memory of a batch is used again once the host has seen the end of the work that used it: there are as many batches as the host is
    updates ahead. The driver's queue, of some thousand launches, bounds that for all but small models; a bound of two updates would
    let the host wait between log lines.
    """
    is_ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    stream = _side_stream(device) if is_ordinary and not torch.compiler.is_compiling() else None
    if stream is None:
        return tensor.to(device, non_blocking=True)
    module = _module(device)
    current = module.current_stream(device)
    with module.stream(stream):
        copy = tensor.to(device, non_blocking=True)
    current.wait_stream(stream)
    # Its memory belongs to the other stream, which must not use it again before the work on this one.
    copy.record_stream(current)
    return copy
