"""TrainStep and EvalStep: the interfaces by which a strategy calls the model, for an update or an evaluation batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class TrainStep(Protocol):
    """One update, for ``Strategy.run_window``.

    For every micro-batch call ``begin`` first, then either ``run``, or ``forward`` and ``backward``. A schedule may
    order the forwards and backwards of all micro-batches freely, unless the model's wrapper depends on the order:
    DistributedDataParallel needs each backward right after its forward.
    """

    shares: Sequence[float | None]
    """Factor of each micro-batch's loss, so that the sum of the gradients is that of the update; None: 1."""

    def begin(self, index: int) -> bool:
        """Announce micro-batch ``index``; return whether its backward must reduce gradients."""

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """Run forward and backward of a micro-batch; return its values to log, 0-dim and without a graph."""

    def prepare(self, batch: Any) -> Any:
        """Return the model's input for a micro-batch, on the device."""

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, 0-dim with its graph, computed under ``autocast``, and its values to log.

        Raises:
            StrategyError: the model defines its own ``train_step``, which combines forward and backward.
        """

    def backward(self, loss: Tensor, index: int) -> None:
        """Run backward of a loss, multiplied by its share, and by the loss scale if there is one."""

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the window's values to log, from those that ``run`` or ``forward`` returned for its micro-batches."""


class EvalStep(Protocol):
    """One batch of evaluation, for ``Strategy.evaluate``."""

    def prepare(self, batch: Any) -> Any:
        """Return the model's input for a batch, on the device."""

    def predict(self, batch: Any) -> Any:
        """Return the predictions for a batch, by ``val_step``, ``test_step`` or ``forward``, under ``autocast``."""
