"""The options of `flextrain run`: those of torchrun that make sense here, read up to the script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.base.errors import ConfigError, suggest

DEFAULT_RESTARTS = 3

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "processes": {
        "--nproc-per-node": ("N", "processes per machine: a number, auto, gpu or cpu; default: 1"),
        "--nnodes": ("N or MIN:MAX", "machines; with a range, machines may leave and join; default: 1"),
        "--max-restarts": (
            "N",
            f"restarts after failures, as torchrun counts them, see above; default: {DEFAULT_RESTARTS}",
        ),
        "--work-dir": ("DIR", "folder of events.jsonl, if it shall not be the runner's work_dir"),
        "--alive-file": ("PATH", "a file of this machine for probes, touched unless its training stands still"),
    },
    "how machines find each other": {
        "--rdzv-endpoint": ("HOST:PORT", "the same on all machines: one that stays, with a free port"),
        "--rdzv-id": ("NAME", "a name that only this job has, such as $SLURM_JOB_ID"),
        "--rdzv-backend": ("NAME", "c10d, static or etcd-v2; default: c10d for a range or an endpoint, else static"),
        "--rdzv-conf": ("K=V,...", "settings of the back end, such as join_timeout=600,last_call_timeout=5"),
        "--standalone": ("", "one machine, on a free port; what is done for one machine anyway"),
        "--node-rank": ("N", "number of this machine, with static"),
        "--master-addr": ("HOST", "the first machine, with static"),
        "--master-port": ("PORT", "a free port of it, with static"),
        "--local-addr": ("HOST", "address of this machine for the others"),
    },
    "what is started": {
        "--module": ("", "SCRIPT is the name of a module, as for python -m"),
        "--no-python": ("", "SCRIPT is a program, not a Python file"),
        "--run-path": ("", "run SCRIPT by runpy in processes that are forked or spawned"),
        "--role": ("NAME", "name of the processes in torch's logs"),
        "--virtual-local-rank": ("", "every process sees its own device only, as number 0"),
        "--numa-binding": ("HOW", "bind processes to the CPUs near their GPU: node, socket, exclusive, core-complex"),
    },
    "output": {
        "--log-dir": ("DIR", "folder for redirected output"),
        "--redirects": ("STD", "write output to files: 0 none, 1 stdout, 2 stderr, 3 both; or 0:3,1:1 by local rank"),
        "--tee": ("STD", "the same, and to the console too"),
        "--log-line-prefix-template": ("TEXT", "before lines of --tee, with ${rank}, ${local_rank}, ${role_name}"),
        "--local-ranks-filter": ("N,...", "local ranks whose output the console shows"),
        "--duplicate-stdout-filters": ("TEXT,...", "lines with one of these go to a file of their own"),
        "--duplicate-stderr-filters": ("TEXT,...", "the same for stderr"),
        "--event-log-handler": ("NAME", "torch's handler of its own events"),
        "--logs-specs": ("NAME", "an entry point of torchrun.logs_specs"),
    },
    "ending": {
        "--monitor-interval": ("SECONDS", "time between two looks at the processes; default: 0.1"),
        "--signals-to-handle": (
            "NAME,...",
            "signals that end the job after a save; default: TERM, INT, HUP, QUIT, USR1",
        ),
        "--shutdown-timeout": (
            "SECONDS",
            "time for a last save after such a signal, and for the others to leave after a failure; default: 30",
        ),
    },
}
"""Metavar, empty for a switch, and help of each option, by heading."""

OWN = ("--work-dir", "--alive-file")
"""Options that torchrun has not."""
OPTIONS = {name: metavar for group in GROUPS.values() for name, (metavar, _) in group.items()}
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_REFUSED = {
    "--start-method": "it is for functions, and processes are started as programs",
    "--print-completion": "torchrun prints completions of its own options only",
}
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass
class Options:
    """The command line, split.

    Attributes:
        given: values by option; empty for a switch.
        script: the script, module or program.
        arguments: what follows it.
    """

    given: dict[str, str] = field(default_factory=dict)
    script: str = ""
    arguments: list[str] = field(default_factory=list)

    @property
    def work_dir(self) -> str:
        """The folder of events.jsonl; empty: the runner's."""
        return self.given.get("--work-dir", "")

    @property
    def alive_file(self) -> Path | None:
        """The file for probes; None: none was asked for."""
        given = self.given.get("--alive-file")
        return None if given is None else Path(given)

    @property
    def is_elastic(self) -> bool:
        """Whether the job runs on several machines."""
        return self.given.get("--nnodes", os.environ.get("PET_NNODES", "1")) not in ("1", "1:1")

    def says(self, name: str) -> bool:
        """Whether an option is given, here or by the variable that torchrun reads."""
        return name in self.given or f"PET_{name[2:].replace('-', '_').upper()}" in os.environ

    def for_torchrun(self) -> list[str]:
        """The arguments that torchrun's own parser gets."""
        given = {name: value for name, value in self.given.items() if name not in OWN}
        if not any(self.says(name) for name in ("--rdzv-backend", "--standalone", "--master-addr", "--node-rank")):
            if "--rdzv-endpoint" in given:
                given["--rdzv-backend"] = "c10d"
            elif not self.is_elastic and not any(self.says(name) for name in ("--rdzv-endpoint", "--master-port")):
                given["--standalone"] = ""  # older versions of torch would take port 29500, also for a second job
        if "PET_MAX_RESTARTS" not in os.environ:
            given.setdefault("--max-restarts", str(DEFAULT_RESTARTS))
        return [
            *(f"{name}={value}" if OPTIONS[name] else name for name, value in given.items()),
            self.script,
            *self.arguments,
        ]


