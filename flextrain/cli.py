"""The `flextrain` command line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import re
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
_UNMEANT = re.compile(r"%(%|\(\w+\))?")
"""A % of a help text; one without the group is meant as it stands."""
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
        package = _add_of_other_packages(commands, own)
        arguments = parser.parse_args(own)
        if script_arguments and not getattr(arguments, "takes_script_arguments", False):
            parser.error("arguments after -- belong to a script, and this command runs none")
        arguments.script_arguments = script_arguments
        return _status(arguments, f'command "{own[0]}" of {package}')
    except FlexTrainError as error:
        if wants_traceback() or has_bug_of_the_user(error):
            traceback.print_exc()
        else:
            say(error, f"flextrain: {error}")
        return 2


def _status(arguments: argparse.Namespace, origin: str) -> int:
    """Run the command; ``origin`` is how an error names it."""
    run = getattr(arguments, "run", None)
    if not callable(run):
        raise ConfigError(f"{origin}: has nothing to run, give set_defaults(run=...), and no argument that name")
    found = run(arguments)
    if not isinstance(found, int | None):
        raise ConfigError(f"{origin}: run has returned a {type(found).__name__}, give the exit status, or None for 0")
    return int(found or 0)


def _add_of_other_packages(commands: Any, own: Sequence[str]) -> str:
    """Add the commands of other packages to the built-in ones, if ``own``, the arguments, may be about them.

    The one that is asked for is loaded, and all are for a list of commands and for completion. Elsewhere they are names,
    for suggestions.

    Returns:
        The package of the one that is asked for; empty: it is none of theirs.

    Raises:
        ConfigError: the one that is asked for cannot be loaded. In a list, one line on stderr says so.
    """
    first, second = [*own, "", ""][:2]
    is_list = first in ("list", "show") and "commands" in own
    takes_all = is_list or first.startswith("-") or first == "completion"
    asked = second if first == "show" else first
    loaded: dict[str, str] = {}
    if asked in commands.choices and not takes_all:
        return ""
    for point in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        package = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        if point.name in loaded:
            _note(f'command "{point.name}" of {package} is left out, that of {loaded[point.name]} comes first')
        elif point.name in commands.choices:  # the library's own command of this name comes first
            continue
        elif point.name == asked or takes_all:
            loaded[point.name] = package
            try:
                _load(commands, point, package)
            except ConfigError as error:
                if point.name == asked:
                    raise
                _note(error)
        else:
            commands.add_parser(point.name)
    return loaded.get(asked, "")


def _note(text: object) -> None:
    sys.stderr.write(f"flextrain: {text}\n")


def _load(commands: Any, point: importlib.metadata.EntryPoint, package: str) -> None:
    """Add the command of an entry point, whose value is a module with a function ``add``, or that function."""
    theirs = _Parser(prog="flextrain").add_subparsers()  # of what it adds, only its own name can be called
    try:
        with contextlib.redirect_stdout(sys.stderr):
            target = point.load()
            add = getattr(target, "add", target)
            if not callable(add):
                raise ConfigError(f"{point.value} has no function add, the entry point has to name the function")
            add(theirs)
        if point.name not in theirs.choices:
            raise ConfigError(f"{point.value} has added no command of this name")
    except (Exception, SystemExit) as error:  # an entry point of a third party may fail in any way
        why = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f'command "{point.name}" of {package}: cannot be loaded: {why}{one_line(error)}') from error
    command = commands.choices[point.name] = theirs.choices[point.name]
    for option in command._actions:  # what argparse cannot show is shown as it stands
        option.help = option.help and _UNMEANT.sub(lambda found: found[0] if found[1] else "%%", option.help)
    for action in theirs._choices_actions:  # argparse has no public way to ask for what its help lists
        if action.dest == point.name:
            action.metavar = point.name  # without aliases
            text = (action.help or "").replace("%%", "%")
            action.help = f"{text} ({package})".strip().replace("%", "%%")
            commands._choices_actions.append(action)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, with the nearest name. Parsers of the commands have this class too."""

    _given: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

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
            elif not any(each in (name, name[:2]) for each in known):  # as argparse does, take -k3 for -k 3
                begun = [each[2:] for each in long if each.startswith(name)]
                if near := nearest(name.lstrip("-"), begun or (each[2:] for each in long), 0 if begun else 0.6):
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
