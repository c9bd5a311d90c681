"""check_strategy: the conformance test of every strategy, of this library and of third parties."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import textwrap
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from ..core.base.errors import ConfigError, FlexTrainError, suggest, wants_traceback
from ..strategies.base import Strategy
from ..tables import FittedTable, add_row, as_text
from .conformance_checks import CHECKS, RefusedError, StrategyUnderTest
from .differences import FLOAT32_TOLERANCE, CheckFailedError, compared
from .sessions import StrategyLike, make_strategy, strategy_name, with_class
from .workers import WorkerError, WorkerGroup

# The report of the conformance kit on a strategy.


Status = Literal["passed", "failed", "refused", "skipped", "not promised"]
_STYLES = {"passed": "green", "failed": "bold red", "refused": "yellow", "skipped": "dim", "not promised": "yellow"}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: the name for ``only`` and ``skip``.
        title: the requirement, as a sentence.
        status: "refused" means that the strategy refused the request in ``setup``, which this check allows; "not promised"
            that it differs where its class says that it may.
        message: the difference that was found; one line, then details. Of a check that passes in spite of ``not_promised``: that
            this was not needed; of one that passes with another tolerance than the kit's: the largest difference.
        seconds: how long the check took.
    """

    name: str
    title: str
    status: Status
    message: str = ""
    seconds: float = 0.0


