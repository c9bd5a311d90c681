"""The `flextrain` command line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .commands import (
    checkpoint,
    completion,
    configurations,
    doctor,
    init_project,
    list_names,
    new_plugin,
    plan,
    report,
    run_script,
    show,
    test_config,
    train_config,
    verify,
)
from .commands.output import until_closed
from .core.base.errors import (
    ConfigError,
    FlexTrainError,
    has_bug_of_the_user,
    nearest,
    one_line,
    one_of,
    say,
    suggest,
    wants_traceback,
)

COMMANDS = (
    checkpoint,
    completion,
    configurations,
    doctor,
    init_project,
    list_names,
    new_plugin,
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
_ENTRY_POINTS = "flextrain.commands"
"""The group through which installed packages add commands."""


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
    try:
        _add_of_other_packages(commands, own)
        arguments = parser.parse_args(own)
        if script_arguments and not getattr(arguments, "takes_script_arguments", False):
            parser.error("arguments after -- belong to a script, and this command runs none")
        arguments.script_arguments = script_arguments
        return int(arguments.run(arguments))
    except FlexTrainError as error:
        if wants_traceback() or has_bug_of_the_user(error):
            traceback.print_exc()
        else:
            say(error, f"flextrain: {error}")
        return 2


def _add_of_other_packages(commands: Any, own: Sequence[str]) -> None:
    """Add the commands of other packages to the built-in ones, if ``own``, the arguments, may be about them.

    The one that is asked for is loaded, and all are for a list of commands and for completion. Elsewhere they are names,
    for suggestions.

    Raises:
        ConfigError: the one that is asked for cannot be loaded. In a list, one line on stderr says so.
    """
    first, second = [*own, "", ""][:2]
    is_list = first in ("list", "show") and "commands" in own
    takes_all = is_list or first.startswith("-") or first == "completion"
    asked = second if first == "show" else first
    if asked in commands.choices and not takes_all:
        return
    for point in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        if point.name in commands.choices:  # the library's own command of this name comes first
            continue
        if point.name == asked:
            _load(commands, point)
        elif not takes_all:
            commands.add_parser(point.name)
        else:
            try:
                _load(commands, point)
            except ConfigError as error:
                sys.stderr.write(f"flextrain: {error}\n")


def _load(commands: Any, point: importlib.metadata.EntryPoint) -> None:
    """Add the command of an entry point, whose value is a module with a function ``add``, or that function."""
    package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
    try:
        target = point.load()
        getattr(target, "add", target)(commands)
        if point.name not in commands.choices:
            raise ConfigError(f"{point.value} has added no command of this name")
    except Exception as error:  # an entry point of a third party may fail in any way
        raise ConfigError(f'command "{point.name}" of {package}: cannot be loaded: {one_line(error)}') from error
    for action in commands._choices_actions:  # argparse has no public way to ask for what its help lists
        if action.dest == point.name:
            action.help = f"{action.help or ''} ({package})".strip()


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, with the nearest name. Parsers of the commands have this class too."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but let each command say itself what it does not know."""
        self._given = args
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f'"{unknown[0]}" is one argument too many')
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong; an unknown option first, because argparse blames others for it."""
        self.exit(2, f"{self.prog}: error: {self._about_unknown_option() or one_line(message)}\n")

    def _about_unknown_option(self) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        long = [option for option in known if option.startswith("--")]
        for given in self._given:
            name = given.partition("=")[0]
            if not name.startswith("-") or " " in given or _is_number(given):  # argparse takes it for a value
                if self._subparsers is not None:  # what follows belongs to the command
                    break
            # As argparse does, take the beginning of an option for the option, and -k3 for -k 3.
            elif not any(each.startswith(name) or (name[1] != "-" and each == name[:2]) for each in known):
                if near := nearest(name.lstrip("-"), (each[2:] for each in long)):
                    return f'"{name}" is not allowed, did you mean "--{near}"?'
                if self.get_default("takes_script_arguments"):
                    return f'"{name}" is not allowed, arguments of the script come after --'
                return f'"{name}" is not allowed, give {one_of(long)}'
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # A private method: argparse has no public way to do this before Python 3.14.
        if action.choices is not None and value not in action.choices:
            hint = suggest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f'"{value}" is not allowed, give {one_of(action.choices)}{hint}')


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return text == "-"


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after ``--``; all of a command that reads them itself come after."""
    given = list(argv)
    if given[:1] == [_TAKES_ALL] and given[1:] and given[1] not in ("-h", "--help"):
        return given[:1], given[1:]
    end = given.index("--") if "--" in given else len(given)
    return given[:end], given[end + 1 :]
