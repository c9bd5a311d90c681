"""Search over the sizes of a mesh's axes for the plans that fit on a device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from ..core.base.errors import ConfigError, FlexTrainError, one_of, suggest
from ..strategies.build import build_strategy
from .plan import MeshSearch, PlannedJob, StrategyPlan, TrainingPlan

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Axes of a mesh, outermost first; ``ep`` divides the processes of others anew."""
LIMIT = 24
"""Number of meshes that are planned, unless another one is asked for."""
SHOWN = 10
"""Number of plans that people are shown."""
_INSIDE = ("pp", "cp", "tp")
"""Axes whose processes train on the same samples."""


def axes_in(text: str) -> list[str]:
    """Return the axes in a text such as "tp,pp,dp_shard", in the order of ``AXES``; "dp" is short for "dp_shard".

    Raises:
        ConfigError: one of them is unknown, or there is none.
    """
    names = ["dp_shard" if name.strip() == "dp" else name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"plan.fit: is empty, give axes with commas between them, of {one_of(AXES)}")
    for name in names:
        if name not in AXES:
            raise ConfigError(f'plan.fit: "{name}" is not allowed, choose {one_of(AXES)}{suggest(name, AXES)}')
    return [axis for axis in AXES if axis in names]


def products(axes: Sequence[str], world_size: int) -> list[dict[str, int]]:
    """Return all meshes of these axes: sizes above 1, and always ``dp_shard``, which has the processes that the others leave.

    Those with few processes inside of the model come first, then those with few replicas and few processes for experts.
    """
    divided = [axis for axis in axes if axis not in ("dp_shard", "ep")]
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found = []
    for sizes in itertools.product(divisors, repeat=len(divided)):
        if world_size % math.prod(sizes):
            continue
        mesh = {**dict(zip(divided, sizes, strict=True)), "dp_shard": world_size // math.prod(sizes)}
        shared = mesh["dp_shard"] * mesh.get("cp", 1) * mesh.get("tp", 1)
        for experts in divisors if "ep" in axes else [1]:
            if shared % experts == 0:
                whole = {**mesh, "ep": experts}
                found.append({axis: whole[axis] for axis in AXES if axis == "dp_shard" or whole.get(axis, 1) > 1})
    return sorted(found, key=_order)


def _order(mesh: dict[str, int]) -> tuple[int, ...]:
    return (math.prod(mesh.get(axis, 1) for axis in _INSIDE), *(mesh.get(axis, 1) for axis in ("dp_replicate", "ep")))


def name_of(mesh: dict[str, int]) -> str:
    """Return the short name of a mesh, such as "mesh:dp_shard4xtp2"."""
    return "mesh:" + "x".join(f"{axis}{size}" for axis, size in mesh.items())


def search(
    found: TrainingPlan,
    job: PlannedJob,
    axes: Sequence[str],
    planner: Callable[[PlannedJob], StrategyPlan],
    *,
    limit: int = LIMIT,
    on_progress: Callable[[str], object] = lambda what: None,
) -> TrainingPlan:
    """Return a plan with those of the meshes of some axes, each with the samples of an update that data parallelism has.

    Meshes that cannot be possible, or cannot fit, are not planned; of the others, ``limit`` are.

    Args:
        found: says what a device has.
        job: the script and the processes; its strategy is not planned.
        axes: see ``axes_in``; all other axes have size 1.
        planner: plans a job.
        on_progress: called with what is planned next.

    Raises:
        ConfigError: no size of a device was given, or ``limit`` is below 1.
    """
    if found.device_memory is None:
        raise ConfigError("plan.fit: what has to fit is not known, give --device-memory")
    if limit < 1:
        raise ConfigError(f"plan.fit_limit: {limit} is not allowed, give 1 or more")
    meshes = products(axes, job.world_size)
    skipped: dict[str, str] = {}
    refused: dict[str, str] = {}
    planned: list[StrategyPlan] = []
    left: list[str] = []
    tried = 0
    for i, mesh in enumerate(meshes):
        name = name_of(mesh)
        if why := _impossible(mesh, job) or _too_large(mesh, planned, found):
            skipped[name] = why
            continue
        if why := _refusal(name):
            refused[name] = why
            continue
        if tried == limit:
            left.append(name)
            continue
        tried += 1
        on_progress(f"{name}, mesh {i + 1} of {len(meshes)}")
        plan = planner(_job_of(mesh, job))
        if plan.highest is None:
            refused[name] = plan.message
        else:
            planned.append(_noting_micro_batches(plan))
    looked_at = MeshSearch(list(axes), len(meshes), skipped, refused, left)
    return dataclasses.replace(found, strategies=ordered(found, planned), search=looked_at)


def ordered(found: TrainingPlan, plans: Sequence[StrategyPlan]) -> list[StrategyPlan]:
    """Return plans in the order in which people are shown them: those that fit before all others.

    Those that fit are in the order of the upper bound of a step's time, without a machine of the bytes that are sent; the
    others in that of their peak.
    """

    def key(plan: StrategyPlan) -> tuple[int, float]:
        assert plan.highest is not None
        if not found.fits(plan):
            return 1, plan.highest.peak.total
        return 0, plan.sent if plan.time is None else plan.time.upper

    return sorted(plans, key=key)


def _impossible(mesh: dict[str, int], job: PlannedJob) -> str | None:
    devices = job.world_size // job.nodes
    if mesh.get("tp", 1) > devices:
        return f"tp={mesh['tp']} is more than the {devices} processes of a node"
    return None


def _too_large(mesh: dict[str, int], planned: Sequence[StrategyPlan], found: TrainingPlan) -> str | None:
    """Say why the mean of the processes cannot have room for parameters and optimizer state; None if it may."""
    if found.device_memory is None or not planned:
        return None
    shards = math.prod(size for axis, size in mesh.items() if axis not in ("dp_replicate", "ep"))
    least = min(_at_rest(plan) for plan in planned) / shards
    if least <= found.device_memory - found.unseen:
        return None
    return f"parameters and optimizer state, in {shards} shards, are more than a device has"


def _at_rest(plan: StrategyPlan) -> float:
    """Bytes of the whole model's parameters and optimizer state, by those of the elements that a rank has."""
    each = [
        sum(rank.between_updates.get(kind, 0) for kind in ("parameters", "optimizer_state")) / rank.parameters
        for rank in plan.ranks
        if rank.parameters
    ]
    return plan.whole_parameters * min(each, default=0.0)


def _refusal(name: str) -> str | None:
    """Say why there is no such strategy, whatever the script is; None if there may be."""
    try:
        build_strategy(name)
    except FlexTrainError as error:
        return str(error)
    return None


def _job_of(mesh: dict[str, int], job: PlannedJob) -> PlannedJob:
    others = {f"strategy.{axis}": 1 for axis in AXES if axis not in mesh}  # the script's own mesh may have them
    times = math.prod(mesh.get(axis, 1) for axis in _INSIDE)
    return dataclasses.replace(
        job, strategy=name_of(mesh), changes={**others, **job.changes}, accumulate_times=times * job.accumulate_times
    )


def _noting_micro_batches(plan: StrategyPlan) -> StrategyPlan:
    count = 1 if plan.recipe is None else plan.recipe.accumulate
    if count == 1:
        return plan
    note = f"with optim_wrapper=dict(accumulative_counts={count}), for the samples of an update"
    return dataclasses.replace(plan, notes=[*plan.notes, note])


def lines_on_search(found: TrainingPlan) -> Iterator[str]:
    """Yield lines for people on the meshes that were looked at, if there was a search."""
    looked_at = found.search
    if looked_at is None:
        return
    fitting = sum(found.fits(plan) is True for plan in found.strategies)
    yield (
        f"{looked_at.candidates} meshes of {', '.join(looked_at.axes)}: {fitting} fit, {len(found.strategies) - fitting} do not fit, "
        f"{len(looked_at.refused)} refused, {len(looked_at.skipped)} skipped, {len(looked_at.not_planned)} not planned"
    )
    for what, names in (("refused", looked_at.refused), ("skipped", looked_at.skipped)):
        for why in dict.fromkeys(names.values()):
            same = [name for name, reason in names.items() if reason == why]
            yield f"{what}: {_listed(same)}: {why}"
    if looked_at.not_planned:
        yield f"not planned, more than the limit: {_listed(looked_at.not_planned)}; give a larger --fit-limit"
    if len(found.strategies) > SHOWN:
        yield f"shown: {SHOWN} of {len(found.strategies)} plans, --json has all"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
