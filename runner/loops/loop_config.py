"""``train_cfg``, ``val_cfg`` and ``test_cfg``, each read and checked once: the class of a loop, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.base.config import check_call, refuse_foreign
from ...core.base.errors import ConfigError
from ...core.base.registry import LOOPS
from .base import BaseLoop
from .train import EpochBasedTrainLoop, IterBasedTrainLoop, TrainLoop

_COUNTS = ("max_epochs", "max_iters", "val_begin", "val_interval")


@dataclass(frozen=True)
class LoopConfig:
    """A loop that is to be built.

    Attributes:
        loop: its class, or a function that returns it.
        arguments: what it gets beside the runner and the data.
    """

    loop: Any
    arguments: Mapping[str, Any]


class TrainConfig(LoopConfig):
    """``train_cfg``."""

    @classmethod
    def read(cls, given: Any) -> TrainConfig:
        """Check a runner's ``train_cfg``, and return what it says.

        Raises:
            ConfigError: a key is unknown, missing or contradicts another one.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"train_cfg: {given!r} is not allowed, give dict(by_epoch=True, max_epochs=...)")
        arguments = dict(given)
        for name in _COUNTS:
            if isinstance(value := arguments.get(name), float) and value.is_integer():  # such as 1e5
                arguments[name] = int(value)
        by_epoch = arguments.pop("by_epoch", None)
        if by_epoch is not None and not isinstance(by_epoch, bool):
            raise ConfigError(f"train_cfg.by_epoch: {by_epoch!r} is not allowed, give True or False")
        if (kind := arguments.pop("type", None)) is not None:
            if by_epoch is not None:
                raise ConfigError("train_cfg.by_epoch: has no meaning beside train_cfg.type, give one of them")
            loop = LOOPS.resolve(kind, "train_cfg.type")
            refuse_foreign(loop, "train_cfg.type", "flextrain.runner.loops.train.TrainLoop", LOOPS)
            if inspect.isclass(loop) and not issubclass(loop, TrainLoop):
                raise ConfigError(
                    f"train_cfg.type: {loop.__name__} is no training loop; subclass EpochBasedTrainLoop or IterBasedTrainLoop, "
                    "which count for checkpoints and schedules, and define run_iter, run_epoch or run"
                )
        else:
            if by_epoch is None:
                if arguments.get("max_iters") is not None and arguments.get("max_epochs") is not None:
                    raise ConfigError("train_cfg.max_iters: max_epochs is given too, keep one of them")
                by_epoch = "max_iters" not in arguments
            loop, right, wrong = EpochBasedTrainLoop, "max_epochs", "max_iters"
            if not by_epoch:
                loop, right, wrong = IterBasedTrainLoop, wrong, right
            if wrong in arguments:
                raise ConfigError(f"train_cfg.{wrong}: has no meaning with by_epoch={by_epoch}, give {right}")
        check_call(loop, arguments, "train_cfg", ("runner", "dataloader"))
        return cls(loop, arguments)

    @property
    def by_epoch(self) -> bool:
        """Whether training is counted in passes over the data."""
        return self.loop.by_epoch  # type: ignore[no-any-return]

    @property
    def max_epochs(self) -> int | None:
        """The number of passes; None: training is counted in iterations."""
        return self.arguments.get("max_epochs")


class EvalConfig(LoopConfig):
    """``val_cfg`` or ``test_cfg``."""

    @classmethod
    def read(cls, given: Any, mode: str) -> EvalConfig:
        """Check a runner's ``val_cfg`` or ``test_cfg``, and return what it says.

        Raises:
            ConfigError: a key is unknown, or the class is no loop of evaluation.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"{mode}_cfg: {given!r} is not allowed, give dict()")
        where = f"{mode}_cfg.type"
        loop = LOOPS.resolve(given.get("type", "ValLoop" if mode == "val" else "TestLoop"), where)
        refuse_foreign(loop, where, "flextrain.BaseLoop", LOOPS)
        if inspect.isclass(loop):
            if not issubclass(loop, BaseLoop) or issubclass(loop, TrainLoop):
                raise ConfigError(f"{where}: {loop.__name__} is no evaluation loop")
            parameters = inspect.signature(loop).parameters.values()
            if not any(p.name == "evaluator" or p.kind is p.VAR_KEYWORD for p in parameters):
                raise ConfigError(f"{where}: {loop.__name__} takes no evaluator; take runner, dataloader and evaluator")
        arguments = {key: value for key, value in given.items() if key != "type"}
        check_call(loop, arguments, f"{mode}_cfg", ("runner", "dataloader", "evaluator"))
        return cls(loop, arguments)
