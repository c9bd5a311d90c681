"""PublishHook: publishes the weights of a run while it trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from flextrain import ConfigError, Hook

from .engines import SGLangTarget, VLLMTarget
from .folder import FolderTarget
from .transfer import HTTPTarget

_TARGETS: dict[str, Any] = {"folder": FolderTarget, "vllm": VLLMTarget, "sglang": SGLangTarget, "http": HTTPTarget}


class PublishHook(Hook):
    """Publishes the weights every ``interval`` updates, and at the end of the training what was not published.

    Every process takes part; rank 0 alone talks to the target. What the target raises stops the training.

    Args:
        target: an object with ``publish(weights)``, or ``dict(type="folder", path=...)``; other types are "vllm", "sglang" and
            "http", with the arguments of the classes.
        interval: updates between two versions.
        dtype: of floating-point tensors, such as "bfloat16"; None: their own.

    Raises:
        ConfigError: an argument is not allowed.
    """

    priority = "VERY_LOW"  # the averages and checks of other hooks come before

    def __init__(self, target: Any, interval: int = 1, dtype: str | None = None) -> None:
        given: object = interval  # a configuration may have anything
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(f"PublishHook.interval: {interval!r} is not allowed, give 1 or more")
        self.target, self.interval, self.dtype = _built(target), interval, dtype
        self.told: dict[str, Any] | None = None
        """What the target has returned of the newest version; None: none was published."""
        self._published = -1

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self.every_n_train_iters(runner, self.interval):
            self._publish(runner, runner.iter + 1)

    def after_train(self, runner: Any) -> None:
        if runner.iter != self._published:
            self._publish(runner, runner.iter)

    def _publish(self, runner: Any, updates: int) -> None:
        self.told = told = runner.publish(self.target, dtype=self.dtype)
        self._published = updates
        if not isinstance(told, dict):
            return
        for name in ("seconds", "paused_s"):
            if name in told:
                runner.message_hub.update_scalar(f"train/publish_{name}", told[name])
        runner.logger.info(f"Published after {updates} updates to {self.target}: {summary(told)}")


def summary(told: Mapping[str, Any]) -> str:
    """Say in a line what a target has returned."""
    said = f"version {told['version']}, " if "version" in told else ""
    said += (
        f"{told['changed']} of {told['tensors']} tensors new, " if "changed" in told else f"{told['tensors']} tensors, "
    )
    moved = told.get("written_bytes", told.get("sent_bytes"))
    said += f"{moved / 1e6:.1f} MB " if moved is not None else ""
    said += f"in {told['seconds']:.1f} s"
    return f"{said}, the engine stood still for {told['paused_s']:.2f} s" if "paused_s" in told else said


def _built(target: Any) -> Any:
    if not isinstance(target, Mapping):
        return target
    options = dict(target)
    kind = options.pop("type", None)
    if kind not in _TARGETS:
        raise ConfigError(f"PublishHook.target: type {kind!r} is not allowed, give {', '.join(_TARGETS)}, or an object")
    try:
        inspect.signature(_TARGETS[kind]).bind(**options)
        return _TARGETS[kind](**options)
    except TypeError as error:
        raise ConfigError(f"PublishHook.target: {kind}, {error}") from None
