"""Options of FSDP without effect are refused: who gives one expects it to do something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.errors import ConfigError
from .config import MeshConfig

_OF_SHARDS = ("reshard_after_forward", "prefetch", "reduce_every_micro_batch")


def without_shards(config: MeshConfig) -> list[str]:
    """Return the given options that have no effect where no parameter is sharded over several processes."""
    return [key for key in _OF_SHARDS if getattr(config, key) != type(config).model_fields[key].default]


def check_sharded(config: MeshConfig, sizes: Mapping[str, int], sharding: Sequence[str]) -> None:
    """Raise ConfigError for an option of FSDP if the given sizes leave FSDP out.

    Args:
        sizes: of all axes, also -1.
        sharding: the axes over which parameters are sharded, and those that divide them anew.
    """
    if config.mixed_precision is not None or config.offloads or any(sizes[axis] != 1 for axis in sharding):
        return
    for key in without_shards(config):
        raise ConfigError(
            f"strategy.{key}: has no effect with {', '.join(f'{axis}=1' for axis in sharding)}, which shard no parameter over "
            "several processes; leave it out"
        )
