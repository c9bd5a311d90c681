"""`flextrain list`: show the names that a configuration may use as `type`, and the machines of `flextrain plan`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, suggest
from .formatting import fitted_table
from .output import console, print_json

if TYPE_CHECKING:
    from ..core import registry
    from ..tools.planning.machine_kind import MachineKind


_MACHINES = "machines"


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser("list", help="show the names that a configuration may use as `type`")
    command.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        help="strategies, optimizers, hooks, ..., or machines, those of `flextrain plan`; default: all kinds",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def registries() -> dict[str, registry.Registry]:
    """Every registry by its name on the command line: STRATEGIES is `strategies`."""
    from ..core import registry  # here, because `flextrain doctor` must start without torch

    found = {name: value for name, value in vars(registry).items() if isinstance(value, registry.Registry)}
    return {name.lower().replace("_", "-"): found[name] for name in sorted(found)}


def run(arguments: argparse.Namespace) -> int:
    """Print the names of one kind with descriptions, or the names of all kinds."""
    kinds = registries()
    if arguments.kind == _MACHINES:
        _print_machines(arguments.json)
        return 0
    if arguments.kind is None:
        names = {kind: [*found, *found.short_names()] for kind, found in kinds.items()}
        print_json(names) if arguments.json else _print_overview(names)
        return 0
    if arguments.kind not in kinds:
        known = [*kinds, _MACHINES]
        raise ConfigError(
            f'list: "{arguments.kind}" is not allowed, give {", ".join(known)}{suggest(arguments.kind, known)}'
        )
    found = kinds[arguments.kind]
    descriptions = {name: describe(found, name) for name in found}
    descriptions |= {short: _as_call(meant) for short, meant in found.short_names().items()}
    print_json(descriptions) if arguments.json else _print_table(arguments.kind, descriptions)
    return 0


def describe(found: registry.Registry, name: str) -> str:
    """The first sentence of the docstring behind a registered name, or why it cannot be loaded."""
    try:
        target = found.get(name)
    except Exception as error:  # an entry point of a third party may fail in any way, and must not hide the other names
        return f"cannot be loaded: {error}"
    paragraph = _documentation(target).partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]


def _documentation(target: Any) -> str:
    """The own docstring of a class or function; that of its base where ``dataclass`` has written only the signature."""
    text = inspect.cleandoc(target.__doc__ or "")
    if inspect.isclass(target) and is_dataclass(target) and text.startswith(f"{target.__name__}("):
        return _documentation(target.__bases__[-1])  # mixins come first
    return text


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
    table = fitted_table("kind", "names", title="flextrain list KIND shows one kind with descriptions")
    for kind, members in names.items():
        table.add_row(kind, ", ".join(members) or "(none registered)")
    out.print(table)


def _print_table(kind: str, descriptions: dict[str, str]) -> None:
    table = fitted_table("type", "description", title=kind)
    for name, description in descriptions.items():
        table.add_row(name, description)
    console().print(table)


def _print_machines(as_json: bool) -> None:
    from ..tools.planning.machines import MACHINES

    if as_json:
        print_json({name: dataclasses.asdict(machine) for name, machine in MACHINES.items()})
        return
    title = "per device; links in one direction; --json has the sources, and the form of a file for --machine"
    table = fitted_table(*MACHINE_COLUMNS, title=title)
    for machine in MACHINES.values():
        table.add_row(*machine_row(machine))
    console().print(table)


MACHINE_COLUMNS = ("machine", "device", "TFLOP/s", "memory", "GB/s", "node", "inside", "between")


def machine_row(machine: MachineKind) -> tuple[str, ...]:
    """A machine as a row under ``MACHINE_COLUMNS``."""
    peaks = ", ".join(f"{dtype} {rate / 1e12:.5g}" for dtype, rate in machine.peak.items())
    memory, bandwidth = f"{machine.memory / 2**30:.4g} GiB", f"{machine.bandwidth / 1e9:.5g}"
    links = (f"{link.name}: {link.bytes_per_s / 1e9:.4g} GB/s" for link in (machine.inside, machine.between))
    return machine.name, machine.device, peaks, memory, bandwidth, str(machine.devices), *links
