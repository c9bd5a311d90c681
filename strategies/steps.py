"""What a strategy is handed for an update, or for a batch of evaluation: how the model at hand wants to be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class TrainStep(Protocol):
    """One update, as ``Strategy.run_window`` drives it.

    For every micro-batch ``begin`` comes first. Then either ``run``, or ``forward`` and ``backward``, in whatever order a
    schedule has for those of all micro-batches.
    """

    shares: Sequence[float | None]
    """What the loss of each micro-batch is multiplied by, so that gradients add up to the update's; None: by 1."""

    def begin(self, index: int) -> bool:
        """Say that micro-batch number ``index`` comes next; whether its backward is to reduce gradients."""

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """Forward and backward of a micro-batch; what to log of it, 0-dim and without a graph."""

    def prepare(self, batch: Any) -> Any:
        """The model's input for a micro-batch, on the device."""

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, 0-dim with its graph, computed under ``autocast``; and what to log of it.

        Raises:
            StrategyError: the model's own ``train_step`` does forward and backward in one.
        """

    def backward(self, loss: Tensor, index: int) -> None:
        """Differentiate a loss: multiplied by its share, and scaled against underflow where that was asked for."""

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """What to log of the window, from what ``run`` or ``forward`` gave for each of its micro-batches."""


class EvalStep(Protocol):
    """One batch of evaluation, as ``Strategy.evaluate`` drives it."""

    def prepare(self, batch: Any) -> Any:
        """The model's input for a batch, on the device."""

    def predict(self, batch: Any) -> Any:
        """What the model predicts for a batch, by its ``val_step``, ``test_step`` or ``forward``, under ``autocast``."""
