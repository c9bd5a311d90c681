"""Job: what is to be started, on what, and what is to happen when it ends; the same for every cluster."""

from __future__ import annotations

import math
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from flextrain import ConfigError

if TYPE_CHECKING:
    from flextrain.script_facts import ScriptFacts

SIGNALLED = 143
"""Status of `flextrain run` after SIGTERM, whatever that of its processes is."""
STALLED = 75
"""Status of a run that stood still: starting again may help."""
WRONG = 2
"""Status of a command that was given something wrong: starting again does not help."""
PORT = 29400
_JOIN_S = 1800
"""Seconds that the machines of a job wait for each other: pods and machines come minutes apart."""
_PROBE_MARGIN_S = 300
"""Seconds that the watchdog has to end a run by itself before the cluster does."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")


@dataclass(frozen=True)
class Job:
    """A training on a cluster.

    Attributes:
        name: of the job: lower-case letters, digits and ``-``, at most 50, as names of pods allow.
        script, arguments: what is started, as in ``flextrain run SCRIPT ARGUMENTS`` or ``flextrain train CONFIG ARGUMENTS``.
        facts: what the script gives to its runner.
        nodes, processes: machines, and processes of each.
        gpus, gpu: accelerators of each machine, and their kind, such as "H100"; empty: any.
        cpus, memory: of each machine, such as 16 and "64Gi"; None: not asked for.
        image: of the container; empty: none.
        volumes: storage and where it is mounted, such as ("runs", "/runs").
        restarts: after failures.
        grace_s: seconds between the signal that ends the job and the kill.
        time_s: seconds that the job may take; None: no limit.

    Raises:
        ConfigError: the parts do not fit together; the message names the option of `flextrain launch`.
        StrategyError: the strategy cannot run on so many processes.
    """

    name: str
    script: str
    arguments: Sequence[str]
    facts: ScriptFacts
    nodes: int = 1
    processes: int = 1
    gpus: int = 0
    gpu: str = ""
    cpus: int | None = None
    memory: str | None = None
    image: str = ""
    volumes: Sequence[tuple[str, str]] = ()
    restarts: int = 3
    grace_s: int = 300
    time_s: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f'launch.name: "{self.name}" is not allowed, give at most 50 lower-case letters, digits and -, a letter first'
            )
        least: Sequence[tuple[str, int | None, int]] = (
            ("nodes", self.nodes, 1),
            ("processes", self.processes, 1),
            ("max_restarts", self.restarts, 0),
            ("grace", self.grace_s, 10),
            ("cpus", self.cpus, 1),
        )
        for name, value, low in least:
            if value is not None and value < low:
                raise ConfigError(f"launch.{name}: {value} is not allowed, give {low} or more")
        if self.gpus and self.processes > self.gpus:
            raise ConfigError(
                f"launch.processes: {self.processes} share {self.gpus} GPUs, give one for each, or --gpus 0"
            )
        if self.facts.device not in ("", "cuda" if self.gpus else "cpu"):
            raise ConfigError(
                f"launch.gpus: {self.gpus} do not fit the strategy of {self.script}, which has device={self.facts.device}"
            )
        paths = [path for _, path in self.volumes]
        for path in paths:
            if paths.count(path) > 1:
                raise ConfigError(f"launch.volume: {path} is given {paths.count(path)} times, give another path")
        self.facts.check_processes(self.nodes * self.processes)
        if self.restarts and not self.facts.resumes:
            raise ConfigError(
                f"launch.max_restarts: {self.script} has resume=False, so that a restart would begin anew; give resume=True in it, "
                "or --max-restarts 0"
            )
        if self.facts.preemption_status == 0:
            raise ConfigError(
                f"launch: {self.script} has env_cfg.preemption.status=0, with which a job that was taken away seems to be complete; "
                "give 143"
            )

    def check_storage(self) -> None:
        """Check that checkpoints outlive the machines.

        Raises:
            ConfigError: their folder is in none of the volumes.
        """
        folder = PurePosixPath(posixpath.normpath(self.facts.checkpoint_dir))
        if "://" in self.facts.checkpoint_dir or any(folder.is_relative_to(path) for _, path in self.volumes):
            return
        where = ", ".join(path for _, path in self.volumes) or "none"
        raise ConfigError(
            f'launch.volume: checkpoints go to "{folder}", which is in no volume ({where}) and would go with the machine; give '
            "--volume NAME:PATH and a work_dir below PATH"
        )

    @property
    def shutdown_s(self) -> int:
        """Seconds that the processes have for a last save; the rest is for what ends them."""
        return max(self.grace_s - 30, self.grace_s // 2)

    @property
    def probe_minutes(self) -> int:
        """Minutes without progress after which a probe fails: when the watchdog should have ended the run already."""
        return math.ceil(((self.facts.stall_s or 1800) + _PROBE_MARGIN_S) / 60)

    @property
    def ends_for_good(self) -> list[int]:
        """The status after a signal, if it may also mean that the run has ended as it wished; else empty."""
        ended = None if self.facts.max_time in (None, "slurm") else self.facts.preemption_status
        return [] if ended is None else [ended]

    @property
    def goes_on(self) -> list[int]:
        """Statuses after which another start goes on without anything having failed: a signal came, and the run has saved."""
        status = self.facts.preemption_status
        return [] if status is None else sorted({SIGNALLED, status} - {*self.ends_for_good})

    def command(self, *, endpoint: str, is_first: str, job_id: str, alive_file: str = "", python: str = "") -> str:
        """The command of each machine, for a shell.

        Args:
            endpoint: name or address of the first machine, for a shell.
            is_first: 1 on the first machine and 0 elsewhere, for a shell. The machines may come before their names are known, so
                they cannot find it out themselves.
            job_id: a name that no other start of the job has, for a shell.
            alive_file: a file for probes.
            python: instead of the program flextrain: this Python, for a shell.
        """
        program = f"{python} -m flextrain run" if python else "flextrain run"
        words = [f"{program} --nnodes={self.nodes} --nproc-per-node={self.processes}"]
        words[0] += f" --max-restarts={self.restarts} --shutdown-timeout={self.shutdown_s}"
        if alive_file:
            words.append(f"--alive-file={alive_file}")
        if self.nodes == 1:
            words.append("--standalone")
        else:
            words.append(f"--rdzv-backend=c10d --rdzv-endpoint={endpoint}:{PORT} --rdzv-id={job_id}")
            words.append(f"--rdzv-conf=is_host={is_first},join_timeout={_JOIN_S},read_timeout={_JOIN_S}")
        start = ["--module", "flextrain", "train"] if self.facts.is_config else []
        words.append(shlex.join([*start, self.script, *self.arguments]))
        return " \\\n  ".join(words)
