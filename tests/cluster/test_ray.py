"""flextrain.ray on a real Ray: failures, what Ray is told, and what is left when it is over."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flextrain import FlexibleRunner
from flextrain.testing import WorkerGroup

from .ray_job import FAILS_AT, INTERVAL, MAX_ITERS, arguments

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install flextrain[ray]"),
]

JOB = Path(__file__).with_name("ray_job.py")
LIMIT_S, END_S = 400.0, 180.0


def run_on_ray(folder: Path, scenario: str) -> dict[str, Any]:
    """Run the job in a process of its own, and check that no process of it is left."""
    mark = f"FLEXTRAIN_TEST_{os.getpid()}_{folder.name}"
    done = subprocess.run(
        [sys.executable, str(JOB), str(folder), scenario],
        env={**os.environ, "FLEXTRAIN_TEST_MARK": mark},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    deadline = time.monotonic() + END_S
    while left := processes_with(mark):  # workers whose machine is gone end by themselves
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that have inherited a variable with this value."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def losses(folder: Path) -> dict[int, float]:
    """The losses of every iteration, by the last start that made it."""
    found: dict[int, float] = {}
    for path in sorted(folder.glob("*/vis_data/scalars.json")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "loss" in record and "lr" in record:
                found[record["iter"]] = record["loss"]
    return found


def undisturbed(work_dir: str) -> None:
    FlexibleRunner(**arguments({}), work_dir=work_dir).train()


def resumed(path: str, work_dir: str) -> tuple[int, int]:
    given = arguments({"strategy": dict(type="FSDPStrategy")})
    given["train_cfg"]["max_iters"] = MAX_ITERS + 5
    runner = FlexibleRunner(**given, work_dir=work_dir, resume=path)
    runner.train()
    return runner.train_loop.start_iter, runner.iter


def test_a_lost_worker(tmp_path: Path, workers2: WorkerGroup) -> None:
    """New workers go on where the last checkpoint was; Ray has metrics and checkpoint, which any script resumes."""
    result = run_on_ray(tmp_path, "failure")
    assert result["starts"] == [[0, 2], [FAILS_AT // INTERVAL * INTERVAL, 2]]
    assert result["metrics"]["iter"] == MAX_ITERS
    assert result["metrics"]["val/accuracy"] > 0.5
    assert result["metrics"]["train/loss"] > 0
    kept = {metrics["iter"]: Path(path) for path, metrics in result["kept"]}
    assert sorted(kept) == [20, 30], "CheckpointConfig(num_to_keep=2), while CheckpointHook keeps one"
    assert [path.name for path in Path(result["path"]).glob("iter_*")] == ["iter_30"]
    assert {path.name for path in kept.values()} == {path.name for path in Path(result["path"], "reported").iterdir()}

    workers2.run(undisturbed, str(tmp_path / "undisturbed"))
    assert losses(Path(result["path"])) == losses(tmp_path / "undisturbed")
    assert len(losses(tmp_path / "undisturbed")) == MAX_ITERS

    started = workers2.run(resumed, result["checkpoint"], str(tmp_path / "elsewhere"))
    assert started == [(MAX_ITERS, MAX_ITERS + 5)] * 2


def test_a_work_directory_that_is_lost_with_its_machine(tmp_path: Path, workers2: WorkerGroup) -> None:
    """The storage is no folder: Ray copies finished checkpoints to it, from which a new work directory goes on."""
    result = run_on_ray(tmp_path, "remote")
    assert result["starts"] == [[0, 2], [FAILS_AT // INTERVAL * INTERVAL, 2]]
    stored = [tmp_path / "storage" / path for path, _ in result["kept"]]
    assert [len(list(path.glob("rank-*.safetensors"))) for path in stored] == [2, 2]
    assert [path.name for path in (tmp_path / "work").glob("iter_*")] == ["iter_30"]
    assert list((tmp_path / "work" / ".reported").iterdir()) == [], "Ray has copied and deleted what was linked for it"

    workers2.run(undisturbed, str(tmp_path / "undisturbed"))
    expected = losses(tmp_path / "undisturbed")
    assert losses(tmp_path / "work") == {number: loss for number, loss in expected.items() if number > INTERVAL}
    started = workers2.run(resumed, str(tmp_path / "storage" / result["checkpoint"]), str(tmp_path / "elsewhere"))
    assert started == [(MAX_ITERS, MAX_ITERS + 5)] * 2


def test_a_machine_that_is_taken_away(tmp_path: Path) -> None:
    """A checkpoint is saved when Ray announces it, and the run goes on from there with the worker that is left."""
    ray = pytest.importorskip("ray.train")
    if not hasattr(ray, "get_preemption_info"):
        pytest.skip("this Ray announces nothing")
    result = run_on_ray(tmp_path, "machine")
    (first, size), (again, left) = result["starts"]
    assert (first, size, left) == (0, 2, 1)
    logs = "".join(path.read_text() for path in sorted(Path(result["path"]).glob("*/*.log")))
    saved = re.findall(r"Ray will take away the machines of rank \d: saving at iteration (\d+)", logs)
    assert [int(number) for number in saved] == [again]
    assert result["metrics"]["iter"] == MAX_ITERS
