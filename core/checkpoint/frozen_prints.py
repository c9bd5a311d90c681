"""FrozenPrints: fingerprints of the parameters that a checkpoint leaves out, the same for every layout over processes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.collectives import all_reduce, is_alone, side_group
from ..comm.joint_errors import gather_differing
from ..fingerprints import of_chunk, of_name
from ..torch_private import version_of
from .flat_shard import FlatShard
from .held_chunks import Offsets, held_chunks, is_cut_by_rule, is_ordinary

_MODULUS = 2**40
"""Sums below it can be added over 2**23 processes in 64 bits."""

_Chunks = dict[str, dict[Offsets, Tensor]]


class FrozenPrints:
    """Computes fingerprints, and again only after something has written to a tensor; one object for a model."""

    def __init__(self) -> None:
        self._written: list[tuple[object, ...]] = []
        self._prints: dict[str, str] | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return a dtype and a hash of dtype, shape and bits for each tensor on any process, by name; a collective.

        Each process adds up what it holds, and the sums are added over the processes. A tensor of a class with a layout of its
        own, as quantised ones are, has none.

        Args:
            tensors: this process's, whole or sharded; a shard may be on several processes, if every shard is on as many.
        """
        known = {
            name: tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, FlatShard) or is_ordinary(tensor) or is_cut_by_rule(tensor)
        }
        chunks = {name: held_chunks(name, tensor) for name, tensor in known.items()}
        written: list[tuple[object, ...]] = [
            (name, offsets, chunk.data_ptr(), 0 if chunk.is_inference() else version_of(chunk))
            for name, held in chunks.items()
            for offsets, chunk in held.items()
        ]
        has_changed = self._prints is None or written != self._written
        if any(gather_differing(has_changed)):
            self._prints, self._written = _prints(known, chunks), written
        assert self._prints is not None
        return self._prints


def _prints(tensors: Mapping[str, Tensor], chunks: _Chunks) -> dict[str, str]:
    own = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in sorted(tensors.items())
    ]
    every = {name: (dtype, shape) for everyones in gather_differing(own) for name, dtype, shape in everyones}
    # The device is explicit, because the user may have set another default device.
    counts = torch.tensor([sum(c.numel() for c in chunks.get(name, {}).values()) for name in every], device="cpu")
    both = torch.stack([_sums(every, chunks), counts.long()])
    if not is_alone():
        all_reduce(both, group=side_group())
    found: dict[str, str] = {}
    for (name, (dtype, shape)), total, count in zip(every.items(), *both.tolist(), strict=True):
        replicas = count / max(1, math.prod(shape))  # of each shard
        if replicas >= 1 and not total % replicas:
            number = (total // int(replicas) + of_name(f"{dtype} {shape}")) % _MODULUS
            found[name] = f"{dtype} {number:010x}"
    return found


def _sums(names: Mapping[str, tuple[str, list[int]]], chunks: _Chunks) -> Tensor:
    """What this process holds of each tensor, added up; int64 on the CPU, with one copy from each device."""
    sums = torch.zeros(len(names), dtype=torch.int64, device="cpu")
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for number, name in enumerate(names):
        for offsets, chunk in chunks.get(name, {}).items():
            numbers, found = by_device.setdefault(chunk.device, ([], []))
            numbers.append(number)
            found.append(of_chunk(chunk, offsets))
    for numbers, found in by_device.values():
        sums.index_add_(0, torch.tensor(numbers, device="cpu"), torch.stack(found).cpu())
    return sums.remainder(_MODULUS)
