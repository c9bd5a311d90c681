"""srun over two machines: it trains as torchrun on one does, and steps of one job do not disturb each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import JOB, Losses, first, losses_in
from .slurm_service import Slurm

SRUN = ("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--exact")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_over_two_machines(slurm: Slurm, reference: Callable[[str], Losses], tmp_path: Path, strategy: str) -> None:
    output = slurm.run(*SRUN, sys.executable, JOB, "--work-dir", tmp_path, "--strategy", strategy)
    assert "rank 0 of 2: done at 8" in output
    assert "rank 1 of 2: done at 8" in output
    assert losses_in(tmp_path) == first(reference(strategy), 8)


def test_two_steps_of_one_job_at_once(slurm: Slurm, reference: Callable[[str], Losses], tmp_path: Path) -> None:
    script = tmp_path / "steps.sh"
    steps = [
        f"{' '.join(SRUN)} {sys.executable} {JOB} --work-dir {tmp_path}/{name} --step 0.2 >{tmp_path}/{name}.log 2>&1 &"
        for name in ("a", "b")
    ]
    script.write_text("\n".join(["#!/bin/sh", *steps, "wait"]))
    slurm.finish(script, "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/batch.log")
    for name in ("a", "b"):
        assert "rank 1 of 2: done at 8" in (tmp_path / f"{name}.log").read_text()
        assert losses_in(tmp_path / name) == first(reference("ddp"), 8)


def test_a_process_of_another_step_is_refused(slurm: Slurm, reference: Callable[[str], Losses], tmp_path: Path) -> None:
    """Two steps that are given one port: the second is refused, process by process, and the first trains."""
    script = tmp_path / "steps.sh"
    run = f"{' '.join(SRUN)} {sys.executable} {JOB} --step 0.3 --work-dir {tmp_path}"
    script.write_text(
        f"#!/bin/sh\nexport MASTER_PORT=29511\n{run}/a >{tmp_path}/a.log 2>&1 &\nsleep 1\n"
        f"{run}/b --timeout 20 >{tmp_path}/b.log 2>&1 &\nwait\n"
    )
    slurm.finish(script, "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/batch.log")
    taken, belongs = "another program of this machine uses the port", r"is used by (.*), this process belongs to (.*);"
    refused = (tmp_path / "a.log").read_text() + (tmp_path / "b.log").read_text()
    assert taken in refused
    found = re.search(belongs, refused)
    assert found is not None, refused[-3000:]
    assert {re.sub(r"job \d+", "job", name) for name in found.groups()} == {
        "Slurm job step 0 of 2 processes",
        "Slurm job step 1 of 2 processes",
    }
    trained = [name for name in ("a", "b") if (tmp_path / name / "losses.0.jsonl").exists()]
    assert [losses_in(tmp_path / name) for name in trained] == [first(reference("ddp"), 8)]


def test_one_that_fails_early_ends_the_others(slurm: Slurm, tmp_path: Path) -> None:
    """srun lets the others run; they would wait for the whole --timeout."""
    script = tmp_path / "one_fails.sh"
    job = f"exec {sys.executable} {JOB} --timeout 3600 --work-dir {tmp_path}/work"
    script.write_text(f"#!/bin/sh\n[ $SLURM_PROCID = 1 ] && {job} --strategy single\n{job}\n")
    script.chmod(0o755)
    output = slurm.run(*SRUN, "--kill-on-bad-exit=0", "--label", script, status=None, limit_s=100)
    own = re.search(r"^1: ended by (StrategyError: .*)$", output, re.MULTILINE)
    assert own is not None, output[-3000:]
    assert f"0: ended by LaunchError: launcher: rank 1 has ended: {own[1]}" in output


def test_tasks_in_an_order_of_the_users_own(slurm: Slurm, tmp_path: Path) -> None:
    """The list of machines that Slurm gives is sorted all the same."""
    (tmp_path / "machines").write_text("node2\nnode1\n")
    job = sys.executable, JOB, "--work-dir", tmp_path / "run", "--iters", 2
    srun = "srun", "--distribution=arbitrary", "--ntasks=2", "--label"
    output = slurm.run(*srun, *job, SLURM_HOSTFILE=str(tmp_path / "machines"))
    assert "0: rank 0 of 2: done at 2" in output
