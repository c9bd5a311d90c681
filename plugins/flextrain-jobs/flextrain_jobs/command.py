"""`flextrain launch SCRIPT --on WHERE`: the job file that starts a training on a cluster."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flextrain import ConfigError
from flextrain.commands.output import FoldedHelp, console

from .job import Job
from .kubernetes import job_set, train_job
from .ray_driver import program
from .skypilot import task
from .slurm import batch_script

DESCRIPTION = """\
Write the job file that trains SCRIPT on a cluster: a Python file, or a configuration as for `flextrain train`. Nothing is handed in.

SCRIPT runs, with the arguments after --, up to the construction of its FlexibleRunner, and its arguments are checked: whether its
strategy can run on so many processes, checkpoints go to storage that stays, and a restart goes on (resume=True). Its preemption
and its watchdog say what the file does with exit statuses, how long it waits for a last save, and when a probe fails.

Exit status: 0, or 2 if something does not fit."""


def _yaml(*documents: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Several lines as a block, and nothing by reference."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True))


_FORMS: dict[str, tuple[Callable[[Job], str], str, str]] = {
    "kubeflow": (lambda job: _yaml(*train_job(job)), ".yaml", "kubectl apply -f {}"),
    "jobset": (lambda job: _yaml(*job_set(job)), ".yaml", "kubectl apply -f {}"),
    "skypilot": (lambda job: _yaml(task(job)), ".yaml", "sky jobs launch {}"),
    "slurm": (batch_script, ".sbatch", "sbatch {}"),
    "ray": (program, "_ray.py", "ray job submit --working-dir . -- python {}"),
}
"""What makes the text, the ending of the file, and the command that hands it in."""
_IGNORED = {
    "kubeflow": ("gpu",),
    "jobset": ("gpu",),
    "skypilot": ("time_s",),
    "slurm": ("image", "volumes"),
    "ray": ("image", "volumes", "memory", "time_s", "grace_s"),
}
"""Parts of a job that a form cannot say."""
_OPTIONS = {"gpu": "a kind of --gpus", "volumes": "--volume", "time_s": "--time", "grace_s": "--grace"}
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "launch",
        help="write the job file that trains a script on a cluster",
        usage="flextrain launch SCRIPT --on WHERE [options] [-- SCRIPT_ARGUMENT ...]",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("script", metavar="SCRIPT", help="a path that holds on the cluster too")
    command.add_argument(
        "--on", required=True, choices=_FORMS, help="Kubeflow Trainer, Kubernetes' JobSet, SkyPilot, Slurm or Ray"
    )
    command.add_argument(
        "--write", nargs="?", const="", metavar="FILE", help="write FILE, or NAME and its ending; default: print it"
    )
    command.add_argument("--name", metavar="NAME", help="of the job; default: that of SCRIPT")
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="machines; default: 1")
    command.add_argument(
        "--gpus", default="0", metavar="[KIND:]N", help="accelerators of a machine, such as 8 or H100:8; default: 0"
    )
    command.add_argument("--processes", type=int, metavar="N", help="of a machine; default: one for each GPU, or 1")
    command.add_argument("--cpus", type=int, metavar="N", help="cores of a machine")
    command.add_argument("--memory", metavar="SIZE", help="of a machine, in GiB, such as 64Gi")
    command.add_argument("--image", metavar="IMAGE", help="of the containers; it has the script and flextrain")
    command.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="NAME:PATH",
        help="storage that all machines see: a claim of Kubernetes, or a bucket such as s3://runs, and where it is mounted",
    )
    command.add_argument("--time", metavar="TIME", help="that the job may take, such as 90m, 24h or 3d")
    command.add_argument("--max-restarts", type=int, default=3, metavar="N", help="restarts after failures; default: 3")
    command.add_argument("--grace", type=int, metavar="S", help="seconds between a signal and the kill; default: 300")
    command.set_defaults(run=run, takes_script_arguments=True)


def run(arguments: argparse.Namespace) -> int:
    """Write or print the file."""
    job = _job(arguments)
    form, ending, hand_in = _FORMS[arguments.on]
    text = form(job)
    if arguments.write is None:
        sys.stdout.write(text)
        return 0
    path = Path(arguments.write or f"{job.name}{ending}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"launch.write: {path} exists and nothing is overwritten, give another name") from None
    except OSError as error:
        raise ConfigError(f"launch.write: {path} cannot be written, {error.strerror}") from None
    console().print(f"{path}; next: {hand_in.format(shlex.quote(str(path)))}", soft_wrap=True)
    return 0


def _job(arguments: argparse.Namespace) -> Job:
    kind, gpus = _gpus(arguments.gpus)
    stem = re.sub(r"[^a-z0-9]+", "-", Path(arguments.script).stem.lower()).strip("-")
    given = {
        "gpu": kind,
        "image": arguments.image or "",
        "volumes": [_volume(text) for text in arguments.volume],
        "memory": _memory(arguments.memory),
        "time_s": _seconds(arguments.time),
        "grace_s": arguments.grace,
    }
    for part in _IGNORED[arguments.on]:
        if given[part] not in (None, "", []):
            option = _OPTIONS.get(part, f"--{part}")
            raise ConfigError(f"launch.on: {arguments.on} has no use for {option}, leave it out")
    if arguments.on in ("kubeflow", "jobset") and not arguments.image:
        raise ConfigError(f"launch.image: is missing, {arguments.on} starts containers")
    if arguments.on == "skypilot" and gpus and not kind:
        raise ConfigError(f'launch.gpus: "{arguments.gpus}" is not allowed, skypilot needs a kind too, such as H100:8')
    from flextrain.script_facts import script_facts  # imports torch, which a list of commands does not need

    with contextlib.redirect_stdout(sys.stderr):  # standard output is the file's
        facts = script_facts(arguments.script, arguments.script_arguments)
    job = Job(
        arguments.name or stem,
        arguments.script,
        arguments.script_arguments,
        facts,
        nodes=arguments.nodes,
        processes=arguments.processes if arguments.processes is not None else gpus or 1,
        gpus=gpus,
        cpus=arguments.cpus,
        restarts=arguments.max_restarts,
        **{part: value for part, value in given.items() if value is not None},
    )
    if arguments.on in ("kubeflow", "jobset", "skypilot"):
        job.check_storage()
    return job


def _gpus(text: str) -> tuple[str, int]:
    kind, _, number = text.rpartition(":")
    if not number.isdecimal() or (":" in text and not re.fullmatch(r"[A-Za-z][-.\w]*", kind)):
        raise ConfigError(f'launch.gpus: "{text}" is not allowed, give a number, or KIND:N such as H100:8')
    return kind, int(number)


def _volume(text: str) -> tuple[str, str]:
    name, _, path = text.rpartition(":")
    if not name or not path.startswith("/") or path.startswith("//"):
        raise ConfigError(f'launch.volume: "{text}" is not allowed, give NAME:/PATH')
    return name, path


def _memory(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[1-9]\d*Gi?", text):
        raise ConfigError(f'launch.memory: "{text}" is not allowed, give whole GiB, such as 64Gi')
    return None if text is None else f"{text.rstrip('Gi')}Gi"


def _seconds(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)([smhd]?)", text)
    if found is None:
        raise ConfigError(
            f'launch.time: "{text}" is not allowed, give seconds, or a number with m, h or d, such as 24h'
        )
    return int(found[1]) * _UNITS[found[2]]
