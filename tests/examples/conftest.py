"""Running an example as its reader does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300

RunExample = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_example(tmp_path: Path) -> RunExample:
    """``run_example(script, *flags, processes=1, check=True)`` in an empty folder; with several processes by torchrun."""

    def run(
        script: str, *flags: str, processes: int = 1, check: bool = True, launcher: str = "torch.distributed.run"
    ) -> subprocess.CompletedProcess[str]:
        start = [sys.executable]
        if processes > 1:
            start += ["-m", launcher, "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run(
            [*start, str(EXAMPLES / script), *flags],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run
