"""Options of FSDPStrategy, and the checks of their combinations."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import pydantic
import torch

from ...core.base.config import Config, PositiveInt
from ...core.base.errors import ConfigError, one_of, suggest
from ...core.base.registry import MODELS
from ...core.device.precision import to_dtype
from ...core.torch_compat.graphs_private import may_have_graphs
from ..config import StrategyConfig, function_of

# MMEngine's ``model_wrapper``: translation of the arguments of torch's older FullyShardedDataParallel.


# FSDP1's and MMEngine's keys without counterpart, and what to do instead.
_REFUSED_ARGUMENTS = {
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
        known = [*type(self).model_fields, *_REFUSED_ARGUMENTS, *_ALWAYS, "backward_prefetch", "forward_prefetch"]
        for key, value in (self.model_extra or {}).items():
            if key in _REFUSED_ARGUMENTS and value is not None:
                raise ConfigError(f"{where}.{key}: has no counterpart, {_REFUSED_ARGUMENTS[key]}; leave it out")
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


class MixedPrecision(Config):
    """Dtypes by name ("bfloat16") or as torch's; parameters are stored and updated in float32."""

    param_dtype: str | torch.dtype | None = None
    """Dtype of forward and backward, and of gathered parameters; None: float32."""
    reduce_dtype: str | torch.dtype | None = None
    """Dtype in which gradients are reduced; None: float32."""
    output_dtype: str | torch.dtype | None = None
    """Dtype of the model's outputs; None: float32."""
    buffer_dtype: str | torch.dtype | None = None
    """MMEngine's key; only float32, because buffers keep the dtype that the model gives them."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of every unit to param_dtype."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> MixedPrecision:
        for key in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            if (value := getattr(self, key)) is not None:
                to_dtype(value, f"strategy.mixed_precision.{key}")
        if self.buffer_dtype is not None and to_dtype(self.buffer_dtype, "") is not torch.float32:
            raise ConfigError(
                f"strategy.mixed_precision.buffer_dtype: {self.buffer_dtype} is not allowed, buffers keep the dtype that the "
                "model gives them; leave it out"
            )
        if self.param_dtype is not None and to_dtype(self.param_dtype, "") is torch.float16:
            raise ConfigError(
                "strategy.mixed_precision.param_dtype: float16 needs loss scaling, choose bfloat16, or "
                'optim_wrapper=dict(type="AmpOptimWrapper", dtype="float16")'
            )
        return self

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one of the keys; float32 if it is None."""
        value = getattr(self, key)
        return torch.float32 if value is None else to_dtype(value, f"strategy.mixed_precision.{key}")


_SHARDED = "checkpoints are sharded and fit every strategy, leave it out"
_REFUSED = {
    "state_dict_cfg": _SHARDED,
    "optim_state_dict_cfg": _SHARDED,
    "sync_bn": 'call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before, or choose the strategy "ddp"',
    "find_unused_parameters": "parameters may always stay unused, leave it out",
    "detect_anomalous_params": 'the strategy "ddp" has it, try the model there',
}


