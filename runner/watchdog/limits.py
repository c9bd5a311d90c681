"""The options of the watchdog."""

from __future__ import annotations

import pydantic

from ...core.config import Config


class WatchdogOptions(Config):
    """``env_cfg.watchdog``."""

    stall_s: float = pydantic.Field(default=600.0, ge=1.0)
    """Seconds without an iteration, a validation batch or a part of a checkpoint on any process after which the run ends."""
    first_s: float = pydantic.Field(default=1800.0, ge=1.0)
    """The same before the first update, and while a model is compiled; never less than ``stall_s``."""
    stragglers: bool = True
    """Warn of a process that takes far more time than the others in loading data or in hooks, see Stragglers."""

    @property
    def long_s(self) -> float:
        """Seconds in a phase that may take longer."""
        return max(self.first_s, self.stall_s)
