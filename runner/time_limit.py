"""The time that a run may take, and what Slurm says of its job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time

from ..core.errors import ConfigError

SLURM = "slurm"
_CLIENT_S = 20.0
_FORM = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})")


def seconds_of(text: str | float, where: str) -> float:
    """Return a duration in seconds: a number, "HH:MM:SS", or "D-HH:MM:SS" as Slurm writes it.

    Raises:
        ConfigError: another form, or no time at all.
    """
    if isinstance(text, str):
        match = _FORM.fullmatch(text)
        if match is None or int(match["minutes"]) > 59 or int(match["seconds"]) > 59:
            raise ConfigError(
                f'{where}: "{text}" is not allowed, give seconds, "HH:MM:SS", "D-HH:MM:SS", or "{SLURM}" for the end of '
                "Slurm's job"
            )
        days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        text = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < text < float("inf"):
        raise ConfigError(f"{where}: {text} is not allowed, give more than 0 seconds")
    return float(text)


def slurm_job(where: str) -> str:
    """Return the number of the Slurm job that this process belongs to.

    Raises:
        ConfigError: there is none.
    """
    if job := os.environ.get("SLURM_JOB_ID"):
        return job
    raise ConfigError(f"{where}: needs a job of Slurm, and SLURM_JOB_ID is not set; leave it out elsewhere")


def slurm_end(where: str) -> float:
    """Return the time at which Slurm ends this job, in seconds since 1970, from SLURM_JOB_END_TIME or squeue.

    Raises:
        ConfigError: there is no such job, or it has no end.
    """
    job = slurm_job(where)
    said = os.environ.get("SLURM_JOB_END_TIME", "")
    if said.isdigit():
        return float(said)
    said = _ask(where, "squeue", "--noheader", "--jobs", job, "--Format", "EndTime:40")
    try:
        return time.mktime(time.strptime(said, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        raise ConfigError(f'{where}: squeue says of job {job} that it ends at "{said}", give a duration') from None


def requeue() -> str:
    """Let Slurm start this job again; return what was done, in words, also if Slurm refuses.

    A job that Slurm is ending already, because of scancel or at its time limit, stays ended.
    """
    where = "requeue"
    try:
        job = slurm_job(where)
        state = _ask(where, "squeue", "--noheader", "--jobs", job, "--Format", "State:40")
        if state != "RUNNING":
            return f"job {job} is not requeued, Slurm is ending it already ({state or 'it is gone'})"
        _ask(where, "scontrol", "requeue", job)
    except ConfigError as error:
        return str(error)
    return f"job {job} is requeued"


def check_requeue(where: str) -> None:
    """Raise ConfigError if this process is in no job of Slurm, or cannot talk to it."""
    slurm_job(where)
    if shutil.which("scontrol") is None:
        raise ConfigError(f"{where}: needs Slurm's scontrol, which is not in PATH")


def _ask(where: str, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{where}: {command[0]} failed, {error}") from None
    if done.returncode:
        raise ConfigError(f"{where}: {command[0]} failed, {' '.join(done.stderr.split())}")
    return done.stdout.strip()
