"""SingleDeviceStrategy: one process, one device."""

from __future__ import annotations

from ..core.base.errors import StrategyError
from ..core.base.registry import STRATEGIES
from .base import Strategy


@STRATEGIES.register_module()
class SingleDeviceStrategy(Strategy):
    """Trains on one device in one process; the reference for every other strategy."""

    short_names = {"single": {}}

    def _check_world(self, world_size: int) -> None:
        if world_size > 1:
            raise StrategyError(
                f'strategy.type: "SingleDeviceStrategy" runs in one process and {world_size} were started, '
                'choose "DDPStrategy" or start one'
            )
