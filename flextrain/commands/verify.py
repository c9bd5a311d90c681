"""`flextrain verify`: check that strategies train a script's model as one device does."""

from __future__ import annotations

import argparse
from typing import Any

from ..core.base.errors import ConfigError
from .output import FoldedHelp, console, print_json

DESCRIPTION = """\
Train a script's model on one device and under each strategy, with the same global batches, and compare losses,
gradient norms, weights and optimizer state after every step.

SCRIPT runs, with the arguments after --, up to the construction of its FlexibleRunner; it does not train. Instead of
making a runner, a file may define a dict named cfg with FlexibleRunner's arguments, or a function config() that returns
one. A global batch consists of PROCESSES of the script's batches; incomplete global batches at the end of an epoch are
left out. Accumulation, clipping, precision and schedules are those of the script, and so are the options of its strategy
that another one has too; those that it has not are listed. In all trainings, dropout is set to 0,
batch normalisation uses its running statistics, a loss scale that changes is fixed at 256, and hooks, metrics,
checkpoints and torch.compile are left out. If the script validates, what the model predicts for a batch of that data is
compared too, after the first step and the last.

With --simulate 16, one process computes what 16 processes would, rank after rank, each with random numbers of its own:
the same numbers that gloo computes, added in the order of the ranks. Modules that the script imports, and their
variables, are then shared by all ranks. DeepSpeed cannot be simulated.

With --types, nothing is trained: one update is followed at the real number of processes, say 4096, without running it on
them. For every tensor it is found along which axes of the mesh processes have the same, data of their own, parts, or
terms of a sum; a missing or doubled reduction is named with module and line. It does not compare numbers; what it
cannot see is listed. Give a small model of the real structure: sizes of layers do not matter, but that axes divide them.

The allowed relative difference is 1e-5 in float32, and a few roundings in bfloat16 and float16. It is larger where one
device with the same batches in parts, or in float64, differs too: up to 10 times that difference. A strategy's class may
declare a larger tolerance, or that it does not promise the same updates, which the table then says.

Exit status: 0 all strategies agree or have not promised to, 1 one differs, 2 one could not run; with --types 1 if one has a fault."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "verify",
        help="check that strategies train a script's model as one device does",
        usage="flextrain verify SCRIPT [options] [-- SCRIPT_ARGUMENT ...]",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument(
        "script", metavar="SCRIPT", help="a Python file, or a configuration as for `flextrain train`, see above"
    )
    command.add_argument(
        "--strategies",
        default="ddp,fsdp",
        help="names with commas: those of `flextrain list strategies`, or package.module:Name; default: ddp,fsdp",
    )
    command.add_argument("--processes", type=int, metavar="N", help="number of processes; default: 2")
    command.add_argument(
        "--simulate",
        type=int,
        metavar="RANKS",
        help="instead of processes: threads of one process that take turns, many more than the machine has room for; on "
        "the CPU",
    )
    command.add_argument(
        "--types",
        action="store_true",
        help="follow what is the same, own or a part along each axis, at any number of processes; nothing is trained",
    )
    command.add_argument("--steps", type=int, metavar="N", help="number of updates; default: 20")
    command.add_argument(
        "--device", metavar="DEVICE", help="cpu, or a type of accelerator, with one device per process; default: cpu"
    )
    command.add_argument("--tolerance", type=float, help="allowed relative difference; default: depends on the dtype")
    command.add_argument(
        "--timeout", type=float, default=600.0, help="largest number of seconds for one training; default: 600"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run, takes_script_arguments=True)


def run(arguments: argparse.Namespace) -> int:
    """Compare strategies with a single device; see `verify`."""
    from rich.console import Console
    from rich.text import Text

    from ..strategy_options import names_in  # imports torch, which other commands do not need
    from ..verify.verify import verify

    names = names_in(arguments.strategies, "verify.strategies")
    ranks = arguments.simulate
    if ranks is not None and arguments.processes is not None:
        raise ConfigError(
            f"verify.processes: {arguments.processes} was given with --simulate {ranks}, give one of them"
        )
    if arguments.types:
        for key, value in _of_trainings(arguments).items():
            if value is not None:
                raise ConfigError(
                    f"verify.{key}: {value} has no effect with --types, which trains nothing; leave it out"
                )
    with Console(stderr=True, markup=False, emoji=False).status("Starting processes") as status:
        report: Any
        if arguments.types:
            from ..verify.types import verify_types

            report = verify_types(
                arguments.script,
                names,
                arguments=arguments.script_arguments,
                processes=2 if arguments.processes is None else arguments.processes,
                timeout_s=arguments.timeout,
                on_progress=lambda what: status.update(Text(f"Following: {what}")),
            )
        else:
            report = verify(
                arguments.script,
                names,
                arguments=arguments.script_arguments,
                processes=ranks if ranks is not None else 2 if arguments.processes is None else arguments.processes,
                simulate=ranks is not None,
                steps=20 if arguments.steps is None else arguments.steps,
                device="cpu" if arguments.device is None else arguments.device,
                tolerance=arguments.tolerance,
                timeout_s=arguments.timeout,
                on_progress=lambda what: status.update(Text(f"Training: {what}")),
            )
    print_json(report.as_json()) if arguments.json else console().print(report)
    return int(report.exit_status)


def _of_trainings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that say how it is trained."""
    return {key: getattr(arguments, key) for key in ("simulate", "steps", "device", "tolerance")}
