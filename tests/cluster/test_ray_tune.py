"""The page on sweeps with a real Ray Tune, whose scheduler ends trials early."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "sweeps.md"
LIMIT_S = 300

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs pip install {extra}")
        for name, extra in (("ray", "flextrain[ray] 'ray[tune]'"), ("optuna", "flextrain[tune]"))
    ),
]


def test_the_trials_of_the_page(tmp_path: Path) -> None:
    scripts = dict(re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE.read_text(), flags=re.DOTALL))
    for name in ("objective.py", "tuned.py"):
        (tmp_path / name).write_text(scripts[name])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RAY_AIR_NEW_OUTPUT": "0"}
    command = [sys.executable, "tuned.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert re.search(r"Best: \{'lr': .*\} of 4 trials, 0 errors", done.stdout), done.stdout[-3000:]
    assert "Failed after" not in done.stdout, "a trial that Tune has ended is no failure"
