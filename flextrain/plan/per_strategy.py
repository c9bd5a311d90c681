"""Plan a user's training under several strategies, each in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.base.errors import ConfigError
from ..strategies.config import POLICIES, ActivationCheckpointing
from .checkpoint import with_checkpoint, with_seconds
from .child import RankAnswer, ask
from .fit import LIMIT, ordered, search
from .ledger import check_nodes
from .machines import MachineKind, check_devices, nodes_for
from .plan import KINDS, Advice, Kind, PlannedJob, Recipe, StrategyPlan, TrainingPlan, as_arguments
from .step_time import Measured, fit, strategy_in, with_times

# Advice for a strategy that does not fit: the cheapest changes that could make it fit, each planned again.


PLANS = 10
"""Number of changes that are planned for one strategy; each takes as long as the strategy itself."""
_SHARDED: tuple[Kind, ...] = ("parameters", "gradients", "optimizer_state")
_OF_SAMPLES: tuple[Kind, ...] = ("inputs", "activations", "temporary")
_DTYPE = "bfloat16"
_CHECKPOINTING = "strategy.activation_checkpointing"
_ALL = {"policy": None, "every": 1, "recompute": True}
"""Options of recomputation with the values for which most is computed again."""
_LEFT_BY_MATMULS = 0.25
"""Share of activations that results of products are at least, roughly: in a Llama's layer they are some 0.6 of what it saves."""

Planner = Callable[[PlannedJob], StrategyPlan]


@dataclass(frozen=True)
class Change:
    """A change of one kind.

    Attributes:
        kind: changes of a kind that was refused, or did not help, are not tried again.
        changes: see PlannedJob; ``strategy.type`` is another strategy.
        left: the share of each kind of memory that it leaves at best; 1 of all others.
        weaker_than: a kind of change that leaves less; where that one does not help, this one is not tried.
    """

    kind: str
    changes: dict[str, Any]
    left: Mapping[Kind, float] = field(default_factory=dict)
    weaker_than: str = ""

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
        possible = [one for one in possible_changes(base, base_job) if useless.isdisjoint((one.kind, one.weaker_than))]
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
    more processes; logits by chunks; recomputation of less and of more; activations on the host; parallelism inside of the model; bfloat16, which changes what is computed, last.
    """
    recipe = plan.recipe
    if recipe is None:
        return []
    return [
        *_units(plan, recipe),
        *_smaller_micro_batches(recipe),
        *_sharding(recipe),
        *_logits(recipe),
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
    elif _keeps_gathered(plan.options):
        yield Change("reshard", {"strategy.reshard_after_forward": True}, {"communication": 0.0})


def _keeps_gathered(options: Mapping[str, Any]) -> bool:
    given = options.get("reshard_after_forward")
    return options.get("pp", 1) > 1 if given is None else given is not True


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


def _logits(recipe: Recipe) -> Iterator[Change]:
    if recipe.has_large_logits:
        yield Change("logits", {"transforms": [{"type": "ChunkedLoss"}]}, {"activations": 0.0, "temporary": 0.0})


def _recomputation(plan: StrategyPlan, recipe: Recipe) -> Iterator[Change]:
    """Yield recomputation of less and of more, and then activations on the host, from what the strategy does already."""
    given = plan.options.get("activation_checkpointing")
    if not recipe.blocks or "activation_checkpointing" not in recipe.options:
        return
    none_left: dict[Kind, float] = {"activations": 0.0, "temporary": 0.0}
    whole: dict[str, Any] = {_CHECKPOINTING: {"classes": recipe.blocks}}
    if given is None:
        if any(rank.repeated_flops for rank in plan.ranks):  # the model does it itself
            return
        for kind, key, value, left in (("matmuls", "policy", "matmuls", _LEFT_BY_MATMULS), ("every", "every", 2, 0.5)):
            change = {_CHECKPOINTING: {"classes": recipe.blocks, key: value}}
            yield Change(kind, change, {**none_left, "activations": left}, "recompute")
        yield Change("recompute", whole, none_left)
    elif isinstance(given, Mapping):
        if not given.keys() <= ActivationCheckpointing.model_fields.keys():
            return  # an engine's own
        more: dict[str, Any] = {
            f"{_CHECKPOINTING}.{key}": all_of for key, all_of in _ALL.items() if given.get(key, all_of) != all_of
        }
        if more:
            yield Change("recompute", more, none_left)
        whole = more
        if given.get("offload"):
            return
    elif given in POLICIES:
        yield Change("recompute", whole, none_left)
    yield Change("offload", _with_offloading(whole), none_left)


def _with_offloading(changes: Mapping[str, Any]) -> dict[str, Any]:
    if _CHECKPOINTING in changes:
        return {_CHECKPOINTING: {**changes[_CHECKPOINTING], "offload": True}}
    return {**changes, f"{_CHECKPOINTING}.offload": True}


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
        host=planned.host,
    )


MARGIN = 0.05
"""Share of a device's memory that is left free for what a plan does not see."""
_MEMORY_OF_ONE = 4 * 2**30
_LOOK_S = 0.1
_UNITS = {"B": 1, **{f"{unit}B": 1000**n for n, unit in enumerate("KMGT", 1)}}
_UNITS |= {f"{unit}iB": 1024**n for n, unit in enumerate("KMGT", 1)}


