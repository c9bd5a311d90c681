"""What the README says is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .examples.conftest import forked

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.processes
def test_shortest_script_runs(tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    assert "runner.train()" in script
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Epoch(train) [5][20/29]" in done.stdout
    assert (tmp_path / "work_dirs" / "epoch_5").is_dir()


@pytest.mark.processes
def test_the_loops_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "loops.md").read_text()
    (tmp_path / "script.py").write_text("".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    done = forked(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert "Epoch(val) [5]" in done.stdout
    assert 0 <= float(done.stdout.splitlines()[-1].removeprefix("error ")) < 0.5


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"^    make (\w+)", (ROOT / page).read_text(), flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{page}: make {target}"


def test_benchmark_table_is_the_measured_one() -> None:
    measured = (ROOT / "benchmarks" / "results" / "loop_overhead.md").read_text()
    assert measured.strip() in README