class FSDPConfig(StrategyConfig):
    """Options of FSDPStrategy.

    Example:
        strategy=dict(type="FSDPStrategy", wrap="blocks", mixed_precision=dict(param_dtype="bfloat16"))
    """

    model_wrapper: FSDPWrapperConfig | None = None
    """MMEngine's key for ``auto_wrap_policy`` and other arguments of FSDP."""
    wrap: Literal["blocks", "model"] | list[str] | Callable[..., bool] | None = None
    """Submodules that are units, each gathered and freed as a whole: "blocks" (the repeated ones), names of classes, or
    a function of the submodule; "model": the whole model is one unit. None: blocks on an accelerator, if the model has any,
    also with tensor parallelism; one unit on the CPU, and with stages of a pipeline, each of which is one."""
    reshard_after_forward: bool | int | None = None
    """Free gathered parameters between forward and backward; an int: keep them sharded over groups of that many
    processes. None: free those of every unit except the outermost, because backward begins with it; with stages of a
    pipeline, keep them, because every micro-batch would gather them again."""
    mixed_precision: MixedPrecision | None = None
    """Compute in a dtype other than float32; faster than AmpOptimWrapper."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    replicate_size: PositiveInt = 1
    """Replicas of the sharded model (hybrid sharding): each is sharded over world_size / replicate_size processes. With
    ``model_wrapper=dict(sharding_strategy="HYBRID_SHARD")``, unless it is given: one for each node."""
    prefetch: PositiveInt | None = None
    """Number of units to gather ahead of the one that computes; None: torch's default, 1."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients after every micro-batch, not once per window: saves memory, costs communication."""
    skip_init_weights: bool = False
    """Leave the parameters of a model given as dict or callable at zero, if a checkpoint is loaded anyway. Training or
    evaluating with one that nothing was loaded into raises; ``note_initialised`` of strategies/parts is for code that fills them itself."""

    @cached_property
    def reduces_always(self) -> bool:
        """Whether gradients are reduced after every micro-batch: CUDA graphs would write to the memory of those that are kept whole."""
        return self.reduce_every_micro_batch or (bool(self.compile) and may_have_graphs(self.compile))

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_mmengine(cls, given: Any) -> Any:
        """Translate MMEngine's keys, or refuse them."""
        if not isinstance(given, dict):
            return given
        for key, why in _REFUSED.items():
            if given.get(key) is not None:
                raise ConfigError(f"strategy.{key}: {why}")
        found = {key: value for key, value in given.items() if key not in _REFUSED}
        wrapper = found.get("model_wrapper")
        if isinstance(wrapper, Mapping) and wrapper.get("mixed_precision") is not None:
            mixed = mixed_precision_of(wrapper["mixed_precision"])
            if found.get("mixed_precision") not in (None, mixed):
                raise ConfigError(
                    "strategy.model_wrapper.mixed_precision: strategy.mixed_precision is given too, give one"
                )
            found |= {"mixed_precision": mixed, "model_wrapper": {**wrapper, "mixed_precision": None}}
        return found

    @property
    def own_dtype(self) -> torch.dtype | None:
        """See StrategyConfig."""
        return None if self.mixed_precision is None else self.mixed_precision.dtype("param_dtype")

    @pydantic.model_validator(mode="after")
    def _one_home(self) -> FSDPConfig:
        inner = self.model_wrapper
        if (
            self.prefetch is not None
            and self.wrap in (None, "model")
            and (inner is None or inner.auto_wrap_policy is None)
        ):
            raise ConfigError(
                'strategy.prefetch: has no effect on a model that is one unit, give strategy.wrap="blocks"'
            )
        if inner is None:
            return self
        if inner.auto_wrap_policy is not None and self.wrap is not None:
            raise ConfigError("strategy.model_wrapper.auto_wrap_policy: strategy.wrap is given too, give one of them")
        if inner.reshards is not None and self.reshard_after_forward not in (None, inner.reshards):
            raise ConfigError(
                "strategy.model_wrapper.sharding_strategy: disagrees with "
                f"strategy.reshard_after_forward={self.reshard_after_forward}, give one of them"
            )
        return self

    @property
    def replicates_by_node(self) -> bool:
        """Whether there are as many replicas as nodes."""
        hybrid = self.model_wrapper is not None and self.model_wrapper.is_hybrid
        return hybrid and "replicate_size" not in self.model_fields_set

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept in host memory, from the option and from ``model_wrapper``."""
        return self.cpu_offload or bool(self.model_wrapper and self.model_wrapper.offloads)

    @property
    def reshards(self) -> bool | int | None:
        """The value of ``reshard_after_forward``, from the option or from ``model_wrapper``."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.model_wrapper.reshards if self.model_wrapper else None
