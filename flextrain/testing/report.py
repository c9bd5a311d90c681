"""The report of the conformance kit on a strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.text import Text

from ..core.errors import FlexTrainError
from ..tools.markup import add_row
from ..tools.tables import FittedTable
from .differences import FLOAT32_TOLERANCE

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
            this was not needed.
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
        tolerance: relative difference from a single device that counted as rounding.
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
        console = Console(width=120, color_system=None, force_terminal=False, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


class ConformanceError(FlexTrainError, AssertionError):
    """A strategy failed checks; the message lists each with the difference that was found.

    Attributes:
        report: all results, including passed checks.
    """

    def __init__(self, report: ConformanceReport) -> None:
        count, total = len(report.failed), len(report.results)
        lines = [f"{report.strategy}: {count} of {total} checks failed on {report.world_size} processes"]
        lines += [f"- {name}: {message}" for name, message in report.failed.items()]
        super().__init__("\n".join(lines))
        self.report = report
