"""A Slurm of its own on pretended machines: no munge, no database, no control groups."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .machines import Machines

START_S, STOP_S = 60.0, 30.0
PORT = 17100
CPUS = 8

CONF = """\
ClusterName=test
SlurmctldHost=node1({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# A job that was requeued waits until its credential is out of date, by default two minutes.
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Machines have as many CPUs as it says here.
SlurmdParameters=config_overrides
SlurmdTimeout=15
ReturnToService=2
KillWait=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
OverTimeLimit=0
"""
PARTITIONS = """\
PartitionName=low  Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [program for program in ("slurmctld", "slurmd", "srun") if shutil.which(program) is None]
    return f"needs {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client)" if absent else None


class Slurm:
    """slurmctld on the first machine, and slurmd on every one."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder = machines, folder
        (folder / "state").mkdir(parents=True)
        (folder / "spool").mkdir()
        nodes = [
            f"NodeName=node{n} NodeHostname=node{n} NodeAddr={machines.address(n)} Port={PORT + n} CPUs={CPUS} State=UNKNOWN\n"
            for n in machines.numbers
        ]
        conf = CONF.format(controller=machines.address(1), port=PORT, folder=folder)
        (folder / "slurm.conf").write_text(conf + "".join(nodes) + PARTITIONS)
        self.run("slurmctld", "-c")
        for number in machines.numbers:
            machines.run(number, "slurmd", "-N", f"node{number}", env=self._env())
        self._await_nodes()

    def run(self, *command: object, limit_s: float = 120.0, status: int | None = 0, **variables: str) -> str:
        """Run a client of Slurm on the first machine; return its output."""
        return self.machines.run(1, *command, limit_s=limit_s, status=status, env=self._env(**variables))

    def start(self, *command: object, log: Path, limit_s: float = 120.0, **variables: str) -> subprocess.Popen[str]:
        """Start a client of Slurm on the first machine."""
        return self.machines.start(1, *command, log=log, limit_s=limit_s, env=self._env(**variables))

    def submit(self, script: Path, *options: object) -> int:
        """Hand a batch script in; return the number of the job."""
        return int(self.run("sbatch", "--parsable", *options, script).split()[-1])

    def finish(self, script: Path, *options: object, limit_s: float = 180.0) -> None:
        """Hand a batch script in and return when it has ended; ``sbatch --wait`` looks only every ten seconds."""
        job, deadline = self.submit(script, *options), time.monotonic() + limit_s
        while self.state(job) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, f"job {job} is {self.state(job)}"
            time.sleep(0.2)

    def state(self, job: int) -> str:
        """State of a job: PENDING, RUNNING, COMPLETED, ..."""
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def end_jobs(self) -> None:
        """Cancel whatever a test has left."""
        self.run("scancel", "--user=root", status=None)

    def daemons(self) -> set[int]:
        """Process ids of slurmctld and slurmd."""
        return {int(file.read_text()) for file in self.folder.glob("*.pid")}

    def close(self) -> None:
        self.end_jobs()
        daemons = self.daemons()
        for pid in daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and daemons & self.machines.processes().keys():
            time.sleep(0.1)

    def _env(self, **variables: str) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **variables}

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + START_S
        while len(self.run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N", status=None).split()) < len(
            self.machines.numbers
        ):
            assert time.monotonic() < deadline, "\n".join(
                file.read_text()[-2000:] for file in self.folder.glob("*.log")
            )
            time.sleep(0.1)
