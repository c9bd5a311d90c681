"""check_strategy: the conformance test of every strategy, of this library and of third parties."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from ..core.errors import ConfigError, suggest
from ..strategies.base import Strategy
from . import checks_contract, checks_state, checks_training  # noqa: F401 - importing them registers their checks
from .check_table import CHECKS, RefusedError, StrategyUnderTest
from .differences import FLOAT32_TOLERANCE, CheckFailedError
from .report import CheckResult, ConformanceError, ConformanceReport
from .sessions import StrategyLike, make_strategy, strategy_name, with_class
from .workers import WorkerError, WorkerGroup

# Checks of the basics come first, so that the first failure in the list is nearest to its cause.
ORDER = (
    "facts", "initial_weights", "gradients", "losses", "accumulation", "clipping", "clipping_by_value", "schedule", "frozen", "tied",
    "evaluation", "full_weights", "precision", "overflow", "state_keys", "resume_itself", "resume_from_single", "resume_to_single",
    "refusals", "teardown",
)  # fmt: skip


def check_strategy(
    strategy: StrategyLike,
    *,
    world_size: int = 2,
    workers: WorkerGroup | None = None,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    tolerance: float = FLOAT32_TOLERANCE,
    timeout_s: float = 60.0,
) -> ConformanceReport:
    """Train small models under a strategy, without the runner, and compare with a single device on the whole batch.

    Processes on this machine with gloo, no accelerator unless those of ``workers`` see some. In a script, call it under ``if __name__ == "__main__":``.

    Args:
        strategy: a registered name, ``dict(type=...)``, a class, or a function without arguments that makes one; importable
            in other processes, so no lambda.
        world_size: number of processes; 1 for a strategy of one process.
        workers: a group of ``world_size`` processes to use; default: new processes, ended afterwards.
        only, skip: names of checks to run, or to leave out.
        tolerance: relative difference from a single device that counts as rounding, in float32.
        timeout_s: largest number of seconds for one check.

    Raises:
        ConfigError: a wrong argument; raised before any process starts.
        ConformanceError: lists every failed check with the difference that was found.
    """
    names = _selected(only, skip)
    given: object = strategy
    if isinstance(given, Strategy):
        kind = type(given).__name__
        raise ConfigError(f"check_strategy.strategy: an object serves one model, give {kind} or dict(type={kind}, ...)")
    make_strategy(strategy)  # the constructor may raise, and starts nothing
    report = ConformanceReport(strategy_name(strategy), world_size)
    strategy = with_class(strategy)
    group = workers or WorkerGroup(world_size, timeout_s)
    if group.world_size != world_size:
        raise ConfigError(f"check_strategy.workers: has {group.world_size} processes, world_size is {world_size}")
    try:
        for name in ORDER:
            if name in names:
                report.results.append(_make(name, strategy, group, tolerance))
            elif name in skip:
                report.results.append(CheckResult(name, CHECKS[name][0], "skipped"))
    finally:
        if workers is None:
            group.close()
    if not report.passed:
        raise ConformanceError(report)
    return report


def _selected(only: Collection[str] | None, skip: Collection[str]) -> set[str]:
    for argument, names in (("only", only or ()), ("skip", skip)):
        for name in names:
            if name not in CHECKS:
                raise ConfigError(f'check_strategy.{argument}: "{name}" is no check{suggest(name, CHECKS)}')
    return set(CHECKS if only is None else only) - set(skip)


def _make(name: str, strategy: StrategyLike, group: WorkerGroup, tolerance: float) -> CheckResult:
    title, _ = CHECKS[name]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flextrain-") as folder:
        try:
            group.run(_run_check, name, StrategyUnderTest(strategy, group.world_size, Path(folder), tolerance))
        except WorkerError as error:
            seconds = time.perf_counter() - begin
            if isinstance(error.__cause__, RefusedError):
                return CheckResult(name, title, "refused", str(error.__cause__), seconds)
            # Messages of checks explain themselves; all other errors need the traceback.
            found = str(error.__cause__) if isinstance(error.__cause__, CheckFailedError) else str(error)
            return CheckResult(name, title, "failed", found, seconds)
    return CheckResult(name, title, "passed", seconds=time.perf_counter() - begin)


def _run_check(name: str, tested: StrategyUnderTest) -> None:
    CHECKS[name][1](dataclasses.replace(tested, rank=int(os.environ["RANK"])))
