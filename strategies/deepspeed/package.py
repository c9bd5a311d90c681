"""The package deepspeed, which may not be installed."""

from __future__ import annotations

from typing import Any

from ...core.errors import StrategyError
from .compiling import without_shared_memory


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


def init_distributed(backend: str, device: str) -> None:
    """Let DeepSpeed join the process group that is there.

    Raises:
        StrategyError: an environment variable is missing.
    """
    try:
        with without_shared_memory():
            deepspeed().init_distributed(dist_backend=backend, verbose=False, dist_init_required=False)
    except KeyError as missing:  # of a variable that the accelerator needs
        raise StrategyError(
            f"strategy.device: DeepSpeed needs {missing} in the environment for {device}; flextrain doctor says where it comes from"
        ) from missing
