"""Buffers in page-locked (pinned) host memory, for asynchronous copies from an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .device import DEVICES

_ALIGNMENT = 64  # bytes; enough for a view in any dtype


class HostBuffer:
    """Host memory for copies of tensors; every call of ``copy`` uses it again.

    For tensors of an accelerator the memory is page-locked if the device supports it. Copies are then several times as
    fast, and they run on the device's stream, in order with the work before and after them.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._device = torch.device("cpu")  # of the tensors that the blocks are for
        self._locks = False
        self._arrival: torch.Event | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start contiguous copies on the host. Read them after ``wait``; the next call overwrites them.

        Later work on the device's current stream may change the tensors.
        """
        self.wait()  # a copy of a host tensor is immediate, and would overtake the copies under way
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
        sizes = [-(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if device != self._device or (begins := _fill([block.numel() for block in self._blocks], sizes)) is None:
            self._blocks = []  # free the old blocks before the new ones are allocated
            self._device = device
            self._blocks, self._locks = _allocate(sizes, device)
            begins = _fill([block.numel() for block in self._blocks], sizes)
            assert begins is not None
        copies = []
        for tensor, (number, begin) in zip(tensors, begins, strict=True):
            view = self._blocks[number][begin : begin + tensor.numel() * tensor.itemsize]
            copies.append(view.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=self._locks))
        if self._locks:
            self._arrival = torch.accelerator.current_stream(device).record_event()
        return copies

    def wait(self) -> None:
        """Wait until the copies are complete; may be called from any thread."""
        if self._arrival is not None:
            # A new thread has another current device, and waiting there would allocate memory on it.
            DEVICES[self._device.type].module.set_device(self._device)
            self._arrival.synchronize()
            self._arrival = None


def _allocate(sizes: Sequence[int], device: torch.device) -> tuple[list[Tensor], bool]:
    """Allocate blocks that hold tensors of these sizes (bytes); also return whether they are page-locked."""
    if device.type in ("cpu", "mps") or not any(sizes):
        return [torch.empty(sum(sizes), dtype=torch.uint8)], False
    try:
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in _powers_of_two(sizes)]
    except RuntimeError:  # page-locked memory is not supported, or there is no more of it
        return [torch.empty(sum(sizes), dtype=torch.uint8)], False
    return blocks, True


def _powers_of_two(sizes: Sequence[int]) -> list[int]:
    """Sizes of page-locked blocks: powers of two, because torch rounds up to those and never frees them."""
    left, blocks, room = sum(sizes), [], 0
    for size in sizes:
        if size > room:
            room = max(1 << left.bit_length() - 1, 1 << (size - 1).bit_length())
            blocks.append(room)
        room -= size
        left -= size
    return blocks


def _fill(blocks: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """(index of the block, offset in it) for each size, placed one after the other; None if they do not fit."""
    begins: list[tuple[int, int]] = []
    number = begin = 0
    for size in sizes:
        while number < len(blocks) and begin + size > blocks[number]:
            number, begin = number + 1, 0
        if number == len(blocks):
            return None
        begins.append((number, begin))
        begin += size
    return begins
