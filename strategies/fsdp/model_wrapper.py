"""MMEngine's ``model_wrapper``: translation of the arguments of torch's older FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any

import pydantic

from ...core.config import Config
from ...core.errors import ConfigError, one_of, suggest

# FSDP1's and MMEngine's keys without counterpart, and what to do instead.
_REFUSED = {
    "process_group": "processes are arranged by strategy.replicate_size",
    "ignored_modules": "every parameter is sharded",
    "ignored_states": "every parameter is sharded",
    "ignored_parameters": "every parameter is sharded",
    "param_init_fn": "a model given as dict or callable is initialised as its constructor says",
    "device_id": "give strategy.device",
}
# Keys whose setting is fixed, with the only accepted value.
_ALWAYS = {"use_orig_params": True, "sync_module_states": True, "limit_all_gathers": True}
_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class FSDPWrapperConfig(Config):
    """MMEngine's ``model_wrapper``: arguments of torch's older FullyShardedDataParallel."""

    model_config = pydantic.ConfigDict(
        extra="allow", frozen=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    type: Any = None
    auto_wrap_policy: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    mixed_precision: Any = None

    @pydantic.model_validator(mode="after")
    def _translatable(self) -> FSDPWrapperConfig:
        where = "strategy.model_wrapper"
        name = getattr(self.type, "__name__", self.type)
        if name not in (None, "MMFullyShardedDataParallel", "FullyShardedDataParallel"):
            raise ConfigError(f'{where}.type: "{name}" is not allowed, FSDPStrategy wraps with fully_shard')
        known = [*type(self).model_fields, *_REFUSED, *_ALWAYS, "backward_prefetch", "forward_prefetch"]
        for key, value in (self.model_extra or {}).items():
            if key in _REFUSED and value is not None:
                raise ConfigError(f"{where}.{key}: has no counterpart, {_REFUSED[key]}; leave it out")
            if key in _ALWAYS and value not in (None, _ALWAYS[key]):
                raise ConfigError(f"{where}.{key}: {value} is not allowed, it is always {_ALWAYS[key]}")
            if key in ("backward_prefetch", "forward_prefetch") and value not in (None, False):
                raise ConfigError(f"{where}.{key}: has no counterpart, give strategy.prefetch; leave it out")
            if key not in known:
                raise ConfigError(f"{where}.{key}: unknown key{suggest(key, known) or f', choose {one_of(known)}'}")
        name = getattr(self.sharding_strategy, "name", self.sharding_strategy)
        if name == "NO_SHARD":
            raise ConfigError(f'{where}.sharding_strategy: NO_SHARD shards nothing, choose strategy.type="DDPStrategy"')
        if name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            raise ConfigError(f"{where}.sharding_strategy: {name} is not allowed, give strategy.replicate_size")
        if name not in (None, *_RESHARD):
            raise ConfigError(f'{where}.sharding_strategy: "{name}" is not allowed, choose {one_of(_RESHARD)}')
        policy = self.auto_wrap_policy
        if policy is not None and not callable(policy):
            raise ConfigError(
                f"{where}.auto_wrap_policy: {type(policy).__name__} is not allowed, give a function of "
                "torch.distributed.fsdp.wrap, or strategy.wrap"
            )
        return self

    @property
    def reshards(self) -> bool | None:
        """The value of ``reshard_after_forward`` for the sharding strategy; None if none is given."""
        return _RESHARD.get(getattr(self.sharding_strategy, "name", self.sharding_strategy))

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept in host memory."""
        return bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload))
