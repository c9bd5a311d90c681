"""`flextrain verify`: whether strategies train a script's model as one device does."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from ..core.errors import ConfigError
from .output import console, print_json

DESCRIPTION = """\
Train a script's model on one device and under each strategy, with the same global batches, and compare losses,
gradient norms, weights and optimizer state after every step.

SCRIPT is run, with the arguments behind --, up to where it makes its FlexibleRunner; it does not train. A file that
makes none has a dict of FlexibleRunner's arguments named cfg, or a function config() that returns one. A global batch
is PROCESSES of the script's batches; what is left at the end of an epoch is left out. Accumulation, clipping, precision
and schedules are the script's own. Dropout is set to 0 and batch normalisation uses its running statistics, on both
sides; hooks, validation, checkpoints and torch.compile are left out.

A difference is allowed up to 1e-5 in float32 and a few roundings in bfloat16 and float16, relative; or up to 4 times what
one device shows when it takes the same batches in parts, which sums in another order.

Exit status: 0 all are the same, 1 one differs, 2 something could not be run."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "verify",
        help="whether strategies train a script's model as one device does",
        usage="flextrain verify SCRIPT [options] [-- SCRIPT_ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
    )
    command.add_argument("script", metavar="SCRIPT", help="a Python file, see above")
    command.add_argument(
        "--strategies",
        default="ddp,fsdp",
        help="names with commas: those of `flextrain list strategies`, or package.module:Name; default: ddp,fsdp",
    )
    command.add_argument("--processes", type=int, default=2, help="default: 2")
    command.add_argument("--steps", type=int, default=20, help="updates; default: 20")
    command.add_argument("--device", default="cpu", help="cpu, or a kind of accelerator, one per process; default: cpu")
    command.add_argument("--tolerance", type=float, help="relative difference that is allowed; default: by the dtype")
    command.add_argument("--timeout", type=float, default=600.0, help="seconds for one training; default: 600")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run, takes_script_arguments=True)


def run(arguments: argparse.Namespace) -> int:
    """Compare strategies with a single device; see `verify`."""
    from ..tools.verify import verify  # imports torch, which `flextrain list` can do without

    names = [name.strip() for name in arguments.strategies.split(",") if name.strip()]
    if not names:
        raise ConfigError("verify.strategies: is empty, give names with commas between them")
    with Console(stderr=True, markup=False, emoji=False).status("Starting processes") as status:
        report = verify(
            arguments.script,
            names,
            arguments=arguments.script_arguments,
            processes=arguments.processes,
            steps=arguments.steps,
            device=arguments.device,
            tolerance=arguments.tolerance,
            timeout_s=arguments.timeout,
            on_progress=lambda what: status.update(Text(f"Training: {what}")),
        )
    print_json(report.as_json()) if arguments.json else console().print(report)
    return report.exit_status
