"""A hook: logs the norm of the weights after each epoch, and counts updates across restarts."""

from __future__ import annotations

from typing import Any

from flextrain import Hook


class MyPluginHook(Hook):
    """Replace what it does; docs/how_to/custom_hook.md lists the points of a run."""

    def __init__(self) -> None:
        self.updates = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.updates += 1

    def after_train_epoch(self, runner: Any) -> None:
        norm = sum(p.detach().square().sum() for p in runner.strategy.module.parameters()).sqrt()
        runner.message_hub.update_scalar("train/weight_norm", norm)  # for the next log line

    def state_dict(self) -> dict[str, int]:  # goes into the checkpoints
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]
