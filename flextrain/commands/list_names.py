"""`flextrain list`: show the names that a configuration may use as `type`, and other names, each with one line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ..core.base.errors import ConfigError, suggest
from .output import FoldedHelp, console, fitted_table, print_json

if TYPE_CHECKING:
    from ..core.base import registry
    from ..plan.machines import MachineKind
    from ..reference.entry import Entry

_COMMANDS = "commands"
_PLUGINS = "plugins"
_MACHINES = "machines"
_OTHERS = {
    "options": "arguments of FlexibleRunner and the keys in them",
    "strategy-options": "options of strategies",
    "launchers": "programs that start processes",
    "public-names": "what `from flextrain import` gives",
    _MACHINES: "those of `flextrain plan`",
    _COMMANDS: "what `flextrain` does, also those of other packages",
    _PLUGINS: "installed packages that add names, devices or commands",
}
"""Kinds that no registry has."""
_CAPTIONS = {"metrics": "and every metric of torchmetrics, by name: flextrain show MeanMetric"}
DESCRIPTION = """\
Show the names that a configuration may use as `type`, or with KIND those of one kind, each with one line.
`flextrain show NAME` says what a name means, with its arguments.

KIND is
  strategies, hooks, optimizers, param-schedulers, metrics, loops, ...
"""
DESCRIPTION += "\n".join(f"  {name:<18}{what}" for name, what in _OTHERS.items())


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "list",
        help="show the names of strategies, hooks, optimizers, options and so on",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("kind", nargs="?", metavar="KIND", help="see above; default: the names of all types, by kind")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run, commands=commands)


def registries() -> dict[str, registry.Registry]:
    """Every registry by its name on the command line: STRATEGIES is `strategies`."""
    from ..core.base import registry  # here, because `flextrain doctor` must start without torch

    found = {name: value for name, value in vars(registry).items() if isinstance(value, registry.Registry)}
    return {name.lower().replace("_", "-"): found[name] for name in sorted(found)}


def kinds() -> list[str]:
    """What KIND may be."""
    return [*registries(), *_OTHERS]


def run(arguments: argparse.Namespace) -> int:
    """Print the names of one kind with descriptions, or the names of all kinds."""
    if arguments.kind is None:
        names = {kind: [*found, *found.short_names()] for kind, found in registries().items()}
        print_json(names) if arguments.json else _print_overview(names)
    elif arguments.kind not in kinds():
        raise ConfigError(
            f'list: "{arguments.kind}" is not allowed, give {", ".join(kinds())}{suggest(arguments.kind, kinds())}'
        )
    else:
        print_kind(arguments.kind, arguments.json, arguments.commands)
    return 0


def print_kind(kind: str, as_json: bool, commands: Any) -> None:
    """Print the names of one kind with descriptions; ``commands`` are argparse's."""
    if kind == _MACHINES:
        print_machines(as_json)
        return
    if kind == _PLUGINS:
        descriptions = plugins(commands)
    elif kind == _COMMANDS:  # argparse has no public way to ask for what its help lists
        descriptions = {action.dest: (action.help or "") % {} for action in commands._choices_actions}
    else:
        descriptions = {entry.name: entry.summary for entry in _entries(kind)} if kind in _OTHERS else _types(kind)
    print_json(descriptions) if as_json else _print_table(kind, descriptions)


def plugins(commands: Any) -> dict[str, str]:
    """Installed packages that add something by an entry point, with their versions and what they add; none is imported.

    Of several with one name the first counts, and a command of ``commands``, which are argparse's, comes before; of the
    group flextrain.report all do.
    """
    found: dict[str, str] = {}
    owners = {("flextrain.commands", action.dest): "flextrain" for action in commands._choices_actions}
    for package in importlib.metadata.distributions():
        points = [point for point in package.entry_points if point.group.startswith("flextrain.")]
        if points and package.name != "flextrain":
            added = []
            for point in points:
                owner = owners.setdefault((point.group, point.name), package.name)
                note = (
                    "" if owner == package.name or point.group == "flextrain.report" else f" (that of {owner} counts)"
                )
                added.append(f"{point.group.removeprefix('flextrain.')}: {point.name}{note}")
            found[f"{package.name} {package.version}"] = ", ".join(added)
    return dict(sorted(found.items()))


