"""Choose the plan of a model that the user has given none for: its own, or one that is found by tracing it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....core.comm.joint_errors import gather_differing, raising_together
from ....core.errors import ConfigError
from ..config import MeshConfig
from ..transformers_private import dummy_batch
from .found import find_plan
from .own import OwnPlan
from .tracing import GIVE, trace

_logger = logging.getLogger("flextrain")
_GIVEN = "given"


@dataclass(frozen=True)
class Choice:
    """The plan for a model.

    Attributes:
        rules: styles by glob over the names of modules; empty with ``own``.
        own: the model's own plan, which transformers applies.
        origin: where it is from, for the log.
    """

    rules: Mapping[str, str]
    origin: str
    own: OwnPlan | None = None

    @property
    def is_given(self) -> bool:
        """Whether it is the user's."""
        return self.origin == _GIVEN


def choose_plan(config: MeshConfig, model: nn.Module, tp: int, example: Callable[[], Any] | None) -> Choice:
    """Return the plan of a model, which the user has given, the model has, or tracing finds; a collective.

    Raises:
        ConfigError: the plan does not fit the model, or none can be found.
    """
    if isinstance(config.plan, Mapping):
        return Choice(config.plan, _GIVEN)
    if config.plan is None:
        raise ConfigError(f'strategy.plan: None is not allowed with tp={tp}, give "auto", or {GIVE[5:]}')
    own = OwnPlan.of(model, tp, tp if config.ep > 1 else 1)
    if own is not None:
        for name in own.left_whole:
            _logger.info(f"strategy.plan: {name} is tied, and the plan divides it in one place only; it stays whole")
        if config.sequence_parallel:
            return Choice(own.as_rules(), f"of {own.authors}")
        return Choice({}, f"of {own.authors}", own)
    found: dict[str, str] = {}
    with raising_together():
        found = _found(config, model, tp, example)
    found = gather_differing(found)[0]  # samples, and so shapes, may differ
    _logger.info(f"strategy.plan: found for {type(model).__name__} by tracing it: plan={as_text(found)}")
    return Choice(found, "found by tracing")


def _found(config: MeshConfig, model: nn.Module, tp: int, example: Callable[[], Any] | None) -> dict[str, str]:
    plan = find_plan(model, trace(model, example_of(config, model, example)), tp)
    if not plan:
        raise ConfigError(
            f"strategy.plan: tracing {type(model).__name__} found no two matrices that follow each other and that tp={tp} "
            f"divides; {GIVE}, or choose another axis than tp"
        )
    return plan


def example_of(config: MeshConfig, model: nn.Module, example: Callable[[], Any] | None) -> Any:
    """Return a batch to trace a model with: the one of the options, of the data, or of a model of transformers.

    Raises:
        ConfigError: there is none, or reading it raised.
    """
    given = config.plan_example
    if given is not None and not callable(given):
        return given
    where = "strategy.plan_example" if given is not None else "strategy.plan: the first samples of the data"
    read = given if given is not None else example
    if read is not None:
        try:
            batch = read()
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{where} gave no batch to find one with ({type(error).__name__}: {text}); {GIVE}"
            ) from error
        if batch is not None:
            return batch
    batch = dummy_batch(model)
    if batch is None:
        raise ConfigError(
            f'strategy.plan_example: missing, {type(model).__name__} has no plan of its own, and "auto" needs a batch to find '
            f"one by tracing; give it, or {GIVE}"
        )
    return batch


def as_text(plan: Mapping[str, str]) -> str:
    """Return a plan as Python writes it, to paste into a configuration."""
    return "{" + ", ".join(f'"{name}": "{style}"' for name, style in plan.items()) + "}"