@dataclass
class ConformanceReport:
    """The results of all checks. Printing it with rich gives a table, ``str`` the same table without colours.

    Attributes:
        strategy: name of the class.
        world_size: number of processes.
        results: one for each check.
        tolerance: relative difference from a single device that counted as rounding, where a check has no other.
    """

    strategy: str
    world_size: int
    tolerance: float = FLOAT32_TOLERANCE
    results: list[CheckResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> dict[str, str]:
        """The failed checks' messages by name."""
        return {result.name: result.message for result in self.results if result.status == "failed"}

    def __rich__(self) -> FittedTable:
        title = f"{self.strategy} on {self.world_size} processes"
        if self.tolerance != FLOAT32_TOLERANCE:
            title += f", tolerance {self.tolerance:.1g}"
        table = FittedTable(title=Text(title), title_justify="left")
        for heading in ("check", "outcome", "requirement"):
            table.add_column(heading)
        table.add_column("seconds", justify="right")
        for result in self.results:
            text = Text(result.title)
            if result.message:
                text.append(f"\n{result.message.splitlines()[0]}", style=_STYLES[result.status])
            outcome = Text(result.status, style=_STYLES[result.status])
            add_row(table, result.name, outcome, text, f"{result.seconds:.1f}")
        return table

    def __str__(self) -> str:
        return as_text(self, width=120)


class ConformanceError(FlexTrainError, AssertionError):
    """A strategy failed checks; the message lists each with the difference that was found, a line each.

    Attributes:
        report: all results, including passed checks; those of failed ones have tracebacks.
    """

    def __init__(self, report: ConformanceReport) -> None:
        count, total = len(report.failed), len(report.results)
        lines = [f"{report.strategy}: {count} of {total} checks failed on {report.world_size} processes"]
        told = {""}
        for name, message in report.failed.items():
            first, _, rest = message.partition("\n")
            lines.append(f"- {name}: {textwrap.shorten(first, 400)}")
            error = (first.partition(" failed, ")[2] or first) if rest else ""  # which the same traceback leads to
            if wants_traceback() and error not in told:
                lines.append(textwrap.indent(rest, "  "))
            told.add(error)
        if len(told) > 1 and not wants_traceback():
            lines[0] += ", tracebacks are in this error's report.failed"
        super().__init__("\n".join(lines))
        self.report = report


# Checks of the basics come first, so that the first failure in the list is nearest to its cause.
ORDER = (
    "facts", "initial_weights", "gradients", "losses", "lasting_errors", "accumulation", "clipping", "clipping_by_value", "schedule", "frozen",
    "unused", "tied", "evaluation", "full_weights", "precision", "overflow", "state_keys", "resume_itself", "resume_from_single",
    "resume_to_single", "refusals", "teardown",
)  # fmt: skip


def check_strategy(
    strategy: StrategyLike,
    *,
    world_size: int = 2,
    workers: WorkerGroup | None = None,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    tolerance: float | None = None,
    timeout_s: float = 60.0,
) -> ConformanceReport:
    """Train small models under a strategy, without the runner, and compare with a single device on the whole batch.

    A difference in a check that the strategy's ``not_promised`` names is reported with its reason, and is no failure.
    Processes on this machine with gloo, no accelerator unless those of ``workers`` see some. In a script, call it under ``if __name__ == "__main__":``.

    Args:
        strategy: a registered name, ``dict(type=...)``, a class, or a function without arguments that makes one; importable
            in other processes, so no lambda.
        world_size: number of processes; 1 for a strategy of one process.
        workers: a group of ``world_size`` processes to use; default: new processes, ended afterwards.
        only, skip: names of checks to run, or to leave out.
        tolerance: relative difference from a single device that counts as rounding, in float32; None: the strategy's own.
        timeout_s: largest number of seconds for one check.

    Raises:
        ConfigError: a wrong argument, or name in ``not_promised``; raised before any process starts.
        ConformanceError: lists every failed check with the difference that was found.
    """
    names = _selected(only, skip)
    conformance = Conformance(
        strategy, world_size=world_size, workers=workers, tolerance=tolerance, timeout_s=timeout_s
    )
    report = conformance.report
    try:
        for name in ORDER:
            if name in names:
                report.results.append(conformance.run(name))
            elif name in skip:
                report.results.append(CheckResult(name, CHECKS[name][0], "skipped"))
    finally:
        conformance.close()
    if not report.passed:
        raise ConformanceError(report)
    return report


class Conformance:
    """One strategy with the processes in which its checks run, and an empty report.

    Args:
        strategy, world_size, workers, tolerance, timeout_s: see ``check_strategy``.

    Raises:
        ConfigError: a wrong argument, or name in ``not_promised``. No process has started then, and none does before ``run``.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        *,
        world_size: int = 2,
        workers: WorkerGroup | None = None,
        tolerance: float | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        given: object = strategy
        if isinstance(given, Strategy):
            kind = type(given).__name__
            raise ConfigError(
                f"check_strategy.strategy: an object serves one model, give {kind} or dict(type={kind}, ...)"
            )
        if workers is not None and workers.world_size != world_size:
            raise ConfigError(f"check_strategy.workers: has {workers.world_size} processes, world_size is {world_size}")
        made = make_strategy(strategy)  # the constructor may raise, and starts nothing
        self._reasons = not_promised(made)
        of_all, self._tolerances = tolerances(made) if tolerance is None else (tolerance, {})
        self.report = ConformanceReport(strategy_name(strategy), world_size, of_all)
        self._strategy, self._is_own = with_class(strategy), workers is None
        self._workers = workers or WorkerGroup(world_size, timeout_s)

    def run(self, name: str) -> CheckResult:
        """Make one check."""
        tolerance = self._tolerances.get(name, self.report.tolerance)
        return _make(name, self._strategy, self._workers, tolerance, self._reasons.get(name))

    def close(self) -> None:
        """End the processes that were not given."""
        if self._is_own:
            self._workers.close()


def not_promised(strategy: Strategy) -> Mapping[str, str]:
    """Return what a strategy says that it does not promise."""
    where = f"{type(strategy).__name__}.not_promised"
    declared: Any = strategy.not_promised
    if not isinstance(declared, Mapping):
        raise ConfigError(f"{where}: {declared!r} is not allowed, give a dict of reasons by the names of checks")
    for name, reason in declared.items():
        if name not in CHECKS:
            raise ConfigError(f'{where}: "{name}" is no check{suggest(str(name), CHECKS)}')
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"{where}.{name}: {reason!r} is not allowed, give the reason in words")
    return declared


def tolerances(strategy: Strategy) -> tuple[float, Mapping[str, float]]:
    """Return what a strategy says to count as rounding, in all checks, and in some."""
    where = f"{type(strategy).__name__}.tolerance"
    declared: Any = strategy.tolerance
    by_name = declared if isinstance(declared, Mapping) else {}
    of_all = FLOAT32_TOLERANCE if declared is None or isinstance(declared, Mapping) else declared
    for name in by_name:
        if name not in CHECKS:
            raise ConfigError(f'{where}: "{name}" is no check{suggest(str(name), CHECKS)}')
    for key, value in {where: of_all, **{f"{where}.{name}": value for name, value in by_name.items()}}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"{key}: {value!r} is not allowed, give a number from 0 up")
    return of_all, by_name


def _selected(only: Collection[str] | None, skip: Collection[str]) -> set[str]:
    for argument, names in (("only", only or ()), ("skip", skip)):
        for name in names:
            if name not in CHECKS:
                raise ConfigError(f'check_strategy.{argument}: "{name}" is no check{suggest(name, CHECKS)}')
    return set(CHECKS if only is None else only) - set(skip)


def _make(name: str, strategy: StrategyLike, group: WorkerGroup, tolerance: float, reason: str | None) -> CheckResult:
    title, _ = CHECKS[name]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flextrain-") as folder:
        try:
            tested = StrategyUnderTest(strategy, group.world_size, Path(folder), tolerance)
            largest = max(group.run(_run_check, name, tested))
        except WorkerError as error:
            seconds = time.perf_counter() - begin
            if isinstance(error.__cause__, RefusedError):
                return CheckResult(name, title, "refused", str(error.__cause__), seconds)
            # Messages of checks explain themselves; all other errors need the traceback.
            if not isinstance(error.__cause__, CheckFailedError):
                is_exchange = isinstance(error.__cause__, (RuntimeError, type(None)))  # or a process has died, or hangs
                advice = _ADVICE.get(name, "") if is_exchange else ""
                said = str(error).removeprefix(f"{_run_check.__name__}: ")
                return CheckResult(name, title, "failed", f"{advice}{said}", seconds)
            found = str(error.__cause__)
            if reason is not None:
                return CheckResult(name, title, "not promised", f"{reason}: {found}", seconds)
            return CheckResult(name, title, "failed", found, seconds)
    told = ""
    if reason is not None:
        told = f"not_promised names it and is not needed ({reason})"
    elif tolerance != FLOAT32_TOLERANCE and largest >= 0:
        told = f"largest difference {largest:.1e}, allowed {tolerance:.0e}"
    return CheckResult(name, title, "passed", told, time.perf_counter() - begin)


_ADVICE = {
    "unused": "where one process has no gradient of a parameter and another has one, all must send the same messages, zeros in "
    "its place, and keep the average: "
}
"""What an error of torch's in a check, a process that died, or no answer most likely comes from."""


def _run_check(name: str, tested: StrategyUnderTest) -> float:
    """In a worker: make a check; return the largest difference that it has seen, -1 if it has compared nothing."""
    compared.clear()
    CHECKS[name][1](dataclasses.replace(tested, rank=int(os.environ["RANK"])))
    return max(compared, default=-1.0)
