"""Options of MeshStrategy."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import pydantic

from ...core.base.errors import ConfigError, StrategyError, one_of, suggest
from ..fsdp import FSDPConfig

# Sizes of a mesh: how many processes each axis has; their product is the number of processes.


REST = -1
"""The size of an axis that takes all the processes that the others leave."""


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Check sizes before the number of processes is known.

    Args:
        sizes: by axis, a positive number or ``REST``.

    Raises:
        ConfigError: a size is neither, or several are ``REST``.
    """
    for axis, size in sizes.items():
        if size < 1 and size != REST:
            raise ConfigError(
                f"strategy.{axis}: {size} is not allowed, give a positive number, or -1 for the processes that are left"
            )
    rests = [axis for axis, size in sizes.items() if size == REST]
    if len(rests) > 1:
        others = ", ".join(f"strategy.{axis}" for axis in rests[1:])
        raise ConfigError(
            f"strategy.{rests[0]}: -1 is given for {others} too, one axis takes what is left; give the others"
        )


def resolved(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the sizes with a number in place of ``REST``.

    Args:
        sizes: by axis, as ``check_sizes`` accepts them.
        world_size: number of processes.

    Raises:
        StrategyError: their product cannot be the number of processes.
    """
    given = math.prod(size for size in sizes.values() if size != REST)
    rest = next((axis for axis, size in sizes.items() if size == REST), None)
    product = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, REST)) or "1"
    if rest is None:
        if given != world_size:
            free = next((axis for axis in ("dp_shard", *sizes) if sizes[axis] == 1), next(iter(sizes)))
            raise StrategyError(
                f"strategy: {product} is {given}, but there are {world_size} processes; start {given}, or give {free}=-1"
            )
        return dict(sizes)
    if world_size % given:
        raise StrategyError(
            f"strategy: {product} needs a multiple of {given} processes, not {world_size}; start {-(-world_size // given) * given}"
        )
    return {**sizes, rest: world_size // given}


def check_overlay(axis: str, size: int, divided: Mapping[str, int]) -> None:
    """Check the size of an axis that takes processes of other axes.

    Args:
        axis, size: its name, and its number of processes.
        divided: sizes of those other axes; ``REST`` where it is not known yet.

    Raises:
        ConfigError: it does not divide their product.
    """
    names = " * ".join(divided)
    if size < 1:
        raise ConfigError(f"strategy.{axis}: {size} is not allowed, give a positive number that divides {names}")
    total = math.prod(divided.values())
    if REST not in divided.values() and total % size:
        product = " * ".join(f"{name}={number}" for name, number in divided.items() if number != 1) or "1"
        raise ConfigError(
            f"strategy.{axis}: {size} does not divide the {total} processes of {names}, which are {product}"
        )


def sizes_in(text: str, axes: Collection[str], where: str) -> dict[str, int]:
    """Return the sizes that a text such as "tp2xpp2" or "tp=2,pp=2" gives; "dp" is short for "dp_shard".

    Raises:
        ConfigError: the text is written otherwise, or an axis is not one of ``axes``, or given twice.
    """
    sizes: dict[str, int] = {}
    pattern, between = (r"([a-z_]+)=(-1|[0-9]+)", ",") if "=" in text else (r"([a-z_]+)([0-9]+)", "x")
    for part in text.split(between):
        found = re.fullmatch(pattern, part)
        if found is None:
            raise ConfigError(
                f'{where}: "mesh:{text}" is not allowed, write axes with their sizes, such as "mesh:dp2xtp2" or "mesh:dp=2,tp=2"'
            )
        axis = "dp_shard" if found[1] == "dp" else found[1]
        if axis not in axes:
            raise ConfigError(
                f'{where}: "mesh:{text}" has "{found[1]}", choose {one_of(["dp", *axes])}{suggest(found[1], ["dp", *axes])}'
            )
        if axis in sizes:
            raise ConfigError(f'{where}: "mesh:{text}" has {axis} twice, give one size')
        sizes[axis] = int(found[2])
    return sizes


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

    tp_kind: Literal["auto", "dtensor", "local"] = "auto"
    """What passes between modules of the plan: DTensors, right for every model; or "local" tensors, which take less time,
    for models that read the number of heads off the width that they see; "auto": local tensors where tracing the model shows
    that they give the same results. The first update compares them."""
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

    @property
    def reshards(self) -> bool | int | None:
        """See FSDPConfig; with stages, False unless it is given: every micro-batch of a window would gather the units again."""
        given = super().reshards
        return False if given is None and self.pp > 1 else given

    @pydantic.model_validator(mode="after")
    def _named(self) -> MeshConfig:
        if self.replicates_by_node:
            raise ConfigError(
                "strategy.model_wrapper.sharding_strategy: one replica for each node is FSDPStrategy's, give dp_replicate"
            )
        return self
