"""Memory of the host that an accelerator copies into by itself, while the host goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .device import DEVICES

_ALIGNMENT = 64  # of views in any dtype


class HostBuffer:
    """Room on the host for copies of tensors, used again and again.

    For tensors of an accelerator the memory is page-locked, where the device has such: copies are then several times as
    fast, and the device makes them between what it has been given before and what it is given afterwards.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._device = torch.device("cpu")  # for which the blocks were made
        self._locks = False
        self._arrival: torch.Event | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies on the host, to be read after ``wait``; they are overwritten by the next call.

        What comes after this call on the device's current stream may change the tensors.
        """
        self.wait()  # what is copied from the host is there at once, and would come before
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
        sizes = [-(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if device != self._device or (places := _fill([block.numel() for block in self._blocks], sizes)) is None:
            self._blocks = []  # the old ones go before the new ones come
            self._device = device
            self._blocks, self._locks = _allocate(sizes, device)
            places = _fill([block.numel() for block in self._blocks], sizes)
            assert places is not None
        copies = []
        for tensor, (number, begin) in zip(tensors, places, strict=True):
            place = self._blocks[number][begin : begin + tensor.numel() * tensor.itemsize]
            copies.append(place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=self._locks))
        if self._locks:
            self._arrival = torch.accelerator.current_stream(device).record_event()
        return copies

    def wait(self) -> None:
        """Return once the copies have arrived; in any thread."""
        if self._arrival is not None:
            # In a new thread another device is current, on which waiting would take memory.
            DEVICES[self._device.type].module.set_device(self._device)
            self._arrival.synchronize()
            self._arrival = None


def _allocate(sizes: Sequence[int], device: torch.device) -> tuple[list[Tensor], bool]:
    """Blocks that ``_fill`` fits tensors of these sizes into, and whether they are page-locked."""
    if device.type in ("cpu", "mps") or not any(sizes):
        return [torch.empty(sum(sizes), dtype=torch.uint8)], False
    try:
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in _powers_of_two(sizes)]
    except RuntimeError:  # the device has no such memory, or the system gives no more of it
        return [torch.empty(sum(sizes), dtype=torch.uint8)], False
    return blocks, True


def _powers_of_two(sizes: Sequence[int]) -> list[int]:
    """Sizes of blocks for page-locked memory, of which torch hands out powers of two, and keeps them for good."""
    left, blocks, room = sum(sizes), [], 0
    for size in sizes:
        if size > room:
            room = max(1 << left.bit_length() - 1, 1 << (size - 1).bit_length())
            blocks.append(room)
        room -= size
        left -= size
    return blocks


def _fill(blocks: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """(number of a block, where in it) for each size, one behind the other; None if they do not fit."""
    places: list[tuple[int, int]] = []
    number = begin = 0
    for size in sizes:
        while number < len(blocks) and begin + size > blocks[number]:
            number, begin = number + 1, 0
        if number == len(blocks):
            return None
        places.append((number, begin))
        begin += size
    return places