def plan(
    script: str,
    strategies: Sequence[str | Mapping[str, Any]] = (),
    *,
    world_size: int,
    nodes: int | None = None,
    arguments: Sequence[str] = (),
    device_memory: int | None = None,
    machine: MachineKind | None = None,
    measured: Measured | None = None,
    changes: Mapping[str, Any] | None = None,
    disk: float | None = None,
    disk_of_all: float | None = None,
    advice: bool = False,
    fit_axes: Sequence[str] | None = None,
    fit_limit: int = LIMIT,
    timeout_s: float = 600.0,
    on_progress: Callable[[str], object] = lambda what: None,
    on_phase: Callable[[str, str, float], object] = lambda what, phase, seconds: None,
    on_result: Callable[[TrainingPlan, StrategyPlan, float], object] = lambda plan, found, seconds: None,
) -> TrainingPlan:
    """Plan the training of a script under each strategy; no accelerator and no other process is needed.

    The script runs up to its FlexibleRunner, once for each strategy and for each pipeline stage. Set-up and two updates are
    then made on tensors without values, with the first samples of its data. Strategies are planned at the same time, one on
    each core, as far as there are 4 GiB of memory for each.

    Args:
        strategies: names as for `flextrain verify`, or configurations with ``type``. A strategy of the class that the script
            itself uses gets the script's options.
        world_size, nodes, arguments, changes: see PlannedJob. Without ``nodes``, as many as a machine's devices need, or 1.
        device_memory: bytes of one device, for ``TrainingPlan.fits``; default: those of the machine.
        machine: of which kind the nodes are, for ``StrategyPlan.time``.
        measured: an update that was measured on this machine, to fit these times to.
        disk, disk_of_all: bytes per second that one process, and all together, write into a checkpoint; None: not known.
        advice: plan changes of strategies that do not fit on ``device_memory``, see ``advice.py``.
        fit_axes: search over meshes of these axes for those that fit, in place of ``strategies``; see ``fit.py``.
        fit_limit: number of meshes that are planned at most.
        timeout_s: largest number of seconds for one rank.
        on_progress: called with what is planned next, by any thread; so are the other two.
        on_phase: called several times a second with what is planned, where in it that is, and for how many seconds.
        on_result: called with the plan so far, a strategy that has been planned, and the seconds that it took.

    Raises:
        ConfigError: the arguments are wrong, or the script makes no runner; wrong configurations of strategies are ``refused`` in the plan.
    """
    if nodes is None:
        nodes = 1 if machine is None or world_size < 1 else nodes_for(machine, world_size)
    if problem := check_nodes(world_size, nodes):
        raise ConfigError(f"plan.world_size: {world_size} with {nodes} nodes is not allowed, {problem}")
    if machine is not None:
        check_devices(machine, world_size, nodes)
        device_memory = machine.memory if device_memory is None else device_memory
    if fit_axes is not None and measured is not None and measured.plan is None:
        raise ConfigError("plan.calibrate: with --fit, give PLAN.json:ddp=1.84s, with the plan of what was measured")
    if not Path(script).is_file():
        raise ConfigError(f"script: {script} is not a file")
    if not timeout_s > 0:
        raise ConfigError(f"plan.timeout: {timeout_s:g} is not allowed, give more than 0 seconds")
    jobs = []
    for strategy in strategies:
        given = (
            strategy if isinstance(strategy, str) else dict(strategy)
        )  # the script may know names and axes of its own
        jobs.append(PlannedJob(script, given, world_size, nodes, tuple(arguments), dict(changes or {})))
    # Errors now, because planning takes minutes.
    if measured is not None and machine is not None:
        if measured.plan is None:
            strategy_in([StrategyPlan(job.name, "planned") for job in jobs], measured)
        else:
            fit(measured.plan, machine, measured)
    unseen = 0 if device_memory is None else int(device_memory * MARGIN)
    found = TrainingPlan(
        script, world_size, nodes, device_memory, torch.__version__, unseen=unseen, arguments=list(arguments)
    )

    over = threading.Event()

    def planner(job: PlannedJob) -> StrategyPlan:
        began = time.monotonic()

        def tell(phase: str) -> None:
            if over.is_set():
                raise _OverError
            on_phase(job.name, phase, time.monotonic() - began)

        return with_seconds(plan_strategy(job, timeout_s=timeout_s, on_phase=tell), disk, disk_of_all)

    def planned_with_advice(job: PlannedJob) -> StrategyPlan:
        began = time.monotonic()
        on_progress(job.name)
        planned = planner(job)
        if advice and device_memory is not None and found.fits(planned) is False:
            tried, notes = advise(
                planned,
                job,
                device_memory - unseen,
                planner,
                lambda keys: on_progress(f"{job.name} with {keys}"),
            )
            planned = dataclasses.replace(planned, advice=tried, notes=[*planned.notes, *notes])
        on_result(found, planned, time.monotonic() - began)
        return planned

    if fit_axes is not None:
        job = PlannedJob(script, "", world_size, nodes, tuple(arguments), dict(changes or {}))
        found = search(found, job, fit_axes, planner, limit=fit_limit, on_progress=on_progress)
    with ThreadPoolExecutor(_at_once(), "flextrain-plan") as threads:
        pending = [threads.submit(planned_with_advice, job) for job in jobs]
        try:
            found.strategies.extend([one.result() for one in pending])
        except BaseException:
            over.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    found = found if machine is None else with_times(found, machine, measured)
    return found if fit_axes is None else dataclasses.replace(found, strategies=ordered(found, found.strategies))


