"""Advice for a strategy that does not fit: the cheapest changes that could make it fit, each planned again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import KINDS, Kind, PlannedJob, StrategyPlan
from .recipe import Advice, Recipe, as_arguments

PLANS = 8
"""Number of changes that are planned for one strategy; each takes as long as the strategy itself."""
_SHARDED: tuple[Kind, ...] = ("parameters", "gradients", "optimizer_state")
_OF_SAMPLES: tuple[Kind, ...] = ("inputs", "activations", "temporary")
_DTYPE = "bfloat16"

Planner = Callable[[PlannedJob], StrategyPlan]


@dataclass(frozen=True)
class Change:
    """A change of one kind.

    Attributes:
        kind: changes of a kind that was refused, or did not help, are not tried again.
        changes: see PlannedJob; ``strategy.type`` is another strategy.
        left: the share of each kind of memory that it leaves at best; 1 of all others.
    """

    kind: str
    changes: dict[str, Any]
    left: Mapping[Kind, float] = field(default_factory=dict)

    def at_best(self, plan: StrategyPlan) -> float:
        """Return the least peak that is possible after the change, in bytes."""
        assert plan.highest is not None
        peak = plan.highest.peak.by_kind
        return sum(peak.get(kind, 0) * self.left.get(kind, 1.0) for kind in KINDS)


def advise(
    plan: StrategyPlan, job: PlannedJob, room: int, planner: Planner, on_progress: Callable[[str], object]
) -> tuple[list[Advice], list[str]]:
    """Look for changes with which a plan's peak is at most ``room``, and return those that were planned, and notes.

    Changes are tried in the order of ``possible_changes``, those first that could suffice alone; the search ends with the first
    that fits. If none does, the one with the lowest peak stays, and others are added to it. At most ``PLANS`` are planned.

    Args:
        plan: of ``job``.
        room: bytes of a device for what plans see.
        planner: plans a job.
        on_progress: called with the change that is planned next.
    """
    found: list[Advice] = []
    base, base_job, useless = plan, job, set[str]()
    while base.highest is not None:
        peak = base.highest.peak.total
        possible = [one for one in possible_changes(base, base_job) if one.kind not in useless]
        possible = [one for one in possible if one.at_best(base) < peak]
        suffice = [one for one in possible if one.at_best(base) <= room]
        # If nothing is enough alone, what helps most is a beginning.
        tried = _ends(suffice) or sorted(possible, key=lambda one: one.at_best(base))[:1]
        if not tried:
            return found, [] if found else ["advice: no change of its options is known that needs less memory"]
        best: tuple[int, StrategyPlan, PlannedJob] | None = None
        for change in tried:
            if change.kind in useless:
                continue
            if len(found) == PLANS:
                return found, [f"advice: ended after {PLANS} changes, others were not planned"]
            changed = _applied(change, base_job)
            on_progress(as_arguments(_whole(changed, job)))
            planned = planner(changed)
            found.append(_advice(plan, job, planned, changed, room))
            if found[-1].fits:
                return found, []
            if planned.highest is None or planned.highest.peak.total >= peak:
                useless.add(change.kind)
            elif best is None or planned.highest.peak.total < best[0]:
                best = planned.highest.peak.total, planned, changed
        if best is not None:
            _, base, base_job = best
    return found, []


def _ends(changes: Sequence[Change]) -> list[Change]:
    """Return the first and the last change of each kind: the smallest one that could suffice, and the largest."""
    kinds = [one.kind for one in changes]
    return [one for i, one in enumerate(changes) if one.kind not in kinds[:i] or one.kind not in kinds[i + 1 :]]


def possible_changes(plan: StrategyPlan, job: PlannedJob) -> list[Change]:
    """Return the changes that a planned strategy honours, cheapest first.

    Units to gather, and freeing them after forward; smaller micro-batches, several of which make an update; sharding over
    more processes; recomputation; parallelism inside of the model; bfloat16, which changes what is computed, last.
    """
    recipe = plan.recipe
    if recipe is None:
        return []
    return [
        *_units(plan, recipe),
        *_smaller_micro_batches(recipe),
        *_sharding(recipe),
        *_recomputation(plan, recipe),
        *_inside_of_the_model(plan, recipe, job),
        *_precision(plan, recipe),
    ]


def _units(plan: StrategyPlan, recipe: Recipe) -> Iterator[Change]:
    inner = plan.options.get("model_wrapper") or {}
    is_one = not plan.options.get("wrap") and not inner.get("auto_wrap_policy")
    if "wrap" in recipe.options and is_one and recipe.blocks:
        left: dict[Kind, float] = {"communication": 0.0, "gradients": 0.0}
        yield Change("wrap", {"strategy.wrap": "blocks"}, left)
    elif plan.options.get("reshard_after_forward") not in (None, True):
        yield Change("reshard", {"strategy.reshard_after_forward": True}, {"communication": 0.0})


def _smaller_micro_batches(recipe: Recipe) -> Iterator[Change]:
    size = recipe.batch_size
    if size is None or not recipe.is_dict:
        return
    for parts in (divisor for divisor in range(2, size + 1) if size % divisor == 0):
        changes = {
            "train_dataloader.batch_size": size // parts,
            "optim_wrapper.accumulative_counts": recipe.accumulate * parts,
        }
        yield Change("accumulate", changes, dict.fromkeys(_OF_SAMPLES, 1 / parts))


def _sharding(recipe: Recipe) -> Iterator[Change]:
    if "wrap" in recipe.options or recipe.data_shards < 2:
        return
    changes: dict[str, Any] = {"strategy.type": "fsdp"}
    if recipe.blocks:
        changes["strategy.wrap"] = "blocks"
    left: dict[Kind, float] = {**dict.fromkeys(_SHARDED, 1 / recipe.data_shards), "communication": 0.0}
    yield Change("type", changes, left)


def _recomputation(plan: StrategyPlan, recipe: Recipe) -> Iterator[Change]:
    already = plan.options.get("activation_checkpointing") or any(rank.repeated_flops for rank in plan.ranks)
    if not recipe.blocks or already or "activation_checkpointing" not in recipe.options:
        return
    left: dict[Kind, float] = {"activations": 0.0, "temporary": 0.0}
    yield Change("recompute", {"strategy.activation_checkpointing": {"classes": recipe.blocks}}, left)


def _inside_of_the_model(plan: StrategyPlan, recipe: Recipe, job: PlannedJob) -> Iterator[Change]:
    """Yield tensor and context parallelism of more processes, up to those of a node, with the samples of an update as before."""
    if "wrap" not in recipe.options:  # first of all its parameters have to be sharded
        return
    has_axes, axes = "tp" in recipe.options, plan.axes
    if axes.get("tp", 1) > 1 and not plan.options.get("sequence_parallel"):
        yield Change("sequence", {"strategy.sequence_parallel": True}, dict.fromkeys(_OF_SAMPLES, 0.0))
    if not recipe.is_dict:
        return
    inside = job.world_size // job.nodes
    of_samples = tuple(kind for kind in _OF_SAMPLES if kind != "inputs")
    for axis, divided in (("tp", (*of_samples, "communication")), ("cp", _OF_SAMPLES)):
        now = axes.get(axis, 1)
        taken = inside // max(1, axes.get("tp", 1) * axes.get("cp", 1) // now)
        for size in (size for size in range(2 * now, taken + 1) if size % now == 0 and inside % size == 0):
            times = size // now
            if recipe.data_shards % times:
                continue
            changes: dict[str, Any] = (
                {f"strategy.{axis}": size} if has_axes else {"strategy.type": f"mesh:{axis}{size}"}
            )
            if has_axes and plan.options.get("dp_shard", -1) != -1:
                changes["strategy.dp_shard"] = -1
            changes["optim_wrapper.accumulative_counts"] = recipe.accumulate * times
            yield Change(axis, changes, dict.fromkeys(divided, 1 / times))


def _precision(plan: StrategyPlan, recipe: Recipe) -> Iterator[Change]:
    if not recipe.is_float32 or plan.options.get("mixed_precision"):
        return
    left: dict[Kind, float] = dict.fromkeys((*_OF_SAMPLES, "communication"), 0.5)
    if "mixed_precision" in recipe.options:
        yield Change("precision", {"strategy.mixed_precision": {"param_dtype": _DTYPE}}, left)
    elif recipe.is_dict:
        changes = {"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.dtype": _DTYPE}
        yield Change("precision", changes, left)


def _applied(change: Change, job: PlannedJob) -> PlannedJob:
    changes = dict(change.changes)
    kind = changes.pop("strategy.type", None)
    if kind is None:
        strategy = job.strategy
    elif isinstance(job.strategy, str):
        strategy = kind
    else:
        strategy = {**job.strategy, "type": kind}
    return dataclasses.replace(job, strategy=strategy, changes={**job.changes, **changes})


def _whole(changed: PlannedJob, job: PlannedJob) -> dict[str, Any]:
    """Return all changes of a job, and of its strategy, by dotted key."""
    kinds = [one.strategy if isinstance(one.strategy, str) else one.strategy.get("type") for one in (changed, job)]
    changes = {key: value for key, value in changed.changes.items() if job.changes.get(key, job) != value}
    return changes if kinds[0] == kinds[1] else {"strategy.type": kinds[0], **changes}


def _advice(plan: StrategyPlan, job: PlannedJob, planned: StrategyPlan, changed: PlannedJob, room: int) -> Advice:
    changes = _whole(changed, job)
    keys = as_arguments(changes)
    if planned.highest is None:
        return Advice(keys, changes, message=planned.message)
    peak = planned.highest.peak.total
    # By sample, should an update have others after all.
    times = plan.samples / planned.samples if planned.samples else 1.0
    flops = [max((rank.flops for rank in one.ranks), default=0) for one in (plan, planned)]
    return Advice(
        keys,
        changes,
        peak,
        peak <= room,
        flops[1] * times / flops[0] if flops[0] else 1.0,
        planned.sent * times / plan.sent if plan.sent else None,
    )
