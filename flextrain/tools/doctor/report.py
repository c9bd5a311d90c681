"""Put the facts, problems and strategies of a machine into a report, and show it as tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ... import __version__
from .findings import Finding, find_problems
from .machine import Machine, look
from .restarts import restarts_in_words
from .strategies import StrategyStatus, judge_strategies

if TYPE_CHECKING:
    from rich.console import Group

_STYLES = {"error": "bold red", "warning": "yellow"}


@dataclass
class Diagnosis:
    """The diagnosis; printing it with rich gives tables."""

    versions: dict[str, str | None]
    devices: dict[str, list[str]]
    strategies: list[StrategyStatus] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    restarts: str = ""
    """What torchrun can do after failures."""

    @property
    def exit_status(self) -> int:
        """1 if the set-up is broken, else 0. A missing optional package is no error."""
        return int(any(finding.level == "error" for finding in self.findings))

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "broken": bool(self.exit_status)}

    def __str__(self) -> str:
        """The report as plain lines, for a Python without rich."""
        lines = [f"{package}: {version or 'not installed'}" for package, version in self.versions.items()]
        for status in self.strategies:
            answer = "runs here" if status.usable else "does not run here"
            lines.append(f"{status.name} {answer}: {status.reason}; it needs {status.needs}")
        lines += [f"restarts: {self.restarts}"] if self.restarts else []
        lines += [f"{finding.level}: {finding.what}; {finding.advice}" for finding in self.findings]
        return "\n".join(lines)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        from ..markup import add_row
        from ..tables import FittedTable

        versions = FittedTable("package", "version", title="Versions", title_justify="left")
        for package, version in self.versions.items():
            add_row(versions, package, version or Text("not installed", style="dim"))
        # Users copy commands from here: long ones are wrapped, never cut off.
        strategies = FittedTable("strategy", "runs here", "why", "needs", title="Strategies", title_justify="left")
        for status in self.strategies:
            answer = Text("yes", style="green") if status.usable else Text("no", style="yellow")
            names = Text.assemble(
                status.name, ("\n" + ", ".join(status.short_names), "dim") if status.short_names else ""
            )
            add_row(strategies, names, answer, status.reason, status.needs)
        lines = [Text.assemble((f"{f.level}: ", _STYLES[f.level]), f"{f.what}; {f.advice}") for f in self.findings]
        restarts = [Text(f"Restarts: {self.restarts}")] if self.restarts else []
        return Group(versions, strategies, *restarts, *(lines or [Text("No problem was found.", style="green")]))


def diagnose(variables: Mapping[str, str] | None = None) -> Diagnosis:
    """Examine this machine and this Python.

    Args:
        variables: environment variables to examine; default: ``os.environ``.
    """
    given = os.environ if variables is None else variables
    return examine(look(given), given)


def examine(machine: Machine, variables: Mapping[str, str] | None = None) -> Diagnosis:
    """The report that follows from the facts, and from environment variables."""
    versions: dict[str, str | None] = {"flextrain": __version__, "python": platform.python_version()}
    versions |= {**machine.versions, "CUDA (of torch)": machine.torch.get("cuda"), "NCCL": machine.torch.get("nccl")}
    versions |= {"ROCm (of torch)": machine.torch.get("hip"), "CANN": machine.cann}
    restarts = restarts_in_words(machine.versions["torch"], variables or {})
    return Diagnosis(versions, machine.devices, judge_strategies(machine), find_problems(machine), restarts)
