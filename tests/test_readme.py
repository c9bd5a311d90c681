"""What the README says is so; tests/docs runs its code and follows its links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_shortest_script_trains() -> None:
    script = re.findall(r"```python title=\"script.py\"\n(.*?)```", README, flags=re.DOTALL)[0]
    assert "runner.train()" in script
    assert "[5][20/29]" in README


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(
            r"(?:^ *|`)make (?:-C \w+ )?(\w[\w-]*)", (ROOT / page).read_text(), flags=re.MULTILINE
        ):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{page}: make {target}"


def test_benchmark_table_is_the_measured_one() -> None:
    measured = (ROOT / "benchmarks" / "results" / "loop_overhead.md").read_text()
    assert measured.strip() in (ROOT / "docs" / "benchmarks.md").read_text()
