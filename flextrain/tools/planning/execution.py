"""Run one rank of a job: in a process of its own as one of many, or as one of the processes that there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from ...core.errors import ConfigError, suggest
from ...core.rehearsing import rehearsal
from ...optim.wrapper import OptimWrapper
from ...strategies.base import Strategy
from ..script import runner_arguments
from ..strategy_options import own_dtype, strategy_options
from .plan import PlannedJob, RankPlan
from .update import Facts, Training, set_seed


class ScriptError(Exception):
    """The script failed before it made a runner; the cause says why."""


def rehearse(
    job: PlannedJob, rank: int, on_phase: Callable[[str], object] = lambda phase: None
) -> tuple[RankPlan, Facts]:
    """Plan one rank, on tensors without values. The environment variables of a launcher are set for good.

    Raises:
        ScriptError: the script makes no runner.
    """
    local = job.world_size // job.nodes
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # nobody listens there
    )
    with ExitStack() as stack:
        found = stack.enter_context(rehearsal(rank, job.world_size))
        on_phase("running the script")
        try:
            with found.building():
                given = stack.enter_context(runner_arguments(job.script, job.arguments))
        except Exception as error:
            raise ScriptError from error
        arguments, notes = arguments_for(job, given)
        training = Training(arguments, job, found, on_phase)
        training.facts.notes += notes
        plan = training.run()
        training.facts.notes += found.not_checked
        return plan, training.facts


def measure(job: PlannedJob) -> RankPlan:
    """Measure the same of this process in a real run of ``job.world_size`` processes."""
    with runner_arguments(job.script, job.arguments) as given:
        set_seed()
        training = Training(arguments_for(job, given)[0], job)
        try:
            return training.run()
        finally:
            training.strategy.teardown()


def arguments_for(job: PlannedJob, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the script's arguments of the runner with the strategy and the changes of a job, and what to note of them.

    Raises:
        ConfigError: the strategy is for one kind of accelerator only, or a change is not possible.
    """
    strategy, notes = strategy_options(job.strategy, given, "cpu")
    kind: type[Strategy] = strategy["type"]
    if kind.needs.device is not None:
        general = next(base for base in kind.__mro__ if issubclass(base, Strategy) and base.needs.device is None)
        raise ConfigError(
            f"strategy.type: {kind.__name__} cannot be planned, it runs on {kind.needs.device} only and a plan on the CPU; "
            f"plan {general.__name__}, on which it is built"
        )
    found = {**given, "strategy": strategy, "launcher": None}
    dtype = own_dtype(given["strategy"])
    if dtype not in (None, torch.float32) and own_dtype(strategy) is None:
        wrapper, name = given["optim_wrapper"], str(dtype).removeprefix("torch.")
        why = f"the script's own strategy computes in {name}, and {kind.__name__} has no such option"
        is_unchanged = isinstance(wrapper, Mapping) and wrapper.get("type", "OptimWrapper") in (
            "OptimWrapper",
            OptimWrapper,
        )
        if is_unchanged and "optimizer" in wrapper:
            found["optim_wrapper"] = {**wrapper, "type": "AmpOptimWrapper", "dtype": name}
            notes.append(f"optim_wrapper: AmpOptimWrapper with dtype={name}, because {why}")
        else:
            notes.append(f"optim_wrapper: computes as the script says, NOT comparable with a plan in {name}: {why}")
    for key, value in job.changes.items():
        *path, last = key.split(".")
        if (first := key.partition(".")[0]) not in given:
            raise ConfigError(f"changes.{first}: the runner has no such argument{suggest(first, given)}")
        inner = found
        for i, name in enumerate(path):
            if inner.get(name) is not None and not isinstance(inner[name], Mapping):
                whole = ".".join(path[: i + 1])
                raise ConfigError(f"{key}: cannot be changed, {whole} is a {type(inner[name]).__name__} and no dict")
            inner[name] = dict(inner.get(name) or {})
            inner = inner[name]
        inner[last] = value
    if job.accumulate_times > 1:
        wrapper = found["optim_wrapper"]
        if not isinstance(wrapper, Mapping) or "optimizer" not in wrapper:
            raise ConfigError("optim_wrapper: has no accumulative_counts to change, give a dict with optimizer")
        counts = wrapper.get("accumulative_counts", 1) * job.accumulate_times
        found["optim_wrapper"] = {**wrapper, "accumulative_counts": counts}
    return found, notes
