"""A batch script of Slurm. Source: sbatch's manual page."""

from __future__ import annotations

import shlex

from .job import STALLED, Job


def batch_script(job: Job) -> str:
    """The script that sbatch takes: one `flextrain run` on every machine."""
    minutes = None if job.time_s is None else -(-job.time_s // 60)
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpu + ':' if job.gpu else ''}{job.gpus}"] if job.gpus else []),
        *([f"--cpus-per-task={job.cpus}"] if job.cpus is not None else []),
        *([f"--mem={job.memory.removesuffix('i')}"] if job.memory is not None else []),
        *([f"--time={minutes}"] if minutes is not None else []),
        # To the processes of the step, before the end of the job's time: they save and leave.
        f"--signal=TERM@{job.grace_s}",
        "--requeue" if job.restarts else "--no-requeue",
        "--open-mode=append",
        "--output=%x.%j.log",
    ]
    head = "\n".join(f"#SBATCH {option}" for option in options)
    command = job.command(
        endpoint='"$first"',
        is_first="$((SLURM_NODEID == 0))",
        job_id='"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        python='"${PYTHON:-python}"',
    )
    # Variables of a step's tasks, such as SLURM_NODEID, are known in the task's own shell only.
    step = f"bash -c {shlex.quote(f'exec {command}')}" if job.nodes > 1 else command
    first = 'export first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n' if job.nodes > 1 else ""
    return f"#!/bin/bash\n{head}\n\n{first}srun --kill-on-bad-exit=1 {step}\nstatus=$?\n{_again(job)}exit $status\n"


def _again(job: Job) -> str:
    """Hand the job in again after statuses with which another start goes on; lost machines are Slurm's matter."""
    statuses = [STALLED, *([] if job.facts.requeues else job.goes_on)]
    if not job.restarts:
        return ""
    return (
        f"# {STALLED}: it stood still. {', '.join(map(str, statuses[1:])) or 'No other'}: a signal has ended it, saved.\n"
        f'if [[ " {" ".join(map(str, statuses))} " == *" $status "* && ${{SLURM_RESTART_COUNT:-0}} -lt {job.restarts} ]]; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\nfi\n'
    )
