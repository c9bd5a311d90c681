"""Buffers that forward writes to, such as running statistics: what they hold now, to put it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


def buffers_of(module: nn.Module) -> Callable[[], None]:
    """Return a function that makes the buffers, such as running statistics, what they are now."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]

    def restore() -> None:
        for part, name, buffer, value in before:
            # Without a trace: torch's batch normalisation leaves none either, and a buffer that seems written would no
            # longer be compared with its replicas.
            buffer.data.copy_(value)
            if part.get_buffer(name) is not buffer:
                setattr(part, name, buffer)

    return restore


@contextmanager
def leaving_buffers(module: nn.Module) -> Iterator[None]:
    """Context after which the buffers are what they were."""
    restore = buffers_of(module)
    try:
        yield
    finally:
        restore()
