"""Slurm takes a job's machines away, and starts it again: no update is lost and none is made twice."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .conftest import ITERATIONS, JOB, Losses, lines_in
from .slurm_service import Slurm

LIMIT_S = 240.0


def submit(
    slurm: Slurm, folder: Path, *options: str, strategy: str = "ddp", step_s: float = 0.25, **preemption: Any
) -> int:
    """Hand in a job of two processes on two machines that saves nothing before the end."""
    folder.mkdir()
    env_cfg = json.dumps(dict(preemption=dict(requeue=True, **preemption)))
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/sh\nexec srun --label --ntasks-per-node=1 {sys.executable} {JOB} --work-dir {folder} --strategy {strategy} "
        f"--iters {ITERATIONS} --step {step_s} --env-cfg '{env_cfg}'\n"
    )
    log = f"--output={folder}/job.log"
    return slurm.submit(script, "--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", log, *options)


def await_updates(slurm: Slurm, jobs: dict[int, Path], number: int) -> None:
    """Return when every job has made so many updates."""
    deadline = time.monotonic() + LIMIT_S
    for job, folder in jobs.items():
        while min(len(lines_in(folder, rank)) for rank in range(2)) < number:
            assert slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), log_of(folder)
            assert time.monotonic() < deadline, log_of(folder)
            time.sleep(0.1)


def await_end(slurm: Slurm, jobs: dict[int, Path]) -> None:
    deadline = time.monotonic() + LIMIT_S
    for job, folder in jobs.items():
        while (state := slurm.state(job)) != "COMPLETED":
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"), (
                f"{state}: {log_of(folder)}"
            )
            assert time.monotonic() < deadline, f"{state}: {log_of(folder)}"
            time.sleep(0.2)


def log_of(folder: Path) -> str:
    file = folder / "job.log"
    return file.read_text()[-5000:] if file.exists() else "it has not begun"


def check_nothing_was_lost(folder: Path, reference: Losses) -> None:
    """Every update was made once, in several starts, with the losses of a run that nobody disturbed."""
    for rank in range(2):
        lines = lines_in(folder, rank)
        assert [line["iter"] for line in lines] == list(range(1, ITERATIONS + 1)), log_of(folder)
        starts = sorted({line["start"] for line in lines})
        assert starts == list(range(max(2, len(starts)))), log_of(folder)
        assert [line["loss"] for line in lines] == reference[rank]


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm, reference: Callable[[str], Losses], tmp_path: Path) -> None:
    """Three strategies at once, so that the machine is under load."""
    strategies = ("ddp", "fsdp", "zero2")
    jobs = {submit(slurm, tmp_path / strategy, strategy=strategy): tmp_path / strategy for strategy in strategies}
    for job, folder in jobs.items():  # one may begin much later than another
        await_updates(slurm, {job: folder}, 5)
        slurm.run("scontrol", "requeue", job)
    await_end(slurm, jobs)
    for strategy in strategies:
        check_nothing_was_lost(tmp_path / strategy, reference(strategy))


def test_a_partition_of_higher_priority(slurm: Slurm, reference: Callable[[str], Losses], tmp_path: Path) -> None:
    jobs = {submit(slurm, tmp_path / "run"): tmp_path / "run"}
    await_updates(slurm, jobs, 5)
    slurm.run("srun", "--partition=high", "--nodes=2", "--exclusive", "true")
    await_end(slurm, jobs)
    check_nothing_was_lost(tmp_path / "run", reference("ddp"))


def test_jobs_that_ask_to_be_started_again(slurm: Slurm, reference: Callable[[str], Losses], tmp_path: Path) -> None:
    """One because of a signal to a single process, one because its limit of a minute comes near."""
    limited = submit(slurm, tmp_path / "limited", "--time=1", step_s=0.9, max_time="slurm", margin_s=30)
    signalled = submit(slurm, tmp_path / "signalled")
    await_updates(slurm, {signalled: tmp_path / "signalled"}, 5)
    line = f"{sys.executable} {JOB} --work-dir {tmp_path}/signalled "
    [process] = [pid for pid, found in slurm.machines.processes([2]).items() if found.startswith(line)]
    os.kill(process, signal.SIGUSR1)
    await_end(slurm, {signalled: tmp_path / "signalled", limited: tmp_path / "limited"})
    check_nothing_was_lost(tmp_path / "signalled", reference("ddp"))
    check_nothing_was_lost(tmp_path / "limited", reference("ddp"))
