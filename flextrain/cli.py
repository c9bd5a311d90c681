"""The `flextrain` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__
from .commands import checkpoint, doctor, list_names, verify
from .commands.output import until_closed
from .core.errors import FlexTrainError, one_of, suggest

COMMANDS = (checkpoint, doctor, list_names, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 after an error on stderr; a command may have others.

    It is 141 when nobody reads standard output to its end.
    """
    return until_closed(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    own, script_arguments = _split(argv)
    parser = _Parser(prog="flextrain", description="Tools around flextrain.")
    parser.add_argument("--version", action="version", version=f"flextrain {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(own)
    if script_arguments and not getattr(arguments, "takes_script_arguments", False):
        parser.error("arguments after -- are those of a script")
    arguments.script_arguments = script_arguments
    try:
        return int(arguments.run(arguments))
    except FlexTrainError as error:
        print(f"flextrain: {error}", file=sys.stderr)  # noqa: T201
        return 2


class _Parser(argparse.ArgumentParser):
    """Offers the nearest name for a misspelt command or choice; parsers of commands are of its class too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # The one private name: argparse has no other place for it before Python 3.14.
        if action.choices is not None and value not in action.choices:
            hint = suggest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f'"{value}" is not allowed, give {one_of(action.choices)}{hint}')


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind ``--``."""
    given = list(argv)
    end = given.index("--") if "--" in given else len(given)
    return given[:end], given[end + 1 :]
