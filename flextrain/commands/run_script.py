"""`flextrain run`: train under torchrun's agent, and come back after failures."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..elastic.command_line import DEFAULT_RESTARTS, GROUPS, misplaced, read_options
from .output import FoldedHelp

DESCRIPTION = f"""\
Start SCRIPT in several processes by torchrun's own agent, and start them again when one fails.

After a restart the processes train on from the newest checkpoint that this job has saved, at the same sample, also on
fewer or more machines; they have the variable FLEXTRAIN_RESUME. What the script gives as resume and load_from is for
its first start, and for restarts before the first checkpoint.

There are at most --max-restarts restarts (default: {DEFAULT_RESTARTS}), as torchrun counts them: on every machine, and for failures
only, not for machines that join. There is none after a restart that made no update, or when an iteration fails
twice, which is named with its samples; after signals and stalls, which may come from outside, it takes one more.
SIGTERM to this command ends the job after a save.

events.jsonl in the work directory has a line for each event. The end of the output is a summary.

Exit status: 0 finished; that of the process that failed; 143 after SIGTERM."""


def add(commands: Any) -> None:
    """Add the command to argparse's; its arguments are not argparse's, because those of the script follow them."""
    command = commands.add_parser(
        "run",
        help="train in several processes, and come back after failures",
        usage="flextrain run [options] SCRIPT [SCRIPT_ARGUMENT ...]",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    for title, options in GROUPS.items():
        group = command.add_argument_group(title)
        for name, (metavar, text) in options.items():
            if metavar:
                group.add_argument(name, metavar=metavar, help=text.replace("%", "%%"))
            else:
                group.add_argument(name, action="store_true", help=text)
    command.set_defaults(run=run, takes_script_arguments=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; see `launch_and_watch`."""
    from ..elastic.launching import launch_and_watch, summary

    options = read_options(arguments.script_arguments)
    if line := misplaced(options):
        sys.stderr.write(f"{line}\n")
    status, how, watched = launch_and_watch(options)
    sys.stdout.flush()
    sys.stderr.write(summary(status, how, watched) + "\n")
    return status
