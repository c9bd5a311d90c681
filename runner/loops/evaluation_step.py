"""EvaluationStep: calls the model for one batch of validation or testing."""

from __future__ import annotations

from typing import Any


class EvaluationStep:
    """Evaluates one batch, see EvalStep.

    Args:
        stepper: calls the model.
        mode: "val" or "test".
    """

    def __init__(self, stepper: Any, mode: str) -> None:
        self._stepper, self._mode = stepper, mode

    def prepare(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._stepper.preprocess(batch, False)

    def predict(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._stepper.predict(batch, self._mode)
