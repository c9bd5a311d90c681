"""MMEngine's ``model_wrapper``: translation of the arguments of torch's older FullyShardedDataParallel."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from ...core.config import Config
from ...core.errors import ConfigError, one_of, suggest
from ...core.registry import MODELS
from ..functions import function_of

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
_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}
_POLICIES = (
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "lambda_auto_wrap_policy",
    "always_wrap_policy",
    "ModuleWrapPolicy",
)
_CALLED_WITH = ("module", "recurse", "nonwrapped_numel")


class FSDPWrapperConfig(Config):
    """MMEngine's ``model_wrapper``: arguments of torch's older FullyShardedDataParallel."""

    model_config = pydantic.ConfigDict(
        extra="allow", frozen=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    type: Any = None
    """Must name FullyShardedDataParallel or MMEngine's subclass, if given."""
    auto_wrap_policy: Any = None
    """Chooses the units: a policy of torch.distributed.fsdp.wrap, by name, as dict or as function; see ``wrap``."""
    sharding_strategy: Any = None
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or _HYBRID_SHARD_ZERO2; see ``reshard_after_forward``."""
    cpu_offload: Any = None
    """True, or torch's CPUOffload; see ``cpu_offload`` of the strategy."""
    mixed_precision: Any = None
    """Torch's MixedPrecision, or a dict of its arguments; see ``mixed_precision`` of the strategy."""

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
            always = key == "backward_prefetch" and getattr(value, "name", value) == "BACKWARD_PRE"
            if key in ("backward_prefetch", "forward_prefetch") and value not in (None, False) and not always:
                raise ConfigError(f"{where}.{key}: has no counterpart, give strategy.prefetch; leave it out")
            if key not in known:
                raise ConfigError(f"{where}.{key}: unknown key{suggest(key, known) or f', choose {one_of(known)}'}")
        name = getattr(self.sharding_strategy, "name", self.sharding_strategy)
        if name == "NO_SHARD":
            raise ConfigError(f'{where}.sharding_strategy: NO_SHARD shards nothing, choose strategy.type="DDPStrategy"')
        if name not in (None, *_RESHARD):
            raise ConfigError(f'{where}.sharding_strategy: "{name}" is not allowed, choose {one_of(_RESHARD)}')
        return self

    @pydantic.field_validator("auto_wrap_policy", mode="before")
    @classmethod
    def _policy(cls, given: Any) -> Callable[..., bool] | None:
        return None if given is None else policy_of(given, "strategy.model_wrapper.auto_wrap_policy")

    @property
    def is_hybrid(self) -> bool:
        """Whether each node holds a replica that is sharded over its processes."""
        return "HYBRID" in str(getattr(self.sharding_strategy, "name", self.sharding_strategy))

    @property
    def reshards(self) -> bool | None:
        """The value of ``reshard_after_forward`` for the sharding strategy; None if none is given."""
        return _RESHARD.get(getattr(self.sharding_strategy, "name", self.sharding_strategy))

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept in host memory."""
        return bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload))


def policy_of(given: Any, where: str) -> Callable[..., bool]:
    """Return the wrapping policy that ``auto_wrap_policy`` describes.

    Args:
        given: a policy; the name of one of torch.distributed.fsdp.wrap or of FUNCTIONS, or its import path; or a dict with
            such a ``type`` and arguments, of which classes may be given by import path.
        where: the configuration key.

    Raises:
        ConfigError: no such policy, or wrong arguments.
    """
    wrap = importlib.import_module("torch.distributed.fsdp.wrap")
    own = {name: getattr(wrap, name) for name in _POLICIES}
    if isinstance(given, Mapping):
        given = {key: _classes(key, value, f"{where}.{key}") for key, value in given.items()}
    return function_of(given, where, _CALLED_WITH, own)


_CLASSES = ("transformer_layer_cls", "module_classes", "exclude_wrap_modules", "force_leaf_modules")


def _classes(key: str, value: Any, where: str) -> Any:
    """Return an argument in which names of classes are replaced by the classes, as a set."""
    if key not in _CLASSES or value is None:
        return value
    given = [value] if isinstance(value, str) or inspect.isclass(value) else value
    if not isinstance(given, (list, tuple, set, frozenset)):
        raise ConfigError(f"{where}: {value!r} is not allowed, give a list of classes or import paths")
    return {MODELS.resolve(each, where) for each in given}


def mixed_precision_of(given: Any) -> dict[str, Any]:
    """Return ``strategy.mixed_precision`` for the older FullyShardedDataParallel's MixedPrecision, or a dict of its fields.

    Raises:
        ConfigError: it is neither, or a field has no counterpart.
    """
    where = "strategy.model_wrapper.mixed_precision"
    if isinstance(given, Mapping):
        found = dict(given)
    elif type(given).__name__ == "MixedPrecision":
        found = {key: value for key, value in vars(given).items() if not key.startswith("_")}
        # Inside of the model its inputs have the dtype of the parameters anyway.
        if not found.pop("cast_forward_inputs", False) and found.get("cast_root_forward_inputs") is False:
            found |= {"cast_root_forward_inputs": True, "cast_forward_inputs": False}
    else:
        raise ConfigError(f"{where}: {given!r} is not allowed, give dict(param_dtype=..., reduce_dtype=...)")
    if found.pop("keep_low_precision_grads", False):
        raise ConfigError(f"{where}.keep_low_precision_grads: has no counterpart, gradients are float32; leave it out")
    if not found.pop("cast_root_forward_inputs", True):
        raise ConfigError(f"{where}.cast_root_forward_inputs: has no counterpart, give cast_forward_inputs=False")
    if found.get("reduce_dtype") is None:  # as there, where None means the dtype of the parameters
        found["reduce_dtype"] = found.get("param_dtype")
    return found
