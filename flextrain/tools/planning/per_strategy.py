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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.registry import STRATEGIES
from .advice import advise
from .calibrate import Measured, fit, strategy_in, with_times
from .checkpoint import with_checkpoint, with_seconds
from .child import RankAnswer, ask
from .fit import LIMIT, ordered, search
from .links import check_nodes
from .machine_kind import MachineKind
from .machines import check_devices, nodes_for
from .plan import PlannedJob, StrategyPlan, TrainingPlan

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
    elif measured is not None:
        raise ConfigError("plan.calibrate: has no meaning without a machine, give --machine")
    if fit_axes is not None and measured is not None and measured.plan is None:
        raise ConfigError("plan.calibrate: with --fit, give PLAN.json:ddp=1.84s, with the plan of what was measured")
    if not Path(script).is_file():
        raise ConfigError(f"script: {script} is not a file")
    if not timeout_s > 0:
        raise ConfigError(f"plan.timeout: {timeout_s:g} is not allowed, give more than 0 seconds")
    jobs = []
    for strategy in strategies:
        given = strategy if isinstance(strategy, str) else dict(strategy)
        if isinstance(given, str) and given.partition(":")[0] in STRATEGIES.short_names():  # the script may know others
            STRATEGIES.expand(given, "strategies")
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
        command = [sys.executable, "-m", "flextrain.tools.planning.child", str(result), str(phase)]
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
