"""Steps that hand the micro-batches of a window to the pipeline, within the contexts of the other axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...steps import EvalStep, TrainStep


class CollectedWindow:
    """A TrainStep whose ``run`` collects micro-batches, and runs all of them with the last.

    Args:
        step: that of the training loop.
        size: number of micro-batches.
        run_all: runs the window, and returns its values to log.
    """

    def __init__(
        self, step: TrainStep, size: int, run_all: Callable[[Sequence[Any], TrainStep], dict[str, Tensor]]
    ) -> None:
        self._step, self._size, self._run_all = step, size, run_all
        self._window: list[Any] = []
        self.shares = step.shares

    def begin(self, index: int) -> bool:
        """See TrainStep; the pipeline decides itself when gradients are reduced."""
        return True

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """See TrainStep."""
        self._window.append(batch)
        return self._run_all(self._window, self._step) if len(self._window) == self._size else {}

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """See TrainStep."""
        return parts[-1]

    def prepare(self, batch: Any) -> Any:
        """See TrainStep."""
        return self._step.prepare(batch)

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See TrainStep."""
        return self._step.forward(batch)

    def backward(self, loss: Tensor, index: int) -> None:
        """See TrainStep."""
        self._step.backward(loss, index)


class CollectedBatch:
    """An EvalStep whose ``predict`` sends a batch through the pipeline.

    Args:
        step: that of the evaluation loop.
        run: evaluates a batch.
    """

    def __init__(self, step: EvalStep, run: Callable[[Any, EvalStep], Any]) -> None:
        self._step, self._run = step, run

    def prepare(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._step.prepare(batch)

    def predict(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._run(batch, self._step)
