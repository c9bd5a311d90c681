"""Running an example as its reader does."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 900  # on a busy machine, where every command of the demo starts Python anew

RunExample = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunExample:
    """``run_example(script, *flags, processes=1, check=True, launcher=None)`` in an empty folder.

    In new processes, which are forked with torch imported and have the variables that torchrun gives to several, and none
    of them alone; with a ``launcher`` it is that which starts them.
    """

    def run(
        script: str, *flags: str, processes: int = 1, check: bool = True, launcher: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = EXAMPLES / script
        monkeypatch.chdir(tmp_path)
        done = launched(launcher, path, flags, processes) if launcher else forked(path, flags, processes)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def launched(launcher: str, script: Path, flags: tuple[str, ...], processes: int) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*start, str(script), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def forked(script: Path, flags: tuple[str, ...] = (), processes: int = 1) -> subprocess.CompletedProcess[str]:
    """The script run in new processes that live for this call: what all of them wrote, and the worst exit status."""
    with WorkerGroup(processes, TIMEOUT_S) as group:
        codes, out, err = zip(*group.run(run_script, script, flags, processes), strict=True)
    return subprocess.CompletedProcess([str(script), *flags], max(codes), "".join(out), "".join(err))


def run_script(script: Path, flags: tuple[str, ...], processes: int) -> tuple[int, str, str]:
    """In a worker: what the interpreter would do, with the exit status and what was written to the two streams."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))
    with contextlib.ExitStack() as stack:
        if processes == 1:
            stack.enter_context(alone())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()
