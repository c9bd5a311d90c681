"""Buffers apart: what evaluation would use in place of this process's buffers, and a model that keeps its own meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.comm.model_sync import can_be_averaged, floating_buffers
from ...core.module_copy_private import take_buffers


def bytes_to_share(module: nn.Module) -> int:
    """Return the memory that ``shared_buffers`` takes for a moment."""
    return sum(one.nbytes for one in floating_buffers(module))


def shared_buffers(module: nn.Module, share: Callable[[], None]) -> dict[Tensor, Tensor]:
    """Return what ``share`` would write into each live buffer, where that is something else; a collective.

    Args:
        module: its buffers stay as they are.
        share: writes to floating-point buffers of the module, ``Strategy.share_buffers``.
    """
    copies = {live: live.detach().clone() for live in module.buffers() if can_be_averaged(live)}
    with replaced_buffers(module, copies):
        share()
    return {live: copy for live, copy in copies.items() if not torch.equal(_local(copy), _local(live))}


@contextmanager
def replaced_buffers(module: nn.Module, by: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Context in which the module has other tensors in place of some of its buffers."""
    held = [
        (part, key, buffer)
        for part in (module.modules() if by else ())
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        if buffer in by
    ]
    _put((part, key, by[buffer]) for part, key, buffer in held)
    try:
        yield
    finally:
        _put(held)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Context in which the module has copies of its buffers, so that what is written to them, or added, does not stay."""
    give_back = take_buffers(module)
    try:
        with replaced_buffers(module, {live: live.detach().clone() for live in module.buffers()}):
            yield
    finally:
        give_back()


def _put(held: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    for part, key, buffer in held:
        setattr(part, key, buffer)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
