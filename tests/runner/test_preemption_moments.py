"""SIGTERM at random moments, from the beginning of FlexibleRunner to the end: all processes leave with 143, saved."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flextrain.core.base.events import read_events
from flextrain.core.checkpoint import is_checkpoint

JOB = f"{__package__}.preempted_job"
ENDS = (
    "training was complete",
    "resume=True continues from iter_60",  # the last one, which was saved before the signal came
    "no checkpoint was saved yet",
    "there is nothing to save",
    "before all processes had come",
)


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        "DDPStrategy:28",
        "FSDPStrategy:6",
        pytest.param("DeepSpeedStrategy:6", marks=pytest.mark.deepspeed),
    ],
)
def test_all_processes_leave_at_any_moment(tmp_path: Path, plan: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", JOB, str(tmp_path), "0", plan],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trials = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    seconds = sorted(trial["seconds"] for trial in trials)
    print(f"{plan}: seconds from the signal until all have gone: {seconds}")
    assert len(trials) == int(plan.partition(":")[2])
    for trial in trials:
        folder = Path(trial["folder"])
        assert trial["status"] == [143, 143], (
            trial,
            *((folder / f"out.{rank}").read_text()[-2000:] for rank in range(2)),
        )
        assert not any("Traceback" in (folder / f"out.{rank}").read_text() for rank in range(2)), trial
        said = " ".join(trial["said"])
        if saved := re.search(r"saved as (iter_(\d+))", said):
            assert is_checkpoint(folder / saved[1]), trial
            (event,) = (event for event in read_events(folder) if event["event"] == "preempted")
            assert event["iter"] == int(saved[2]), trial
        else:
            assert any(end in said for end in ENDS), trial
    assert any("saved as" in " ".join(trial["said"]) for trial in trials)
