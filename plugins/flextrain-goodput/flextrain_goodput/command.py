"""`flextrain goodput WORK_DIR`, and the row of `flextrain report`: the ledger of a job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flextrain import ConfigError, read_events
from flextrain.commands.output import FoldedHelp, console, fitted_table, print_json

from .ledger import duration, ledger_of, summary

DESCRIPTION = """\
Show what the seconds of a job went into, over all its starts, as GoodputHook has recorded them in events.jsonl.

Exit status: 0, or 2 if there is no record."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "goodput",
        help="show what the time of a job went into",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("work_dir", metavar="WORK_DIR", help="the work directory of the run")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the ledger."""
    found = ledger_of(read_events(arguments.work_dir))
    if not found.starts:
        raise ConfigError(
            f"goodput: {arguments.work_dir} has no record, give a work directory of a run with "
            'custom_hooks=[dict(type="GoodputHook")]'
        )
    if arguments.json:
        best = {"best_save_interval_s": found.best_interval_s(), "save_interval_s": found.interval_s()}
        print_json({"goodput": found.goodput, "seconds": found.seconds, "starts": len(found.starts), **best})
        return 0
    table = fitted_table("what", "time", "share", title=summary(found))
    for kind, seconds in sorted(found.seconds.items(), key=lambda one: -one[1]):
        if seconds:
            table.add_row(kind, duration(seconds), f"{100 * seconds / found.seconds_in_all:.1f} %")
    console().print(table)
    return 0


def row_of_report(work_dir: Path) -> str:
    """Return what `flextrain report` says of a run; empty if it has no record."""
    found = ledger_of(read_events(work_dir))
    return summary(found) if found.starts else ""
