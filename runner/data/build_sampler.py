"""Build the sampler that a dataloader's configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.registry import DATA_SAMPLERS
from .dataset_wrappers import is_config
from .samplers import use_shard


def build_sampler(
    sampler: Any,
    dataset: Any,
    *,
    training: bool,
    seed: int,
    shard: tuple[int, int] | None,
    where: str,
    asked: bool | None = None,
) -> Any:
    """Return the sampler that a configuration describes, or one that is built already, with its data shard.

    Args:
        sampler: ``dict(type=...)``, the name of a type, or a sampler.
        dataset: what it samples.
        training: False: no sample is repeated unless the configuration says so.
        seed: of the order, unless the configuration has one.
        shard: (index, count) of this process's data shard; None: a runner says so later.
        where: the configuration key, for messages.
        asked: the dataloader's ``shard``; False: a DistributedSampler may have another data shard.
    """
    if is_config(sampler):
        spec = dict(sampler) if isinstance(sampler, Mapping) else {"type": sampler}
        extra: dict[str, Any] = {"dataset": dataset, **({} if shard is None else {"shard": shard})}
        if "seed" not in spec:
            extra["seed"] = seed
        if not training and "round_up" not in spec:
            extra["round_up"] = False
        sampler = DATA_SAMPLERS.build(spec, where, **extra)
    if shard is not None:
        use_shard(sampler, shard, where, asked)
    return sampler