class _OverError(Exception):
    """Ends the threads of a plan that another one, or a signal, has ended."""


def _at_once() -> int:
    """How many strategies are planned at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        (available,) = re.findall(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # not Linux
        return cores
    return max(1, min(cores, int(available) * 1024 // _MEMORY_OF_ONE))


def plan_strategy(
    job: PlannedJob, *, timeout_s: float = 600.0, on_phase: Callable[[str], object] = lambda phase: None
) -> StrategyPlan:
    """Plan one strategy: one rank, and one of each further pipeline stage.

    Raises:
        ConfigError: the script makes no runner.
    """
    answers = [run_child(job, 0, timeout_s, on_phase)]
    first = answers[0]
    if first.is_of_script:
        raise ConfigError(first.problem)
    for rank in _of_other_stages(first.facts.stages):
        if not answers[-1].problem:
            answers.append(run_child(job, rank, timeout_s, lambda phase, rank=rank: on_phase(f"rank {rank}, {phase}")))  # type: ignore[misc]
    problem = next((answer.problem for answer in answers if answer.problem), "")
    facts = first.facts
    seconds, resident = sum(one.seconds for one in answers), max(one.resident for one in answers)
    if problem:
        return StrategyPlan(job.name, "refused", problem, seconds=seconds, resident=resident)
    began = time.thread_time()
    shares = [answer.facts.share for answer in answers if answer.facts.share is not None]
    planned = [answer.plan for answer in answers if answer.plan is not None]
    checkpoint, ranks, notes = with_checkpoint(planned, shares, max(1, len(facts.stages)), job.world_size)
    return StrategyPlan(
        job.name,
        "planned",
        options=facts.options,
        axes=facts.axes,
        ranks=ranks,
        whole_parameters=facts.whole_parameters,
        whole_checkpoint=0 if checkpoint is None else checkpoint.whole,
        notes=[*facts.notes, *notes],
        checkpoint=checkpoint,
        pipeline=facts.pipeline,
        source=facts.source,
        seconds=seconds + time.thread_time() - began,
        recipe=facts.recipe,
        resident=resident,
    )


def _of_other_stages(stages: Sequence[int]) -> list[int]:
    """One rank of each further stage; of more than four, the second and the last: those between are as the second."""
    others = list(stages[1:])
    return others if len(others) < 4 else [others[0], others[-1]]


def run_child(
    job: PlannedJob, rank: int, timeout_s: float, on_phase: Callable[[str], object] = lambda phase: None
) -> RankAnswer:
    """Plan a rank in a new process that sees no accelerator; ``on_phase`` is called meanwhile, and may raise."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="flextrain-plan-") as folder:
        question, result, phase, errors = (Path(folder) / name for name in ("question", "result", "phase", "stderr"))
        question.write_bytes(ask(job, rank))
        phase.write_text("starting a process")
        command = [sys.executable, "-m", "flextrain.plan.child", str(result), str(phase)]
        deadline = time.monotonic() + timeout_s
        with question.open("rb") as given, errors.open("wb") as err:
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.DEVNULL, stderr=err, env={**os.environ, **hidden}
            )
        try:
            while process.poll() is None:
                on_phase(phase.read_text())
                if time.monotonic() > deadline:
                    return RankAnswer(problem=f"planning rank {rank} took more than {timeout_s:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            process.kill()
            process.wait()
        if result.is_file():
            found: RankAnswer = pickle.loads(result.read_bytes())
            return found
        said = (errors.read_text(errors="replace").strip().splitlines() or [""])[-1]
        return RankAnswer(problem=f"planning rank {rank} ended with status {process.returncode}: {said}")


def size_in_bytes(text: str, where: str) -> int:
    """Return the number of bytes that a text such as "80GiB" says.

    Raises:
        ConfigError: it says none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f'{where}: "{text}" is not allowed, give a number with a unit, such as 80GiB')
    return int(float(match[1]) * _UNITS[match[2]])


def rate_in_bytes(text: str, where: str) -> int:
    """Return the number of bytes per second that a text such as "2GB/s" says.

    Raises:
        ConfigError: it says none.
    """
    size, per, second = text.partition("/")
    if not per or second.strip() != "s":
        raise ConfigError(f'{where}: "{text}" is not allowed, give bytes per second, such as 2GB/s')
    return size_in_bytes(size, where)