def read_options(argv: Sequence[str]) -> Options:
    """Split a command line at the script.

    Raises:
        ConfigError: an unknown option, one without its value or with one too many, or no script.
    """
    found, rest = Options(), list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, equals, value = rest.pop(0).partition("=")
        name = _SHORT.get(word, "--" + word[2:].replace("_", "-") if word.startswith("--") else word)
        if name in ("-h", "--help"):
            raise ConfigError("run: --help stands alone, flextrain run --help")
        if name in _REFUSED:
            raise ConfigError(f"run: {word} has no meaning here, {_REFUSED[name]}")
        if name not in OPTIONS:
            near = suggest(name, [each for each in OPTIONS if each.startswith(name)] or OPTIONS)
            raise ConfigError(f'run: "{word}" is not an option{near}; `flextrain run --help` names all')
        if not OPTIONS[name]:
            if equals:
                raise ConfigError(f"run: {word} takes no value, {value!r} was given")
        elif not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"run: {word} needs a value, {OPTIONS[name]}")
            value = rest.pop(0)
        found.given[name] = value
    if rest and rest[0] == "--":
        rest.pop(0)
    if not rest:
        raise ConfigError("run: no script was given; flextrain run [options] SCRIPT [arguments of the script]")
    found.script, found.arguments = rest[0], rest[1:]
    _check(found)
    return found


def misplaced(options: Options) -> str:
    """A line if the number of processes or machines stands behind the script, which then gets it; else empty."""
    for word in options.arguments:
        if (name := word.partition("=")[0].replace("_", "-")) in ("--nproc-per-node", "--nnodes"):
            return f"flextrain run: {name} comes after {options.script}, so it is an argument of the script; give it before"
    return ""


def _check(options: Options) -> None:
    for name, low in (("--max-restarts", 0), ("--shutdown-timeout", 0)):
        value = options.given.get(name)
        if value is not None and not (value.isdigit() and int(value) >= low):
            raise ConfigError(f'run: {name} "{value}" is not allowed, give a whole number from {low} on')
    processes = options.given.get("--nproc-per-node", "1")
    if processes.lstrip("-").isdigit() and int(processes) < 1:
        raise ConfigError(f'run: --nproc-per-node "{processes}" is not allowed, give 1 or more')
    if options.alive_file is not None and not options.alive_file.parent.is_dir():
        raise ConfigError(f"run: --alive-file {options.alive_file} has no folder, give one that exists")
    machines = options.given.get("--nnodes", "1").split(":")
    if len(machines) > 2 or not all(number.isdigit() for number in machines):
        raise ConfigError(f'run: --nnodes "{options.given["--nnodes"]}" is not allowed, give a number or MIN:MAX')
    if int(machines[0]) < 1 or int(machines[-1]) < int(machines[0]):
        raise ConfigError(f'run: --nnodes "{options.given["--nnodes"]}" is not allowed, 1 <= MIN <= MAX')
    if int(machines[-1]) > 1 and not any(
        options.says(name) for name in ("--rdzv-endpoint", "--master-addr", "--node-rank")
    ):
        raise ConfigError(
            f"run: --nnodes {options.given['--nnodes']} needs --rdzv-endpoint HOST:PORT, the same on all machines"
        )
    if not {"--module", "--no-python"} & options.given.keys() and not os.path.isfile(options.script):  # noqa: PTH113
        raise ConfigError(f"run: {options.script} is not a file")
