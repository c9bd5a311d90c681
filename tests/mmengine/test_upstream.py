"""MMEngine's own tests with flextrain in MMEngine's place: the results are those of upstream/expected.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .page import PAGE
from .upstream import run


def test_every_test_that_does_not_pass_has_a_reason() -> None:
    for name, (outcome, reason) in run.expected().items():
        assert outcome in ("failed", "skipped"), name
        assert re.match(rf"({'|'.join(run.KINDS)}): \S", reason), f"{name}: {reason}"


def test_the_page_counts_them() -> None:
    found = {area: Counter[str]() for area in run.AREAS}
    for name, (_, reason) in run.expected().items():
        found[run.area_of(name)][reason.split(":")[0]] += 1
    section = PAGE.split("## MMEngine's own tests\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    page = {row[0]: row[1:] for row in rows if row[0] in (*run.AREAS, "all")}
    assert page.keys() == {*run.AREAS, "all"}
    for area, counts in {**found, "all": sum(found.values(), Counter())}.items():
        tests, passed, others = page[area]
        assert int(tests) - int(passed) == counts.total(), area
        assert dict(re.findall(r"(\w+): (\d+)", others)) == {kind: str(count) for kind, count in counts.items()}, area


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_results_are_the_expected_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(run.__file__)), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == run.NOT_AVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
