"""The result of planning: what each strategy needs on each rank, as plain values that JSON can hold.

Every number of bytes is of one rank and one update, if nothing else is said. The JSON of a plan is these classes by field;
``read_plan`` reads it back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import pydantic

from ..core.base.errors import ConfigError
from .machines import MachineKind

# What a plan says of time, as plain values that JSON can hold; see plan.py.


@dataclass(frozen=True)
class PipelineOrder:
    """In which order the processes of a pipeline compute.

    Attributes:
        schedule: such as "1f1b".
        stages_per_process: number of stages that each process has.
    """

    schedule: str
    stages_per_process: int


@dataclass(frozen=True)
class StepTime:
    """How long an update takes on a machine, in seconds, as an interval: see docs/planning_time.md for what is assumed.

    Attributes:
        lower: if computing and sending overlap perfectly.
        upper: if nothing overlaps.
        computing: of ``lower``, computing on the process that has most of it, without waiting.
        waiting: of ``lower``, share of the time in which the processes of a pipeline wait for each other, in the mean.
        inside, between: sending inside of a node and between nodes, on the process that sends longest.
        utilisation: share of the machine's peak that forward and backward take, without recomputation, if the update takes
            ``upper`` and if it takes ``lower``: the model's FLOP utilisation.
        notes: what is not counted, one line each.
    """

    lower: float
    upper: float
    computing: float
    waiting: float
    inside: float
    between: float
    utilisation: tuple[float, float]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Calibration:
    """How much of a machine's figures for computing is reached, fitted to one measured update.

    Attributes:
        strategy: whose update was measured.
        world_size, nodes: of how many processes.
        seconds: what was measured.
        overlapped: the share of the peaks, if all sending overlapped in it; of ``StepTime.lower``.
        apart: the same if nothing did; of ``StepTime.upper``.
        source: where the seconds are from.
        notes: what to know about it, one line each.
    """

    strategy: str
    world_size: int
    nodes: int
    seconds: float
    overlapped: float
    apart: float
    source: str = ""
    notes: list[str] = field(default_factory=list)


# What of a training could be changed so that it needs less memory, and what planned changes give.


@dataclass(frozen=True)
class Recipe:
    """What of the training could be changed, see Advice.

    Attributes:
        options: names of the options that the strategy has.
        blocks: classes of the model's repeated blocks, those with the most parameters first.
        data_shards: number of processes, or groups of processes, that train on different samples.
        accumulate: micro-batches of an update.
        batch_size: samples of a micro-batch of one data shard; None if no key of the configuration says so.
        is_dict: the optim_wrapper is a dict, whose keys can be changed.
        is_float32: it is an OptimWrapper, which leaves the computation as it is.
        has_large_logits: the model says which module makes its logits, several times as wide as its input, and nothing transforms it.
    """

    options: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    data_shards: int = 1
    accumulate: int = 1
    batch_size: int | None = None
    is_dict: bool = False
    is_float32: bool = False
    has_large_logits: bool = False


@dataclass(frozen=True)
class Advice:
    """A change of a configuration that does not fit, planned again. The samples of an update are the same.

    Attributes:
        keys: the changed arguments of the runner, as Python text to paste.
        changes: the same by dotted key; see PlannedJob.
        peak: bytes at the peak after the change; 0 if it was refused.
        fits: whether it fits then.
        flops: floating-point operations after the change, by those before.
        sent: bytes sent after the change, by those before; None if there were none before.
        host: see RankPlan, after the change.
        message: why the change was refused, one line.
    """

    keys: str
    changes: dict[str, Any]
    peak: int = 0
    fits: bool = False
    flops: float = 1.0
    sent: float | None = None
    message: str = ""
    host: int = 0


@dataclass(frozen=True)
class MeshSearch:
    """A search over meshes for plans that fit, see ``fit.py``.

    Attributes:
        axes: whose sizes were tried.
        candidates: number of meshes of these axes.
        skipped: by name, why a mesh was not planned: it is not possible, or cannot fit.
        refused: by name, why a mesh is not possible for this script.
        not_planned: those beyond the limit.
    """

    axes: list[str]
    candidates: int
    skipped: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    not_planned: list[str] = field(default_factory=list)


def as_arguments(changes: Mapping[str, Any]) -> str:
    """Return changes by dotted key as Python text of the runner's arguments: ``strategy=dict(wrap="blocks")``."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = tree
        for name in path:
            inner[name] = dict(inner.get(name, {}))  # a change of all of it belongs to others
            inner = inner[name]
        inner[last] = value
    return ", ".join(f"{key}={_text(value)}" for key, value in tree.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"dict({', '.join(f'{key}={_text(each)}' for key, each in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


SCHEMA = 1
"""Version of the JSON; it changes if a field gets another meaning or goes."""

Kind = Literal[
    "parameters", "gradients", "optimizer_state", "buffers", "inputs", "activations", "communication", "temporary"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What memory is for. ``communication``: parameters gathered for computing, and buffers of collectives. ``temporary``: what
backward and the update need besides, such as gradients of activations."""

Phase = Literal["setup", "forward", "recompute", "backward", "update"]
Link = Literal["inside", "between"]
"""Where a message goes: inside a node, or between nodes."""


@dataclass(frozen=True)
class PlannedJob:
    """What is planned: one strategy for one number of processes. All of it can be pickled, and given to a new process.

    Attributes:
        script: path of the Python file, which is run up to its runner as `flextrain verify` does.
        arguments: command line arguments of the script.
        strategy: a short name, such as "fsdp" or "mesh:tp8xpp4", or the strategy's configuration with its ``type``.
        world_size: number of processes.
        nodes: number of machines; ``world_size / nodes`` processes with neighbouring ranks are on each.
        changes: changes of the runner's arguments, by dotted key, such as
            ``{"optim_wrapper.accumulative_counts": 4, "strategy.activation_checkpointing": {"classes": ["Block"]}}``;
            a missing dict is made.
        accumulate_times: factor on the micro-batches of an update.
    """

    script: str
    strategy: str | dict[str, Any]
    world_size: int
    nodes: int = 1
    arguments: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    accumulate_times: int = 1

    @property
    def name(self) -> str:
        """The strategy's name for people."""
        return self.strategy if isinstance(self.strategy, str) else str(self.strategy.get("type", self.strategy))


@dataclass(frozen=True)
class Moment:
    """The memory in use at one moment of the update, in bytes.

    Attributes:
        phase: "recompute" is forward that is repeated during backward.
        module: the name of the innermost submodule that computes; empty outside of the model.
        operation: the operation after which it is measured, such as "aten.mm"; empty if it is not known.
        by_kind: bytes by kind; their sum is ``total``.
    """

    phase: Phase
    module: str
    operation: str
    total: int
    by_kind: dict[Kind, int]


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one update, of one rank.

    Attributes:
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "receive".
        axis: the axes of the mesh over which it goes, such as "tp" or "dp_shard"; "data" for strategies without a mesh;
            "all" for all processes.
        ranks: number of processes that take part in it.
        count: number of calls.
        payload: bytes of the tensors, in all calls: the whole tensor, as all processes together see it, padding included.
            For "all_gather" what each gets, for "reduce_scatter" and "all_to_all" what each gives.
        inside, between: bytes that this rank sends to other processes of its node and to other nodes, in the mean over the
            processes that take part, with messages in a ring in the order of ranks.
        phase: in which it is called.
    """

    collective: str
    axis: str
    ranks: int
    count: int
    payload: int
    inside: int
    between: int
    phase: Phase


@dataclass(frozen=True)
class Work:
    """The computation of one phase in one dtype.

    Attributes:
        dtype: such as "bfloat16"; of a product, the one that is multiplied, "tfloat32" where torch allows it for float32.
        kind: "matrix" for operations that are counted, "other" for all others.
        operations: their number.
        flops: floating-point operations, as torch.utils.flop_counter counts them, and grouped products of experts; 0 for others.
        moved: bytes that they read and write, if each tensor is read and written once.
    """

    phase: Phase
    dtype: str
    kind: Literal["matrix", "other"]
    operations: int
    flops: int
    moved: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's update.

    Attributes:
        rank: the rank that was planned.
        index: its index by axis of the mesh, for axes of several processes.
        peak: the moment with the most memory in use.
        between_updates: bytes by kind when an update has ended.
        moments: the memory over the update, in order; at most ``MOMENTS``, among which are the highest of each phase.
        traffic: collectives and messages.
        work: computation; recomputation has the phase "recompute".
        samples: number of samples of this rank's data shard in one update.
        micro_batches: number of micro-batches of one update.
        parameters: number of elements of trainable and frozen parameters that this rank keeps.
        checkpoint: bytes of the file that this rank writes into a checkpoint.
        host: the most bytes of the host's memory that offloaded activations have; no other kind is counted there.
    """

    rank: int
    index: dict[str, int]
    peak: Moment
    between_updates: dict[Kind, int]
    moments: list[Moment] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    samples: int = 0
    micro_batches: int = 1
    parameters: int = 0
    checkpoint: int = 0
    host: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations of the update."""
        return sum(work.flops for work in self.work)

    @property
    def repeated_flops(self) -> int:
        """Those of ``flops`` that recompute activations."""
        return sum(work.flops for work in self.work if work.phase == "recompute")

    def sent(self, link: Link) -> int:
        """Bytes that this rank sends over a link."""
        return sum(getattr(traffic, link) for traffic in self.traffic)


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint during training, with weights and optimizer state; what hooks add to it is not counted.

    Attributes:
        files: number of files: one of each rank that writes, one of plain values, and the index.
        whole: bytes of all files.
        largest: bytes of the largest file of a rank.
        largest_rank: the rank that writes it.
        index: bytes of the index.
        values: bytes of the plain values, which rank 0 writes: settings of the optimizer, and every data shard's random state.
        seconds: until the last rank has written its file, if each rank and the file system write at the rates that were
            given; None: none was given.
    """

    files: int
    whole: int
    largest: int
    largest_rank: int
    index: int
    values: int
    seconds: float | None = None


@dataclass(frozen=True)
class StrategyPlan:
    """The plan of one strategy.

    Attributes:
        strategy: its name, as it was asked for.
        status: "planned", or "refused" if it is not possible.
        message: why it was refused, one line.
        options: the strategy's configuration, with the class as ``type``, as a string for everything that JSON cannot hold.
        axes: number of processes by axis of the mesh, outermost first; {"data": N} for strategies without a mesh.
        ranks: the ranks that were planned: one of each pipeline stage. Others have the same plan as the one of their stage,
            but for uneven shards.
        whole_parameters: number of elements of the whole model's parameters.
        whole_checkpoint: bytes of a checkpoint, of all ranks; 0 if it cannot be written.
        checkpoint: what a checkpoint takes; None if it cannot be written, which ``notes`` explain.
        source: "executed" on fake tensors, or "formula".
        pipeline: the order of computation in a pipeline; None without one, or if it is not known.
        time: how long an update takes; None if no machine was given.
        seconds: processor time of planning.
        resident: largest resident memory of the planning process, in bytes.
        notes: what to know about these figures, one line each.
        recipe: what of it could be changed; None if it was refused.
        advice: changes that were planned because it does not fit, in the order in which they were; see ``advice.py``.
    """

    strategy: str
    status: Literal["planned", "refused"]
    message: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    ranks: list[RankPlan] = field(default_factory=list)
    whole_parameters: int = 0
    whole_checkpoint: int = 0
    source: Literal["executed", "formula"] = "executed"
    pipeline: PipelineOrder | None = None
    time: StepTime | None = None
    seconds: float = 0.0
    resident: int = 0
    notes: list[str] = field(default_factory=list)
    checkpoint: CheckpointPlan | None = None
    recipe: Recipe | None = None
    advice: list[Advice] = field(default_factory=list)

    @property
    def highest(self) -> RankPlan | None:
        """The planned rank with the highest peak; None if the strategy was refused."""
        return max(self.ranks, key=lambda rank: rank.peak.total, default=None)

    @property
    def host(self) -> int:
        """Bytes of the host's memory that the rank that needs most of it needs."""
        return max((rank.host for rank in self.ranks), default=0)

    @property
    def samples(self) -> int:
        """Samples of one update, of all processes."""
        shards = 1 if self.recipe is None else self.recipe.data_shards
        return shards * max((rank.samples for rank in self.ranks), default=0)

    @property
    def sent(self) -> int:
        """Bytes that the rank that sends the most sends, over all links."""
        return max((rank.sent("inside") + rank.sent("between") for rank in self.ranks), default=0)


@dataclass(frozen=True)
class TrainingPlan:
    """The plans of several strategies for one script.

    Attributes:
        device_memory: bytes of a device; None: not given.
        unseen: bytes to leave free for what planning does not see, see ``UNSEEN``; in the comparison with ``device_memory``.
        torch: torch's version.
        schema: version of the JSON.
        machine: on which ``StrategyPlan.time`` is; None: not given.
        calibration: what was fitted to a measured update; None: nothing.
        search: the meshes that were looked at, if ``strategies`` are the planned ones of a search; None without.
        arguments: of the script.
    """

    script: str
    world_size: int
    nodes: int
    device_memory: int | None
    torch: str
    strategies: list[StrategyPlan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseen: int = 0
    schema: int = SCHEMA
    machine: MachineKind | None = None
    calibration: Calibration | None = None
    search: MeshSearch | None = None
    arguments: list[str] = field(default_factory=list)

    def fits(self, strategy: StrategyPlan) -> bool | None:
        """Whether a strategy's peak and ``unseen`` fit on the device; None if it was refused or no size was given."""
        if strategy.highest is None or self.device_memory is None:
            return None
        return strategy.highest.peak.total + self.unseen <= self.device_memory

    @property
    def exit_status(self) -> int:
        """0: all strategies are possible, and fit if a size was given; 1: one is refused or does not fit.

        Of a search, 0: at least one fits.
        """
        if self.search is not None:
            return int(not any(self.fits(one) for one in self.strategies))
        return int(any(one.status == "refused" or self.fits(one) is False for one in self.strategies))

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values, by field, with the verdict of ``fits`` of each strategy beside its fields."""
        values = dataclasses.asdict(self)
        for fields, strategy in zip(values["strategies"], self.strategies, strict=True):
            fields["fits"] = self.fits(strategy)
        return values


MOMENTS = 400
"""Number of moments that a plan keeps of an update."""

UNSEEN = "workspaces of cuBLAS and cuDNN, buffers of NCCL, the allocator's rounding and fragmentation, the CUDA context"
"""What is in a device's memory besides, and no plan sees."""


def read_plan(given: str | Path | Mapping[str, Any], key: str = "plan") -> TrainingPlan:
    """Read a plan from a file that ``flextrain plan --json`` has written, or from the values of one; ``key`` is for messages.

    Raises:
        ConfigError: it is no plan, or one of another version of flextrain.
    """
    where = f"{key}: {given}" if isinstance(given, (str, Path)) else key
    adapter = pydantic.TypeAdapter(TrainingPlan)
    try:
        # Not validate_json: that of pydantic 2.5 takes no key for one of Kind.
        found = adapter.validate_python(given if isinstance(given, Mapping) else _values_in(Path(given), where))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: is no plan, {f'{key}: ' if key else ''}{first['msg']}") from None
    if found.schema != SCHEMA:
        raise ConfigError(f"{where}: has version {found.schema}, this flextrain reads {SCHEMA}; plan again")
    return found


def _values_in(path: Path, where: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read, {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no plan, Invalid JSON: {error}") from None
