"""HostCopies: the memory of tensors, moved to the host for a while and back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..base.tensors import parts_of
from ..torch_compat.torch_private import storage_key
from .device import HostBuffer, empty_cache, synchronize


class HostCopies:
    """Frees the memory of tensors on a device, and keeps what was in it on the host, page-locked where the device can.

    The tensors stay the same objects, and so do all views of their memory: flat buffers, shards, what an engine holds. Nothing
    may read them meanwhile, because they have no memory then.
    """

    def __init__(self) -> None:
        self._buffer = HostBuffer()  # used again, because locking memory takes longer than copying to it
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []

    def take(self, tensors: Iterable[Tensor], device: torch.device) -> int:
        """Move the memory of those tensors that are on ``device`` to the host, and return how many bytes were freed.

        Memory that is not the tensors' own, such as that of an array of NumPy, stays where it is.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            for part in parts_of(tensor):
                storage = part.untyped_storage()
                if part.device == device and storage.nbytes() and storage.resizable():
                    storages[storage_key(part)] = storage
        copies = self._buffer.copy([_bytes(storage) for storage in storages.values()])
        self._buffer.wait()
        synchronize(device)  # work of other streams may still use what is freed now
        self._held = list(zip(storages.values(), copies, strict=True))
        for storage in storages.values():
            storage.resize_(0)
        empty_cache(device)
        return sum(copy.numel() for copy in copies)

    def give_back(self) -> None:
        """Give the tensors memory again, with the bits of before."""
        held, self._held = self._held, []
        for storage, copy in held:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
        if held:
            synchronize(held[0][0].device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The memory as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
