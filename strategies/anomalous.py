"""Name the trainable parameters that no gradient has come to, in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from ..optim.wrapper import OptimWrapper

_logger = logging.getLogger("flextrain")


class WithoutGradient:
    """A hook of an optimizer wrapper's updates that logs the parameters without gradient, when they change.

    Args:
        parameters: the model's, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._before: list[str] = []

    def __call__(self, optim: OptimWrapper) -> None:
        """Look at the gradients of an update, before they are clipped; no value is read."""
        trained = (optim.model_parameter(parameter) for group in optim.param_groups for parameter in group["params"])
        names = [self._names[id(p)] for p in trained if p.requires_grad and p.grad is None]
        if names != self._before:
            self._before = names
            if names:
                _logger.warning(
                    f"detect_anomalous_params: no gradient for {', '.join(names)}; forward has not used them, or the loss does "
                    "not depend on them"
                )
            else:
                _logger.warning("detect_anomalous_params: all parameters have gradients again")
