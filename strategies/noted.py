"""Noted: what a strategy notes for the parts that take it, in strategies/parts/, and what they keep from call to call."""

from __future__ import annotations

from torch import nn

from ..core.checkpoint.replicas import FrozenPrints
from ..core.comm.replica_check import ReplicaCheck
from .as_at_setup import AsAtSetup
from .blueprint import Blueprint
from .names import Names


class Noted:
    """What is known of a model besides its tensors: as it was built, at set-up, and since.

    Attributes:
        names: of the whole model.
        at_setup: names of the parameters and persistent buffers at set-up; empty before it, and without an optimizer.
        blueprint: the model as it was before the strategy changed it; None: no copy of it can be made.
        unchanged: the parameters when training was set up.
        uninitialised: names of parameters that are zero until something is loaded into them.
        read_later: names of parameters and buffers that nothing initialises, because their values are read after set-up.
        is_whole: whether a context with whole weights is open.
        frozen_prints, replica_check: what was computed before, for the next time.
    """

    def __init__(self) -> None:
        self.names = Names(nn.Module())
        self.at_setup: frozenset[str] = frozenset()
        self.blueprint: Blueprint | None = None
        self.unchanged: AsAtSetup | None = None
        self.uninitialised: set[str] = set()
        self.read_later: frozenset[str] = frozenset()
        self.is_whole = False
        self.frozen_prints = FrozenPrints()
        self.replica_check = ReplicaCheck()

    def check_unchanged(self) -> None:
        """Raise StrategyError if parameters were changed since ``setup`` in a way that training would miss; before every update."""
        if self.unchanged is not None:
            self.unchanged.check()

    def drop_model(self) -> None:
        """Keep nothing that keeps the model's memory."""
        self.blueprint = self.unchanged = None
