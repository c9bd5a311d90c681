"""`flextrain plan`: what a training on many processes would need, without them."""

from __future__ import annotations

import argparse
from typing import Any

from .output import console, print_json

DESCRIPTION = """\
Plan a script's training on many processes: memory by kind and where in the update its peak is, bytes of collectives by
axis of the mesh and by link, and floating-point operations.

SCRIPT runs, with the arguments after --, up to the construction of its FlexibleRunner, as in `flextrain verify`. Set-up
and two updates are then made under each strategy as one rank of WORLD_SIZE, on tensors without values: no accelerator is
used, and no memory for weights. The batches are the first ones of the script's data. Hooks, validation, checkpoints and
torch.compile are left out. All processes are taken to have what this one has.

Exit status: 0 all strategies are possible and fit, 1 one is refused or does not fit, 2 nothing could be planned."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "plan",
        help="tell what a training on many processes needs, without them",
        usage="flextrain plan SCRIPT --world-size N [options] [-- SCRIPT_ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
    )
    command.add_argument("script", metavar="SCRIPT", help="a Python file, see above")
    command.add_argument("--world-size", type=int, required=True, help="number of processes")
    command.add_argument("--nodes", type=int, default=1, help="number of machines; default: 1")
    command.add_argument("--device-memory", metavar="SIZE", help="memory of one device, such as 80GiB")
    command.add_argument(
        "--strategies",
        default="ddp,fsdp",
        help="names with commas, as for `flextrain verify`, such as fsdp,mesh:tp8xpp4; default: ddp,fsdp",
    )
    command.add_argument(
        "--timeout", type=float, default=600.0, help="largest number of seconds for one rank; default: 600"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run, takes_script_arguments=True)


def run(arguments: argparse.Namespace) -> int:
    """Plan strategies; see `plan`."""
    from rich.console import Console
    from rich.text import Text

    from ..tools.planning.per_strategy import plan, size_in_bytes  # imports torch, which other commands do not need
    from ..tools.planning.report import report
    from ..tools.strategy_options import names_in

    names = names_in(arguments.strategies, "plan.strategies")
    memory = arguments.device_memory
    with Console(stderr=True, markup=False, emoji=False).status("Starting a process") as status:
        found = plan(
            arguments.script,
            names,
            world_size=arguments.world_size,
            nodes=arguments.nodes,
            arguments=arguments.script_arguments,
            device_memory=None if memory is None else size_in_bytes(memory, "plan.device_memory"),
            timeout_s=arguments.timeout,
            on_progress=lambda what: status.update(Text(f"Planning: {what}")),
        )
    print_json(found.as_json()) if arguments.json else console().print(report(found))
    return found.exit_status
