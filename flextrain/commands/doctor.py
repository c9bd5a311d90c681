"""`flextrain doctor`: report installed packages, the needs of each strategy, and what is missing."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from ..doctor.report import count_devices, diagnose
from .output import console, print_json


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "doctor",
        help="show installed packages, the strategies that can run here, and problems",
        description="Examine this machine and this Python. Exit status: 0 if nothing is broken, 1 if something is.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="as a check of a machine of a cluster: it is an error if torch does not find N accelerators",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis."""
    report = diagnose()
    if arguments.devices is not None:
        report.findings += count_devices(report.devices, arguments.devices)
    if arguments.json:
        print_json(report.as_json())
    elif find_spec("rich") is None:
        sys.stdout.write(f"{report}\n")
    else:
        console().print(report)
    return report.exit_status
