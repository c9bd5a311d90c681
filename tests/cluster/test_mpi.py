"""mpirun and mpiexec on one machine and on two: they train as torchrun does, and nobody gives MASTER_ADDR."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import JOB, Losses, first, losses_in
from .machines import Machines
from .slurm_service import Slurm

OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
HYDRA = ("mpiexec.hydra",)


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} (apt-get install openmpi-bin mpich)")


def across(nodes: Machines, program: str) -> list[str]:
    """The command that starts two processes on two machines, without ssh."""
    if program == OPEN_MPI[0]:
        return [
            *OPEN_MPI, "--host", "node1:1,node2:1", "--mca", "plm_rsh_agent", str(nodes.agent),
            "--mca", "oob_tcp_if_include", "eth0", "-n", "2",
        ]  # fmt: skip
    return [
        *HYDRA,
        "-launcher",
        "ssh",
        "-launcher-exec",
        str(nodes.agent),
        "-hosts",
        "node1,node2",
        "-ppn",
        "1",
        "-n",
        "2",
    ]


@pytest.mark.parametrize("program", [OPEN_MPI, HYDRA], ids=["open_mpi", "mpich"])
def test_on_one_machine(
    nodes: Machines, reference: Callable[[str], Losses], tmp_path: Path, program: tuple[str, ...]
) -> None:
    need(program[0])
    output = nodes.run(1, *program, "-n", 2, sys.executable, JOB, "--work-dir", tmp_path)
    assert "rank 0 of 2: done at 8" in output
    assert losses_in(tmp_path) == first(reference("ddp"), 8)


@pytest.mark.parametrize("debian", [False, True], ids=["", "own_name_is_loopback"])
@pytest.mark.parametrize("program", [OPEN_MPI[0], HYDRA[0]], ids=["open_mpi", "mpich"])
def test_on_two_machines(
    nodes: Machines, reference: Callable[[str], Losses], tmp_path: Path, program: str, debian: bool
) -> None:
    """Also where the first machine's own name stands for 127.0.1.1, which gloo would give to the second."""
    need(program)
    output = nodes.run(1, *across(nodes, program), sys.executable, JOB, "--work-dir", tmp_path, debian=debian)
    assert "rank 0 of 2: done at 8" in output
    assert ("GLOO_SOCKET_IFNAME is set to eth0" in output) is debian
    assert losses_in(tmp_path) == first(reference("ddp"), 8)


@pytest.mark.parametrize("program", [OPEN_MPI[:2], HYDRA], ids=["open_mpi", "mpich"])
def test_inside_a_slurm_job(slurm: Slurm, tmp_path: Path, program: tuple[str, ...]) -> None:
    """The launcher starts a process of its own per machine with srun, whose variables its ranks have too."""
    need(program[0])
    script = tmp_path / "mpi.sh"
    script.write_text(
        f"#!/bin/sh\n{' '.join(program)} -n 4 {sys.executable} {JOB} --work-dir {tmp_path} --launch-only\n"
    )
    log = tmp_path / "batch.log"
    slurm.finish(script, "--nodes=2", "--ntasks-per-node=2", f"--output={log}")
    found = re.findall(r"^rank (\d) of (\d), local (\d), (\S+), (.*)$", log.read_text(), re.MULTILINE)
    assert sorted(ranks for *ranks, _, _ in found) == [[str(rank), "4", str(rank % 2)] for rank in range(4)], (
        log.read_text()
    )
    [(address, job)] = {(address, job) for *_, address, job in found}
    assert re.fullmatch(rf"tcp://({slurm.machines.address(1)}|node1):\d+", address)
    assert re.match("Open MPI job .|MPICH job .", job)


def test_two_jobs_on_one_machine_at_once(nodes: Machines, reference: Callable[[str], Losses], tmp_path: Path) -> None:
    need(HYDRA[0])
    jobs = [
        nodes.start(
            1, *HYDRA, "-n", 2, sys.executable, JOB, "--work-dir", tmp_path / name, log=tmp_path / f"{name}.log"
        )
        for name in ("a", "b")
    ]
    assert [job.wait() for job in jobs] == [0, 0], (tmp_path / "a.log").read_text() + (tmp_path / "b.log").read_text()
    for name in ("a", "b"):
        assert losses_in(tmp_path / name) == first(reference("ddp"), 8)
