"""``pytest --flextrain-strategy my_package:MyStrategy``: the conformance checks of a strategy as tests, and their table.

pytest finds this module by its entry point in every environment that has flextrain, so nothing of torch is imported before the option is given.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .testing.conformance import CheckResult, Conformance

_OPTION = "--flextrain-strategy"
_PROPERTY = "flextrain"
"""Of a test's report: strategy, number of processes, tolerance, and the result. xdist passes it on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; without the first, nothing happens."""
    group = parser.getgroup("flextrain", "conformance of training strategies")
    group.addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="STRATEGY",
        help="run the checks of flextrain.testing.check_strategy: my_package:MyStrategy, a function without arguments that "
        "makes one, or a registered name; may be given several times",
    )
    group.addoption(
        "--flextrain-processes", type=int, default=2, metavar="N", help="processes that the checks run in (default: 2)"
    )
    group.addoption(
        "--flextrain-timeout", type=float, default=60.0, metavar="S", help="seconds for one check (default: 60)"
    )


@pytest.hookimpl(tryfirst=True)  # before -k and the like choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks to the tests."""
    for given in config.getoption(_OPTION):
        items += _Checks.from_parent(session, name=given).collect()


class _Checks(pytest.Collector):
    """The checks of one strategy, whose processes start with the first and end after the last."""

    conformance: Conformance

    def collect(self) -> Iterator[_Check]:
        from .core.base.errors import FlexTrainError
        from .testing.conformance import ORDER, Conformance

        options = self.config.option
        try:
            strategy = pkgutil.resolve_name(self.name) if ":" in self.name else self.name
            self.conformance = Conformance(
                strategy, world_size=options.flextrain_processes, timeout_s=options.flextrain_timeout
            )
        except (ImportError, AttributeError, ValueError, FlexTrainError) as error:
            raise pytest.UsageError(f"{_OPTION} {self.name}: {error}") from error
        return (_Check.from_parent(self, name=name) for name in ORDER)

    def teardown(self) -> None:
        self.conformance.close()


class _Check(pytest.Item):
    parent: _Checks

    def runtest(self) -> None:
        conformance = self.parent.conformance
        result: CheckResult = conformance.run(self.name)
        report = dataclasses.replace(conformance.report, results=[result])
        self.user_properties.append((_PROPERTY, dataclasses.asdict(report)))
        if result.status == "failed":
            pytest.fail(f"{result.title}\n{result.message}", pytrace=False)
        if result.status == "refused":
            pytest.skip(f"refused: {result.message}")
        if result.status == "not promised":
            pytest.xfail(f"not promised: {result.message}")

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.parent.name}: {self.name}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the table of each strategy."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, made in report.user_properties if getattr(report, "when", None) == "call" else ():
                if key == _PROPERTY:
                    found.setdefault((made["strategy"], made["world_size"], made["tolerance"]), []).extend(
                        made["results"]
                    )
    if not found:
        return
    from .testing.conformance import ORDER, CheckResult, ConformanceReport

    for (strategy, world_size, tolerance), results in found.items():
        results.sort(key=lambda result: ORDER.index(result["name"]))
        terminalreporter.section("flextrain")
        report = ConformanceReport(strategy, world_size, tolerance, [CheckResult(**each) for each in results])
        terminalreporter.write_line(str(report))
