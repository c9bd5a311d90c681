"""`flextrain config`: show, compare and check configuration files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core.base.errors import FlexTrainError
from .output import FoldedHelp, console, print_json
from .train_config import add_config_options

if TYPE_CHECKING:
    from ..core.config_files import Config

SHOW = """\
Print every value of a configuration with the file and line, or the option, that it comes from.

Exit status: 0, or 2 if the configuration cannot be read."""
DIFF = """\
Print the values in which two configurations differ, with where they come from.

Exit status: 0 they are the same, 1 they differ, 2 one cannot be read."""
CHECK = """\
Check a configuration as a runner does before it trains: the names and arguments of the model, data, optimizer, hooks and
so on. Nothing is built that needs data or several processes, and nothing is written. Modules of custom_imports are
imported. With transforms, the model is built without memory for its parameters, and it is said what each of them changes.

Exit status: 0 it is right, 1 it is not, which is said in one line."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "config",
        help="show, compare and check configuration files",
        description="Show, compare and check configuration files; docs/configuration.md describes them.",
    )
    actions = command.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, description, run in (("show", SHOW, _show), ("diff", DIFF, _diff), ("check", CHECK, _check)):
        action = actions.add_parser(
            name,
            help=description.partition(".")[0].partition(":")[0].lower(),
            formatter_class=FoldedHelp,
            description=description,
        )
        action.add_argument("config", metavar="CONFIG", help="a configuration file")
        if name == "diff":
            action.add_argument("other", metavar="OTHER", help="another one")
        add_config_options(action)
        if name != "check":
            action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run)


def _show(arguments: argparse.Namespace) -> int:
    rows = _rows(_read(arguments.config, arguments))
    if arguments.json:
        print_json({key: {"value": value, "from": origin} for key, (value, origin) in rows.items()})
        return 0
    _print([("", key, value, origin) for key, (value, origin) in rows.items()])
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    first, second = (_rows(_read(path, arguments)) for path in (arguments.config, arguments.other))
    changed = [
        key for key in {**first, **second} if key not in first or key not in second or first[key][0] != second[key][0]
    ]
    if arguments.json:
        both = {"first": first, "second": second}
        print_json({key: {name: each[key] for name, each in both.items() if key in each} for key in changed})
    else:
        _print(
            [(sign, key, *rows[key]) for key in changed for sign, rows in (("-", first), ("+", second)) if key in rows]
        )
    return 1 if changed else 0


def _check(arguments: argparse.Namespace) -> int:
    from ..user_script import check_config

    try:
        changes = check_config(_read(arguments.config, arguments))
    except FlexTrainError as error:
        print(f"flextrain: {error}", file=sys.stderr)  # noqa: T201
        return 1
    for line in changes:
        console().print(line, soft_wrap=True, markup=False)
    console().print(f"{arguments.config} is right")
    return 0


def _read(path: str, arguments: argparse.Namespace) -> Config:
    from ..user_script import load

    return load(path, arguments.cfg_options, for_runner=False, work_dir=arguments.work_dir)


def _rows(config: Config) -> dict[str, tuple[str, str]]:
    """Every value as text, and where it comes from, by its key."""
    return {key: (repr(value), origin) for key, value, origin in _leaves(config, config.to_dict(), ())}


def _leaves(config: Config, value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, Any, str]]:
    from ..core.config_files import path_text

    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    nested = value and any(isinstance(item, (dict, list, tuple)) for _, item in items)
    if value and (isinstance(value, dict) or nested):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(config, item, (*path, key))
    elif path:
        yield path_text(path), value, str(config.origin(*path) or "")


def _print(rows: list[tuple[str, str, str, str]]) -> None:
    lines = [(f"{sign} {key} = {value}" if sign else f"{key} = {value}", origin) for sign, key, value, origin in rows]
    width = min(max((len(line) for line, _ in lines), default=0), 60)
    out = console()
    for line, origin in lines:
        out.print(f"{line.ljust(width)}  {origin}".rstrip())
