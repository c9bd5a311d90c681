"""CheckReplicasHook: compares replicas of the model's tensors while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from ...core.registry import HOOKS
from .hook import Hook

if TYPE_CHECKING:
    from ..run import Run


@HOOKS.register_module()
class CheckReplicasHook(Hook):
    """Compares weights and optimizer state with the replicas on other processes, between saves, which compare them too.

    A difference, such as a flipped bit in the memory of one device, is a DivergenceError on every process. It names the
    tensor and the ranks. See ``Strategy.check_replicas`` for what is compared. Every check waits for the device.

    Args:
        interval: updates between two checks.
    """

    priority = "LOW"  # before checkpoints are saved

    def __init__(self, interval: int = 500) -> None:
        given: object = interval  # a configuration may have anything
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ConfigError(f"CheckReplicasHook.interval: {interval!r} is not allowed, give an integer of 1 or more")
        self.interval = interval

    def after_train_iter(
        self,
        runner: Run,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare after every ``interval`` updates."""
        if (runner.iter + 1) % self.interval == 0:
            runner.strategy.check_replicas()
