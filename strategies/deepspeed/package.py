"""The package deepspeed, which may not be installed."""

from __future__ import annotations

from typing import Any

from ...core.errors import StrategyError


def deepspeed() -> Any:
    """Import and return the package deepspeed.

    Raises:
        StrategyError: it is not installed, or cannot be imported.
    """
    try:
        import deepspeed as found
    except ModuleNotFoundError as error:
        missing = "" if error.name == "deepspeed" else f" ({error})"
        raise StrategyError(
            f'strategy.type: "DeepSpeedStrategy" needs DeepSpeed, pip install flextrain[deepspeed]{missing}'
        ) from None
    return found
