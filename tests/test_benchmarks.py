"""The benchmark of the loop runs, and what it counts (rather than times) is as promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "loop_overhead.py"


@pytest.mark.slow
def test_loop_overhead(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--rounds", "1", "--iterations", "50", "--skip-imports", "--only", "flextrain", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_hand, flextrain = json.loads((tmp_path / "loop_overhead.json").read_text())["loops"]
    assert by_hand["reads_per_iteration"] == 0
    # One read per log line, and a log line every ten iterations.
    assert 0.05 < flextrain["reads_per_iteration"] <= 0.1
    assert "| flextrain |" in (tmp_path / "loop_overhead.md").read_text()
    assert (tmp_path / "loop_overhead.png").stat().st_size > 0
