"""Fillers: micro-batches that run, because other processes have one more, and count nothing. See ExactEpochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ..data.exact_epochs import Counted


@contextmanager
def leaving_buffers(module: nn.Module) -> Iterator[None]:
    """Context after which the buffers, such as running statistics, are what they were."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for part, name, buffer, value in before:
            # Without a trace: torch's batch normalisation leaves none either, and a buffer that seems written would no
            # longer be compared with its replicas.
            buffer.data.copy_(value)
            if part.get_buffer(name) is not buffer:
                setattr(part, name, buffer)


def check_counted(counted: Counted | None, stepper: Any) -> None:
    """Check that the last update of an epoch can be the mean over its samples.

    Args:
        counted: what counts in it; None: everything, equally.
        stepper: makes the update.

    Raises:
        ConfigError: the model weighs its micro-batches itself, or mixes the samples of all processes.
    """
    if counted is None:
        return
    where, instead = "train_dataloader.sampler.round_up: False", "leave round_up out, or give drop_last=True"
    if stepper.custom_train:
        raise ConfigError(
            f"{where} gives the last update of an epoch {counted.total} samples in micro-batches of different sizes, and "
            f"{type(stepper.module).__name__} defines its own train_step, which does not weigh them; {instead}"
        )
    if counted.has_filler and any(isinstance(part, nn.SyncBatchNorm) for part in stepper.module.modules()):
        raise ConfigError(
            f"{where} leaves a process without a sample where others have one, and the sample that it repeats would count in "
            f"SyncBatchNorm's statistics; {instead}"
        )
