"""The summary at the end of `flextrain run`."""

from __future__ import annotations

from collections import Counter

from ...core.errors import counted
from .launching import Supervisor


def summary(status: int, how: str, watched: Supervisor) -> str:
    """What happened to a job, in a few lines: starts, restarts with their reasons, what they cost, and what to do."""
    history = watched.history
    reasons = Counter(start.reason for start in history.starts[:-1])
    lines = [f"{how}; exit status {status}"]
    if history.starts:
        last = history.current
        lines.append(
            f"{counted(len(history.starts), 'start')}, {counted(len(history.starts) - 1, 'restart')}; the last on "
            f"{counted(last.processes, 'process', 'processes')} of {counted(last.machines, 'machine')}, {last.iter} iterations"
        )
    lines += [f"  {number} x {reason}" if number > 1 else f"  {reason}" for reason, number in reasons.items()]
    if reasons:
        lines.append(f"{counted(history.repeated, 'update')} repeated, {history.lost_s:.1f} s lost by restarts")
    if advice := _advice(status, watched):
        lines.append(advice)
    return "\n".join(f"flextrain run: {line}" for line in lines)


def _advice(status: int, watched: Supervisor) -> str:
    where = f" {watched.work_dir}/events.jsonl has all events." if watched.work_dir else ""
    fault = watched.history.current.fault if watched.history.starts else None
    is_preemption = fault is not None and fault.is_preemption
    if status == 0 and not is_preemption:
        return ""
    if status in (130, 143) or is_preemption:
        return f"To go on: the same command, with resume=True in the script.{where}"
    if watched.futile:
        or_leave = ", or leave such samples out" if fault is not None and fault.samples else ""
        return f"To do: mend what fails{or_leave}; then the same command with resume=True.{where}"
    return f"To do: see the first error above; the same command with resume=True in the script goes on.{where}"
