"""`flextrain report`: runs as one HTML file, or as Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..core.base.errors import ConfigError

_DEFAULT = "report.html"


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser("report", help="show runs as one HTML file with curves and events, or as Markdown")
    command.add_argument("runs", nargs="+", metavar="WORK_DIR", help="the work directory of a run")
    command.add_argument(
        "-o", "--output", metavar="FILE", help=f"file to write; default: {_DEFAULT} in the first WORK_DIR"
    )
    command.add_argument("--names", metavar="A,B", help="names of the runs; default: those of their folders")
    command.add_argument(
        "--markdown", action="store_true", help="Markdown for a pull request, on standard output unless -o is given"
    )
    command.add_argument(
        "--watch", action="store_true", help="write the page again while the runs train; ends with them, or with Ctrl-C"
    )
    command.add_argument(
        "--interval", type=float, default=10.0, metavar="S", help="seconds between two looks; default: 10"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from ..report.report_files import names_of, recorded_runs, watch, write_markdown, write_report

    if arguments.interval < 0.1:
        raise ConfigError(f"report.interval: {arguments.interval} is not allowed, give 0.1 or more seconds")
    if arguments.watch and arguments.markdown:
        raise ConfigError("report.watch: has no meaning with --markdown, give one of them")
    folders = [Path(given) for given in arguments.runs]
    names = names_of(folders, arguments.names)
    if arguments.markdown:
        write_markdown(recorded_runs(folders, names), None if arguments.output is None else Path(arguments.output))
        return 0
    output = Path(arguments.output) if arguments.output else folders[0] / _DEFAULT
    if arguments.watch:
        watch(folders, names, output, arguments.interval, _say)
    else:
        write_report(recorded_runs(folders, names), output)
        _say(f"Report: {output}")
    return 0


def _say(line: str) -> None:
    from .output import console

    console().print(line)
