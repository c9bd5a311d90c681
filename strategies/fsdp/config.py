"""Options of FSDPStrategy, and the checks of their combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pydantic
import torch

from ...core.config import Config, PositiveInt
from ...core.errors import ConfigError
from ...core.precision import to_dtype
from ..config import StrategyConfig
from .model_wrapper import FSDPWrapperConfig, mixed_precision_of


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
    wrap: Literal["blocks"] | list[str] | Callable[..., bool] | None = None
    """Submodules that are units, each gathered and freed as a whole: "blocks" (the repeated ones), names of classes, or
    a function of the submodule. None: the whole model is one unit."""
    reshard_after_forward: bool | int | None = None
    """Free gathered parameters between forward and backward; an int: keep them sharded over groups of that many
    processes. None: free those of every unit except the outermost, because backward begins with it."""
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
    evaluating with one that nothing was loaded into raises; ``Strategy.note_initialised`` is for code that fills them itself."""

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
        if self.prefetch is not None and self.wrap is None and (inner is None or inner.auto_wrap_policy is None):
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
