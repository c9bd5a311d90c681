"""What was chosen for an accelerator, in one line of the log. A run on the CPU does not import this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...core.device.accelerator import float32_advice, let_segments_grow
from ...strategies.parts import choices

if TYPE_CHECKING:
    from ..run import Run


def tell_choices(run: Run, data: Any, pins: bool) -> None:
    """Log what the library has chosen because the device is an accelerator, and how the user chooses otherwise.

    Args:
        run: whose strategy is set up.
        data: ``train_dataloader`` as given.
        pins: whether batches of workers are page-locked where the user has not chosen.
    """
    strategy = run.strategy
    found = choices(strategy)
    if pins and isinstance(data, Mapping) and data.get("num_workers") and "pin_memory" not in data:
        found.append("page-locked batches (train_dataloader.pin_memory=False)")
    if let_segments_grow(strategy.device.type):
        found.append('growing segments of memory (PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")')
    line = f"Chosen for {strategy.device.type}, with what chooses otherwise: {', '.join(found) or 'nothing'}"
    advice = float32_advice(strategy.device) if torch.float32 in strategy.precision_report().compute else None
    run.logger.info(f"{line}; {advice}" if advice else line)
