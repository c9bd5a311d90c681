"""WrittenWeights: frozen parameters of an engine that something else writes to, such as a teacher's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from ...core.errors import StrategyError
from ..base import Strategy
from . import engine_internals, swapping


class WrittenWeights(Strategy):
    """The part of DeepSpeedStrategy that gives the weights that the engine computes with, and takes them up again."""

    _by_name: Mapping[str, nn.Parameter] = MappingProxyType({})

    def computed_with(self) -> dict[str, Tensor]:
        """See Strategy; in the dtype of the engine, at stage 3 as FlatShards.

        Raises:
            StrategyError: shards are in files.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if swapping.is_in_file(parameter):
                raise StrategyError(
                    f"strategy.zero_optimization.offload_param: {name} is in a file, to which only the engine writes; give "
                    'device="cpu", or leave it out'
                )
            is_split = engine_internals.is_partitioned(parameter)
            found[name] = engine_internals.own_shard(parameter) if is_split else parameter.detach()
        return found

    def take_written(self, names: Collection[str]) -> None:
        """See Strategy."""
        if any(name not in self._by_name for name in names):  # at the first call; later ones come at every update
            self._by_name = dict(self.module.named_parameters())
        engine_internals.gather_small(self._by_name[name] for name in names)
