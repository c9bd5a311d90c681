"""The converted script for Horovod, as its users start it: under mpirun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_style.py"
LIMIT_S = 300

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="needs mpirun (apt-get install openmpi-bin)"),
]


def figures(folder: Path, *start: str, batch_size: int) -> list[str]:
    """The losses, norms and accuracies that the script logs."""
    folder.mkdir()
    flags = ["--epochs", "2", "--batch-size", str(batch_size)]
    done = subprocess.run(
        [*start, sys.executable, str(EXAMPLE), *flags],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"(?:loss|grad_norm|accuracy|norm is):? (\d+\.\d+)", done.stdout)


def test_two_processes_of_mpirun_train_as_one(tmp_path: Path) -> None:
    alone = figures(tmp_path / "one", batch_size=64)
    mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    together = figures(tmp_path / "two", *mpirun, batch_size=32)
    assert len(alone) == 13, "four lines with a loss and a norm, two of the hook, two validations and the best"
    assert [float(value) for value in together] == pytest.approx([float(value) for value in alone], rel=1e-3)
