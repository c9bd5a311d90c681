"""Options of MeshStrategy."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from ...core.errors import ConfigError
from ..fsdp import FSDPConfig
from .sizes import REST

# Names that the axes have elsewhere.
_OTHER_NAMES = {
    "dp_shard": ("dp", "fsdp", "dp_size", "dp_shard_size", "data_parallel_size", "data_parallel_shard_degree"),
    "dp_replicate": ("ddp", "dp_replicate_size", "data_parallel_replicate_degree"),
    "tp": ("tp_size", "tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size"),
    "cp": ("sp", "cp_size", "sp_size", "context_parallel_size", "context_parallel_degree", "sequence_parallel_size"),
    "ep": ("ep_size", "expert_parallel_size", "expert_parallel_degree", "expert_model_parallel_size"),
    "pp": ("pp_size", "pipeline_parallel_size", "pipeline_parallel_degree", "pipeline_model_parallel_size"),
}


class MeshConfig(FSDPConfig):
    """Options of MeshStrategy; a size is a positive number, or -1 for the processes that the other axes leave.

    Example:
        strategy=dict(type="MeshStrategy", tp=2, dp_shard=-1, wrap="blocks")
    """

    pp: int = 1
    """Pipeline parallelism: stages of layers that follow each other."""
    dp_replicate: int = 1
    """Replicas of the sharded model, each for other samples (hybrid sharding, with ``dp_shard``)."""
    dp_shard: int = REST
    """Fully sharded data parallelism: parameters are sharded over processes with other samples."""
    cp: int = 1
    """Context parallelism: each process has a part of every sequence."""
    cp_kind: Literal["auto", "ring", "ulysses"] = "auto"
    """How attention goes over the processes of a sequence: keys and values round a ring, or heads for positions
    (Ulysses); "auto": the latter for models of transformers whose number of heads ``cp * tp`` divides."""
    cp_keys: dict[str, int | None] | None = None
    """The dimension of sequences by key of the batch, for example ``{"tokens": 1}``; None: that entry stays whole.
    Keys of transformers' models need not be given. An entry that only some batches have is None in the others."""
    cp_positions: str | None = "position_ids"
    """The parameter of forward for the position of each token, given if the batch has none; None: the model needs none."""
    ep: int = 1
    """Expert parallelism: each process has some of the experts; divides dp_shard * cp * tp."""
    tp: int = 1
    """Tensor parallelism: each process has a part of every matrix."""
    plan: Literal["auto"] | dict[str, Any] | None = "auto"
    """Tensor parallelism by module: ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``; "auto": the model's own, as
    models of transformers have, or else one that is found by tracing the model. For expert parallelism the stacks of experts
    of a model that has no plan of its own: ``{"layers.*.experts": "experts"}``."""
    plan_example: Any = None
    """A batch as the dataloader gives it, or a function that returns one, to trace a model with; None: the first
    samples of a runner's data. Only shapes matter."""

    tp_kind: Literal["dtensor", "local"] = "dtensor"
    """What passes between modules of the plan: DTensors, right for every model; or "local" tensors, which take less time,
    for models that read the number of heads off the width that they see. The first update checks it."""
    sequence_parallel: bool = False
    """With tensor parallelism, divide activations along their dimension 1 where ``plan`` divides no features."""

    pp_schedule: str = "1f1b"
    """Order of forwards and backwards over the stages: gpipe, 1f1b, interleaved_1f1b, zero_bubble or zbv."""
    pp_stages_per_process: int | None = None
    """Stages that each process has, more than 1 with interleaved_1f1b, zero_bubble and zbv; None: the schedule's smallest."""
    pp_layers: list[str] | None = None
    """Names of the layers that stages are cut from, in the order of their calls, or of one list of modules; None: found."""
    pp_split: list[int] | None = None
    """Number of layers of every stage; None: stages have about the same number of parameters."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_fsdp(cls, given: Any) -> Any:
        if isinstance(given, dict) and "replicate_size" in given:
            raise ConfigError("strategy.replicate_size: is FSDPStrategy's, give dp_replicate")
        for axis, others in _OTHER_NAMES.items():
            for name in others:
                if isinstance(given, dict) and name in given and name not in cls.model_fields:
                    raise ConfigError(f'strategy.{name}: unknown key, did you mean "{axis}"?')
        return given

    @pydantic.model_validator(mode="after")
    def _named(self) -> MeshConfig:
        if self.replicates_by_node:
            raise ConfigError(
                "strategy.model_wrapper.sharding_strategy: one replica for each node is FSDPStrategy's, give dp_replicate"
            )
        return self
