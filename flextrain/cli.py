"""The `flextrain` command: what is installed and which names a configuration may use."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from . import __version__
from .core import registry
from .core.errors import ConfigError, FlexTrainError, suggest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 after a one-line error on stderr."""
    parser = argparse.ArgumentParser(prog="flextrain", description="Tools around flextrain.")
    parser.add_argument("--version", action="version", version=f"flextrain {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="names that dict(type=...) may use")
    command.add_argument(
        "kind", nargs="?", metavar="KIND", help=f"one of: {', '.join(registries())}; default: an overview"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=list_names)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except FlexTrainError as error:
        print(f"flextrain: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def registries() -> dict[str, registry.Registry]:
    """Every registry by its name on the command line: STRATEGIES is `strategies`."""
    found = {name: value for name, value in vars(registry).items() if isinstance(value, registry.Registry)}
    return {name.lower().replace("_", "-"): found[name] for name in sorted(found)}


def list_names(arguments: argparse.Namespace) -> None:
    """Print one registry with descriptions, or all of them in short."""
    kinds = registries()
    if arguments.kind is None:
        names = {kind: list(found) for kind, found in kinds.items()}
        _print_json(names) if arguments.json else _print_overview(names)
        return
    if arguments.kind not in kinds:
        hint = suggest(arguments.kind, kinds)
        raise ConfigError(f'list: "{arguments.kind}" is not allowed, give {", ".join(kinds)}{hint}')
    found = kinds[arguments.kind]
    descriptions = {name: describe(found, name) for name in found}
    _print_json(descriptions) if arguments.json else _print_table(arguments.kind, descriptions)


def describe(found: registry.Registry, name: str) -> str:
    """The first line of the docstring behind a registered name, or why it cannot be loaded."""
    try:
        target = found.get(name)
    except Exception as error:  # a third party's entry point may fail in any way, and must not hide the other names
        return f"cannot be loaded: {error}"
    # A class of its own words: inherited docstrings would describe the base.
    documentation = inspect.cleandoc(target.__doc__ or "")
    return documentation.partition("\n\n")[0].replace("\n", " ")


def _print_overview(names: dict[str, list[str]]) -> None:
    table = Table("kind", "names", title="flextrain list KIND shows one of them with descriptions")
    for kind, members in names.items():
        table.add_row(kind, ", ".join(members) or "(none registered)")
    Console().print(table)


def _print_table(kind: str, descriptions: dict[str, str]) -> None:
    table = Table("type", "what it is", title=kind)
    for name, description in descriptions.items():
        table.add_row(name, description)
    Console().print(table)


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
