"""The `flextrain` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import checkpoint, doctor, list_names, verify
from .core.errors import FlexTrainError

COMMANDS = (checkpoint, doctor, list_names, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 after an error on stderr; a command may have others."""
    own, script_arguments = _split(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="flextrain", description="Tools around flextrain.")
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


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind ``--``."""
    given = list(argv)
    end = given.index("--") if "--" in given else len(given)
    return given[:end], given[end + 1 :]
