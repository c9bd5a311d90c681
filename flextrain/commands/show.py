"""`flextrain show`: what a name is, its arguments with their meaning, and an example."""

from __future__ import annotations

import argparse
from typing import Any

from ..core.base.errors import ConfigError
from .list_names import kinds, print_kind, print_machines
from .output import FoldedHelp, console, print_json

DESCRIPTION = """\
Show what a name means: what it is, each argument with type, default and meaning, what it raises, and an example.

NAME is
  a type of a configuration  EMAHook, AdamW, LinearLR, package.module:Name
  a strategy                 fsdp, zero3 and so on, or the class
  an option                  strategy.zero_optimization.stage or only its end,
                             env_cfg.watchdog, train_cfg
  a public name              FlexibleRunner, Hook, launch, HOOKS
  a kind or a command        hooks, train

`flextrain list` shows the names.

Exit status: 0, or 2 if nothing has this name."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "show",
        help="show what a type, option or public name means, with its arguments and an example",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("name", metavar="NAME", help="see above")
    command.add_argument(
        "--json", action="store_true", help="print JSON: a list, as options of several strategies have one name"
    )
    command.set_defaults(run=run, commands=commands)


def run(arguments: argparse.Namespace) -> int:
    """Print the entries of a name; see `show`."""
    if not arguments.json and (command := arguments.commands.choices.get(arguments.name)) is not None:
        command.print_help()
        return 0
    from ..plan.machines import MACHINES
    from ..reference.catalogue import (
        find,
        near,  # imports torch, which other commands do not need
    )

    if arguments.name in kinds():
        print_kind(arguments.name, arguments.json, arguments.commands)
        return 0
    if arguments.name in MACHINES:
        print_machines(arguments.json, [arguments.name])
        return 0
    found = find(arguments.name)
    if not found:
        names = near(arguments.name, [*kinds(), *MACHINES, *arguments.commands.choices])
        hint = f", did you mean {_or(names)}?" if names else ", `flextrain list` shows the names"
        raise ConfigError(f'show: "{arguments.name}" is no name of flextrain{hint}')
    if arguments.json:
        print_json([entry.as_json() for entry in found])
        return 0
    from ..reference.entry import PrintedEntry

    out = console()
    for number, entry in enumerate(found):
        if number:
            out.print()
        out.print(PrintedEntry(entry))
    return 0


def _or(names: list[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[:-1] else quoted)