def _types(kind: str) -> dict[str, str]:
    found = registries()[kind]
    descriptions = {name: describe(found, name) for name in found}
    return descriptions | {short: _as_call(meant) for short, meant in found.short_names().items()}


def _entries(kind: str) -> Iterator[Entry]:
    from ..reference.catalogue import launchers, public_names, runner_options, strategy_options

    sources = {"options": runner_options, "strategy-options": strategy_options, "launchers": launchers}
    yield from sources.get(kind, public_names)()


def describe(found: registry.Registry, name: str) -> str:
    """The first sentence of the docstring behind a registered name, or why it cannot be loaded."""
    from ..reference.describe import documentation

    try:
        # What a library says when it is imported is no part of the list: DeepSpeed's log goes to standard output.
        with contextlib.redirect_stdout(sys.stderr):
            target = found.get(name)
    except (Exception, SystemExit) as error:  # of a third party, which may fail in any way
        return f"cannot be loaded: {error}"
    return documentation(target).summary


def _as_call(meant: dict[str, Any]) -> str:
    """A configuration as Python writes it: ``dict(type='SGD', lr=0.1)``."""
    return f"short for dict({', '.join(f'{key}={value!r}' for key, value in meant.items())})"


def _print_overview(names: dict[str, list[str]]) -> None:
    """A wrapped table in a terminal; elsewhere one name per line, so that ``grep`` finds a name with its kind."""
    out = console()
    if not out.is_terminal:
        width = max(map(len, names))
        for kind, members in names.items():
            for name in members or ["(none registered)"]:
                out.print(f"{kind:<{width}}  {name}")
        return
    table = fitted_table(
        "kind", "names", title="flextrain list KIND: with descriptions; flextrain show NAME: all of one"
    )
    for kind, members in names.items():
        table.add_row(kind, ", ".join(members) or "(none registered)")
    table.caption = f"Further kinds: {', '.join(_OTHERS)}"
    out.print(table)


def _print_table(kind: str, descriptions: dict[str, str]) -> None:
    table = fitted_table("name" if kind in _OTHERS else "type", "description", title=kind)
    for name, description in descriptions.items():
        table.add_row(name, description.replace("``", ""))
    table.caption = _CAPTIONS.get(kind)
    console().print(table)


def print_machines(as_json: bool, names: Collection[str] | None = None) -> None:
    """Print the machines of these names; None: all."""
    from ..plan.machines import MACHINES

    chosen = {name: machine for name, machine in MACHINES.items() if names is None or name in names}
    if as_json:
        print_json({name: dataclasses.asdict(machine) for name, machine in chosen.items()})
        return
    title = "per device; links in one direction; --json has the sources, and the form of a file for --machine"
    table = fitted_table(*MACHINE_COLUMNS, title=title)
    for machine in chosen.values():
        table.add_row(*machine_row(machine))
    console().print(table)


MACHINE_COLUMNS = ("machine", "device", "TFLOP/s", "memory", "GB/s", "node", "inside", "between")


def machine_row(machine: MachineKind) -> tuple[str, ...]:
    """A machine as a row under ``MACHINE_COLUMNS``."""
    peaks = ", ".join(f"{dtype} {rate / 1e12:.5g}" for dtype, rate in machine.peak.items())
    memory, bandwidth = f"{machine.memory / 2**30:.4g} GiB", f"{machine.bandwidth / 1e9:.5g}"
    links = (f"{link.name}: {link.bytes_per_s / 1e9:.4g} GB/s" for link in (machine.inside, machine.between))
    return machine.name, machine.device, peaks, memory, bandwidth, str(machine.devices), *links
