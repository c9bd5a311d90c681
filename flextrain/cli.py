"""The `flextrain` command line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from . import __version__
from .commands import (
    checkpoint,
    completion,
    configurations,
    doctor,
    init_project,
    list_names,
    plan,
    report,
    run_script,
    show,
    test_config,
    train_config,
    verify,
)
from .commands.output import until_closed
from .core.base.errors import FlexTrainError, has_bug_of_the_user, one_of, say, suggest, wants_traceback

COMMANDS = (
    checkpoint,
    completion,
    configurations,
    doctor,
    init_project,
    list_names,
    plan,
    report,
    run_script,
    show,
    test_config,
    train_config,
    verify,
)
DESCRIPTION = "Train PyTorch models, check and plan trainings, look into checkpoints, and find what there is."
EPILOG = "flextrain COMMAND --help says more of each."
_TAKES_ALL = "run"
"""The command that reads its own arguments, because those of a script follow them; only ``--help`` is argparse's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after an error on stderr; a command may have others.

    The status is 141 if the reader of standard output left early.
    """
    return until_closed(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    own, script_arguments = _split(argv)
    parser = _Parser(prog="flextrain", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"flextrain {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    parser.set_defaults(parser=parser)
    arguments = parser.parse_args(own)
    if script_arguments and not getattr(arguments, "takes_script_arguments", False):
        parser.error("arguments after -- belong to a script, and this command runs none")
    arguments.script_arguments = script_arguments
    try:
        return int(arguments.run(arguments))
    except FlexTrainError as error:
        if wants_traceback() or has_bug_of_the_user(error):
            traceback.print_exc()
        else:
            say(error, f"flextrain: {error}")
        return 2


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest name for a misspelt command or choice. Parsers of the commands have this class too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # A private method: argparse has no public way to do this before Python 3.14.
        if action.choices is not None and value not in action.choices:
            hint = suggest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f'"{value}" is not allowed, give {one_of(action.choices)}{hint}')


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after ``--``; all of a command that reads them itself come after."""
    given = list(argv)
    if given[:1] == [_TAKES_ALL] and given[1:] and given[1] not in ("-h", "--help"):
        return given[:1], given[1:]
    end = given.index("--") if "--" in given else len(given)
    return given[:end], given[end + 1 :]
