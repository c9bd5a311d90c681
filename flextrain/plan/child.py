"""The process that plans one rank: ``python -m flextrain.plan.child RESULT PHASE`` reads a job from standard input.

Each rank has a process of its own, because a script and torch's process groups leave traces in one.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.base.errors import ConfigError, FlexTrainError, one_line, suggest
from ..optim.wrapper import OptimWrapper
from ..strategies.base import Strategy
from ..strategy_options import own_dtype, strategy_options
from ..user_script import runner_arguments
from .plan import PlannedJob, RankPlan
from .rehearsing import WithoutValues, rehearsal
from .rehearsing_private import device_errors, value_errors
from .update import Facts, Training, set_seed

# Run one rank of a job: in a process of its own as one of many, or as one of the processes that there are.


class ScriptError(Exception):
    """The script failed before it made a runner; the cause says why."""


def rehearse(
    job: PlannedJob, rank: int, on_phase: Callable[[str], object] = lambda phase: None
) -> tuple[RankPlan, Facts]:
    """Plan one rank, on tensors without values. The environment variables of a launcher are set for good.

    Raises:
        ScriptError: the script makes no runner.
    """
    on_phase("running the script")
    with as_rank(job, rank) as (found, arguments, notes):
        training = Training(arguments, job, found, on_phase)
        training.facts.notes += notes
        plan = training.run()
        training.facts.notes += found.not_checked
        return plan, training.facts


@contextmanager
def as_rank(job: PlannedJob, rank: int) -> Iterator[tuple[WithoutValues, dict[str, Any], list[str]]]:
    """Context in which this process is one rank of a job in a rehearsal; its arguments of the runner, and what to note of them.

    The environment variables of a launcher are set for good.

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
        try:
            with found.building():
                given = stack.enter_context(runner_arguments(job.script, job.arguments))
        except Exception as error:
            raise ScriptError from error
        yield found, *arguments_for(job, given)


def measure(job: PlannedJob) -> RankPlan:
    """Measure the same of this process in a real run of ``job.world_size`` processes."""
    with runner_arguments(job.script, job.arguments) as given:
        set_seed()
        training = Training(arguments_for(job, given)[0], job)
        try:
            return training.run()
        finally:
            training.strategy.leave()


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


@dataclass
class RankAnswer:
    """What the process has found.

    Attributes:
        problem: why there is no plan, one line; empty if there is one.
        is_of_script: the script has failed before it made a runner.
        seconds: processor time.
        resident: largest resident memory in bytes.
    """

    plan: RankPlan | None = None
    facts: Facts = field(default_factory=Facts)
    problem: str = ""
    is_of_script: bool = False
    seconds: float = 0.0
    resident: int = 0


def answer(job: PlannedJob, rank: int, on_phase: Callable[[str], object] = lambda phase: None) -> RankAnswer:
    """Plan a rank; errors of the configuration and of the user's code become one line."""
    found = RankAnswer()
    try:
        found.plan, found.facts = rehearse(job, rank, on_phase)
    except Exception as error:
        found.is_of_script = isinstance(error, ScriptError)
        found.problem = explained(error)
    found.seconds = time.process_time()
    found.resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def explained(error: BaseException, otherwise: str = "") -> str:
    """Return what ended a rehearsal as one line: the module, file and line of the user's code that failed, and what to do.

    Args:
        error: whatever was raised.
        otherwise: what else to do where the computation depends on values.
    """
    if isinstance(error, ScriptError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, FlexTrainError):
        return _one_line(error)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    where = _where(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, value_errors()):
            hint = otherwise if "/torch/" in where else _INSTEAD + otherwise
            return f"the computation depends on values at {where}, which a rehearsal has none of ({_one_line(cause)}){hint}"
        cause = cause.__cause__
    text = _one_line(error)
    if isinstance(error, device_errors()) or any(word in text for word in _OF_CUDA):
        return f"needs another device than the CPU, on which a plan runs, at {where}; give tensors the device of others ({text})"
    return f"{type(error).__name__}: {text}" + (f" ({where})" if where else "")


_INSTEAD = (
    "; choose by torch.where in place of branches and of masks that select, and return tensors to log as they are, "
    "without item() or float()"
)
_OF_CUDA = ("NVIDIA driver", "not compiled with CUDA", "No CUDA GPUs", "invalid device ordinal", "torch_npu")


def _where(error: BaseException) -> str:
    """Module, file and line of the user's code that failed, or of torch's optimizer if only the library called it."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    own = [each for each in frames if not _is_passed_through(each[0].f_code)]
    if own and Path(own[-1][0].f_code.co_filename).is_relative_to(_HOME):
        own += [each for each in frames if "/torch/optim/" in each[0].f_code.co_filename]
    line = f"{own[-1][0].f_code.co_filename}:{own[-1][1]}" if own else ""
    called = [frame.f_locals.get("self") for frame, _ in frames]
    modules = [each for each in called if isinstance(each, nn.Module) and not isinstance(each, DistributedDataParallel)]
    if not modules or not line:
        return line
    name = next((name for name, module in modules[0].named_modules() if module is modules[-1]), "")
    return f"{name or 'the model'} ({line})"


_HOME = Path(__file__).resolve().parents[2]


def _is_passed_through(code: CodeType) -> bool:
    """Whether a function is torch's or planning's own, which every operation goes through."""
    path = code.co_filename
    is_mode = code.co_name in ("__torch_dispatch__", "__torch_function__") or Path(path).parent == Path(__file__).parent
    return "/torch/" in path or path.startswith("<") or is_mode


def _one_line(error: BaseException) -> str:
    return one_line(error)[:600] or type(error).__name__


def main(result: str, phase: str) -> None:
    """Answer the job that standard input has, in the file ``result``; the file ``phase`` says how far it has come."""
    # Safe to unpickle: the parent process has just written it, and reads what is written here.
    job, rank = pickle.loads(sys.stdin.buffer.read())
    Path(result).write_bytes(pickle.dumps(answer(job, rank, Path(phase).write_text)))


def ask(job: PlannedJob, rank: int) -> Any:
    """Return standard input of a process that plans this rank."""
    return pickle.dumps((job, rank))


if __name__ == "__main__":
    sys.modules["flextrain.plan.child"] = sys.modules["__main__"]  # one class RankAnswer, for pickle
    RankAnswer.__module__ = "flextrain.plan.child"
    main(*sys.argv[1:])
