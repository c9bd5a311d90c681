"""The process that plans one rank: ``python -m flextrain.tools.planning.child RESULT PHASE`` reads a job from standard input.

Each rank has a process of its own, because a script and torch's process groups leave traces in one.
"""

from __future__ import annotations

import pickle
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import FlexTrainError
from ...core.rehearsing_private import device_errors, value_errors
from .execution import ScriptError, rehearse
from .plan import PlannedJob, RankPlan
from .update import Facts


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
        found.problem = _explained(error if error.__cause__ is None or not found.is_of_script else error.__cause__)
    found.seconds = time.process_time()
    found.resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def _explained(error: BaseException) -> str:
    if isinstance(error, FlexTrainError):
        return _one_line(error)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    where = _where(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, value_errors()):
            hint = "" if "/torch/" in where else "; return tensors to log as they are, without item() or float()"
            return f"the computation depends on values at {where}, which a plan has none of ({_one_line(cause)}){hint}"
        cause = cause.__cause__
    text = _one_line(error)
    if isinstance(error, device_errors()) or any(word in text for word in _OF_CUDA):
        return f"needs another device than the CPU, on which a plan runs, at {where}; give tensors the device of others ({text})"
    return f"{type(error).__name__}: {text}" + (f" ({where})" if where else "")


_OF_CUDA = ("NVIDIA driver", "not compiled with CUDA", "No CUDA GPUs", "invalid device ordinal", "torch_npu")


def _where(error: BaseException) -> str:
    """File and line of the user's code that failed, or of torch's optimizer if only the library called it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_passed_through(frame.filename)]
    if own and Path(own[-1].filename).is_relative_to(_HOME):
        own += [frame for frame in frames if "/torch/optim/" in frame.filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


_HOME = Path(__file__).resolve().parents[3]


def _is_passed_through(path: str) -> bool:
    """Whether a file is torch's or planning's own, which every operation goes through."""
    return "/torch/" in path or path.startswith("<") or Path(path).parent == Path(__file__).parent


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def main(result: str, phase: str) -> None:
    """Answer the job that standard input has, in the file ``result``; the file ``phase`` says how far it has come."""
    # Safe to unpickle: the parent process has just written it, and reads what is written here.
    job, rank = pickle.loads(sys.stdin.buffer.read())
    Path(result).write_bytes(pickle.dumps(answer(job, rank, Path(phase).write_text)))


def ask(job: PlannedJob, rank: int) -> Any:
    """Return standard input of a process that plans this rank."""
    return pickle.dumps((job, rank))


if __name__ == "__main__":
    sys.modules["flextrain.tools.planning.child"] = sys.modules["__main__"]  # one class RankAnswer, for pickle
    RankAnswer.__module__ = "flextrain.tools.planning.child"
    main(*sys.argv[1:])
