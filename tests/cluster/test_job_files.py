"""The job files of examples/clusters, run as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .machines import Machines, environment
from .slurm_service import Slurm

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"
ITERS, INTERVAL = 60, 20
SHORT = ("--iters", ITERS, "--interval", INTERVAL)
LIMIT_S = 240.0
PYTHON = {"PYTHON": sys.executable}


def losses(work_dir: Path) -> dict[int, float]:
    """The losses of the log lines, by the last start that wrote them."""
    found: dict[int, float] = {}
    for path in sorted(work_dir.glob("*/vis_data/scalars.json")):
        for record in map(json.loads, path.read_text().splitlines()):
            found[record["iter"]] = record["loss"]
    return found


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two processes on one machine, under torchrun."""
    folder = tmp_path_factory.mktemp("expected")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run([*torchrun, FOLDER / "train.py", "--work-dir", folder, *SHORT])
    found = losses(folder)
    assert sorted(found) == [10, 20, 30, 40, 50, 60]
    return found


def run(command: list[object], status: int = 0, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=FOLDER,
        env=environment(**PYTHON, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout[-6000:]
    return done.stdout


def in_slurm(slurm: Slurm, name: str, folder: Path, *options: str, **variables: str) -> str:
    """Hand a job file in, wait for its end, and return its output."""
    log, chdir = f"--output={folder}/log", f"--chdir={FOLDER}"
    arguments = ("--work-dir", folder / "work", *SHORT)
    job = int(slurm.run("sbatch", "--parsable", *options, log, chdir, FOLDER / name, *arguments, **PYTHON, **variables))
    deadline = time.monotonic() + LIMIT_S
    while slurm.state(job) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        assert time.monotonic() < deadline, (folder / "log").read_text()[-6000:]
        time.sleep(0.3)
    text = (folder / "log").read_text()
    assert slurm.state(job) == "COMPLETED", text[-6000:]
    return text


def test_slurm(slurm: Slurm, tmp_path: Path, expected: dict[int, float]) -> None:
    in_slurm(slurm, "slurm.sbatch", tmp_path, "--ntasks-per-node=1")
    assert losses(tmp_path / "work") == expected


def test_slurm_hands_the_job_in_again_after_a_signal(slurm: Slurm, tmp_path: Path) -> None:
    """No update is lost, and none is made twice."""
    iters = 6000
    options = ("--parsable", "--ntasks-per-node=1", f"--output={tmp_path}/log", f"--chdir={FOLDER}")
    arguments = ("--work-dir", tmp_path / "work", "--iters", iters, "--interval", iters)
    job = int(slurm.run("sbatch", *options, FOLDER / "slurm.sbatch", *arguments, **PYTHON))
    await_in(tmp_path / "log", r"\[ *[1-9]\d\d/6000\]")
    slurm.run("scancel", "--signal=USR1", job)
    await_in(tmp_path / "log", r"\[6000/6000\]")
    assert re.search(r"Resumed from \S+: epoch \d+, iteration \d+", (tmp_path / "log").read_text())
    records = [
        record["iter"]
        for path in sorted((tmp_path / "work").glob("*/vis_data/scalars.json"))
        for record in map(json.loads, path.read_text().splitlines())
    ]
    assert records == list(range(10, iters + 1, 10))


def await_in(log: Path, pattern: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (log.exists() and re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.1)


def test_slurm_with_flextrain_run(slurm: Slurm, tmp_path: Path, expected: dict[int, float]) -> None:
    options = ("--nodes=2", "--cpus-per-task=1")
    text = in_slurm(slurm, "slurm_run.sbatch", tmp_path, *options, LEAST_NODES="2", PROCESSES="1")
    assert losses(tmp_path / "work") == expected
    assert "2 processes" in text


def launched(
    folder: Path, script: Path, *words: object, on: tuple[str, ...] = ("slurm", "--nodes=2", "--cpus=1")
) -> Path:
    """What `flextrain launch`, of the plug-in flextrain-jobs, writes for a copy of train.py."""
    plugin = FOLDER.parents[1] / "plugins" / "flextrain-jobs"
    info = folder / "flextrain_jobs-0.1.0.dist-info"  # as an installer writes it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flextrain-jobs\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[flextrain.commands]\nlaunch = flextrain_jobs.command\n")
    python = [sys.executable, "-c", "import sys; from flextrain.cli import main; sys.exit(main(sys.argv[1:]))"]
    written = folder / ("job.py" if on[0] == "ray" else "job.sbatch")
    command = ["launch", script, "--on", *on, "--write", written, "--", "--work-dir", folder / "work", *words]
    run([*python, *command], PYTHONPATH=os.pathsep.join([str(plugin), str(folder)]))
    return written


def test_slurm_by_flextrain_launch(slurm: Slurm, tmp_path: Path, expected: dict[int, float]) -> None:
    batch = launched(tmp_path, FOLDER / "train.py", *SHORT)
    text = in_slurm(slurm, str(batch), tmp_path)
    assert losses(tmp_path / "work") == expected
    assert "2 processes of 2 machines" in text


def test_flextrain_launch_hands_the_job_in_again_after_a_signal(slurm: Slurm, tmp_path: Path) -> None:
    """By the exit status alone: the script does not do it itself."""
    text = (FOLDER / "train.py").read_text()
    script, iters = tmp_path / "train.py", 6000
    script.write_text(re.sub(r"preemption = dict\(.*", "preemption = True", text))
    assert text != script.read_text()
    batch = launched(tmp_path, script, "--iters", iters, "--interval", iters)
    log = tmp_path / "log"
    job = int(slurm.run("sbatch", "--parsable", f"--output={log}", f"--chdir={tmp_path}", batch, **PYTHON))
    await_in(log, r"\[ *[1-9]\d\d/6000\]")
    slurm.run("scancel", "--signal=TERM", job)
    await_in(log, r"\[6000/6000\]")
    assert re.search(r"Resumed from \S+: epoch \d+, iteration \d+", log.read_text())
    assert "exit status 143" in log.read_text()


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi --allow-run-as-root --oversubscribe", "mpirun.mpich"])
def test_mpi(tmp_path: Path, expected: dict[int, float], mpirun: str) -> None:
    if shutil.which(mpirun.split()[0]) is None:
        pytest.skip(f"needs {mpirun.split()[0]} (apt-get install openmpi-bin mpich)")
    run([FOLDER / "mpi.sh", "--work-dir", tmp_path, *SHORT], MPIRUN=mpirun, PROCESSES="2")
    assert losses(tmp_path) == expected


def test_mpi_starts_again_after_a_failure_and_not_after_a_signal(tmp_path: Path) -> None:
    """With a stand-in for mpirun, whose statuses are what is tried."""
    notes, stand_in = tmp_path / "notes", tmp_path / "mpirun"
    for statuses, expected_status, starts in (("75 1 0", 0, 3), ("143", 143, 1), ("1 1 1 1 0", 1, 4)):
        notes.write_text("")
        stand_in.write_text(f'#!/bin/bash\nset -- {statuses}\necho >>{notes}\nn=$(wc -l <{notes})\nexit "${{!n}}"\n')
        stand_in.chmod(0o755)
        run([FOLDER / "mpi.sh"], status=expected_status, MPIRUN=str(stand_in))
        assert notes.read_text().count("\n") == starts


def test_ssh(nodes: Machines, tmp_path: Path, expected: dict[int, float]) -> None:
    """Over two pretended machines, with what mpirun's tests take for ssh."""
    variables = dict(HOSTS="node1 node2", PROCESSES="1", LEAST_NODES="2", SSH=str(nodes.agent), **PYTHON)
    nodes.run(1, FOLDER / "ssh.sh", "--work-dir", tmp_path, *SHORT, env=variables, limit_s=LIMIT_S)
    assert losses(tmp_path) == expected


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install flextrain[ray]")
def test_ray(tmp_path: Path, expected: dict[int, float]) -> None:
    arguments = ["--storage", tmp_path, "--name", "digits", "--workers", 2, *SHORT]
    output = run([sys.executable, FOLDER / "ray_train.py", *arguments], RAY_raylet_start_wait_time_s="120")
    assert losses(tmp_path / "digits") == expected
    found = re.search(rf"Finished at iteration {ITERS}, checkpoint (\S+)", output)
    assert found is not None
    assert (Path(found[1]) / "manifest.json").is_file()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install flextrain[ray]")
def test_ray_by_flextrain_launch(tmp_path: Path, expected: dict[int, float]) -> None:
    driver = launched(tmp_path, FOLDER / "train.py", *SHORT, on=("ray", "--processes=2"))
    run([sys.executable, driver], RAY_raylet_start_wait_time_s="120")
    assert losses(tmp_path / "work") == expected
