"""The table of conformance checks, and the argument that every check gets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..core.comm import collectives as dist
from ..core.errors import ConfigError, FlexTrainError, StrategyError
from ..optim.wrapper import OptimWrapper
from ..strategies.base import Strategy
from .differences import FLOAT32_TOLERANCE
from .sessions import Session, StrategyLike, make_strategy, single_device, started

T = TypeVar("T")


@dataclass(frozen=True)
class StrategyUnderTest:
    """The strategy under test, inside one of its processes.

    Attributes:
        folder: an empty folder that all processes share.
        rank: rank of this process, also outside ``session``.
        tolerance: largest relative difference from a single device that counts as rounding.
    """

    spec: StrategyLike
    world_size: int
    folder: Path
    tolerance: float = FLOAT32_TOLERANCE
    rank: int = 0

    def strategy(self) -> Strategy:
        """A new object of the strategy under test."""
        return make_strategy(self.spec)

    def session(self, optim: OptimWrapper) -> AbstractContextManager[Session]:
        """The strategy under test with a model, ready to train; collective."""
        return started(self.spec, optim)

    @contextlib.contextmanager
    def session_or_refused(self, optim: OptimWrapper) -> Iterator[Session]:
        """A session. An error during set-up counts as a refusal, which the contract allows."""
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(self.session(optim))
            except (ConfigError, StrategyError) as error:
                raise RefusedError(str(error)) from None
            yield session

    def reference(self, optim: OptimWrapper) -> AbstractContextManager[Session]:
        """A single device of the strategy's kind with rank 0's initial weights; do not use it inside ``session``."""
        return single_device(optim, device=self.strategy().config.device)

    def all_gather(self, value: T) -> list[T]:
        """The value of every process; use it only inside ``session``."""
        return dist.all_gather_object(value)


class RefusedError(FlexTrainError):
    """The strategy refused a request that it is allowed to refuse."""


Check = Callable[[StrategyUnderTest], None]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(title: str) -> Callable[[Check], Check]:
    """Register a check under its function's name, with ``title`` as its description. A check fails by raising."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = (title, function)
        return function

    return register
