"""The catalogue: an entry for every registered type, public name, option and launcher; look-up by name."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...core import registry
from ...core.errors import FlexTrainError, nearest
from ...core.import_paths import UnknownNameError, import_dotted, import_path
from ...core.synonyms import NAMES
from ...runner.hooks.priority import Priority
from .annotations import default_text
from .describe import describe, home_of, methods_of
from .entry import Argument, Entry
from .examples import example_of, folded
from .foreign import REFUSED
from .launchers import launchers
from .option_keys import runner_options, strategy_options
from .registry_kinds import KINDS

_PUBLIC = ("flextrain", "flextrain.data", "flextrain.ray", "flextrain.testing")
PUBLIC_GROUP = "public-names"
_FOR_STRATEGIES = {
    "Needs": "flextrain.strategies:Needs",
    "StrategyConfig": "flextrain.strategies:StrategyConfig",
    "TrainStep": "flextrain.strategies.steps:TrainStep",
}
"""What docs/strategies.md imports from other modules, for strategies of one's own."""


@functools.cache
def catalogue() -> tuple[Entry, ...]:
    """Every entry: registered types by kind, then public names, then options. Made once in a process."""
    return (*registered_types(), *public_names(), *runner_options(), *strategy_options(), *launchers())


def groups() -> dict[str, list[Entry]]:
    """The entries by their group."""
    found: dict[str, list[Entry]] = {}
    for entry in catalogue():
        found.setdefault(entry.group, []).append(entry)
    return found


def registered_types() -> Iterator[Entry]:
    """Every name of every registry, also of torch's classes that are found by name."""
    for group in KINDS:
        for name in _registry(group):
            yield of_registry(group, name)


def of_registry(group: str, name: str) -> Entry:
    """The entry of a registered name; one that says why, if it cannot be loaded on this machine."""
    kind, found = KINDS[group], _registry(group)
    try:
        target = found.resolve(name)
    except Exception as error:  # an entry point of a third party may fail in any way
        return Entry(name, found.name, group, "", f"Cannot be loaded on this machine: {error}", unavailable=str(error))
    entry = describe(name, target, found.name, group, kind.filled_in)
    aliases = tuple(other for other, each in found.module_dict.items() if other != name and each is target)
    short = tuple(short for short, meant in found.short_names().items() if meant["type"] == name)
    also = (*aliases, *short, *([kind.base] if kind.base and home_of(_public(kind.base)) != entry.home else []))
    example = "" if name in REFUSED else entry.example or example_of(entry)
    if group == "hooks":
        entry = replace(entry, arguments=(*entry.arguments, _priority(target)))
    why = f"Every runner refuses it: {REFUSED[name]}." if name in REFUSED else ""
    return replace(entry, example=folded(example), see_also=also, unavailable=why)


def _priority(hook: Any) -> Argument:
    """The key that the configuration of every hook may have besides its arguments."""
    own = getattr(hook, "priority", None)
    meaning = f"when it is called, among the hooks of one point: {', '.join(Priority.__members__)}, or a number from 0, the first, to 100"
    return Argument("priority", "str | int", None if own is None else default_text(own), meaning)


def public_names() -> Iterator[Entry]:
    """Every public name of flextrain, flextrain.data, flextrain.ray and flextrain.testing."""
    for package in _PUBLIC:
        module = importlib.import_module(package)
        for name in sorted(set(module.__all__)):
            yield _of_public(f"{package}.{name}", getattr(module, name))


def _of_public(name: str, value: Any) -> Entry:
    if isinstance(value, registry.Registry):
        return _of_a_registry(name, value)
    if isinstance(value, str):  # __version__
        summary = "The version of flextrain, as text."
        return Entry(name, "value", PUBLIC_GROUP, name.replace(".__", ":__"), summary, example=f"print({name})")
    kind = "exception" if inspect.isclass(value) and issubclass(value, Exception) else "class"
    entry = describe(name, value, kind if inspect.isclass(value) else "function", PUBLIC_GROUP)
    if inspect.isclass(value) and kind == "class":
        entry = replace(entry, methods=tuple(methods_of(value)))
    if kind == "exception" or (inspect.isclass(value) and issubclass(value, argparse.Action)):
        entry = replace(entry, arguments=())  # those of Python's own class
    short = name.rpartition(".")[2]
    group = next((each for each in KINDS if _registry(each).module_dict.get(short) is value), None)
    if group is None:
        return replace(entry, example=entry.example or example_of(entry))
    registered = of_registry(group, short)
    return replace(entry, arguments=registered.arguments, example=registered.example, see_also=registered.see_also)


def _of_a_registry(name: str, value: registry.Registry) -> Entry:
    group = next(group for group, kind in KINDS.items() if kind.registry == name.rpartition(".")[2])
    public = KINDS[group].registry
    return Entry(
        name=name,
        kind="registry",
        group=PUBLIC_GROUP,
        home=f"flextrain.core.registry:{public}",
        summary=f"The registry of the kind {value.name}: the names that {KINDS[group].where} can have.",
        text=f"`flextrain list {group}` shows them. register_module() adds a class or function.",
        example=f"@{public}.register_module()\nclass Mine: ...",
        see_also=("flextrain.Registry",),
    )


def find(name: str) -> list[Entry]:
    """The entries of what a user calls ``name``: a type, a short name of a strategy, a public name, or an option.

    A name of a library that is found on demand, such as torchmetrics' ``Accuracy``, has an entry too, and so has an
    import path ``package.module:Name``. For an option its last names are enough: "zero_optimization.stage".

    Raises:
        ConfigError: an import path that cannot be imported.
    """
    bare = name.removeprefix("flextrain.")
    for group in KINDS:
        if bare in _listed(group):
            return [of_registry(group, bare)]
        if (meant := _registry(group).short_names().get(name)) is not None:
            return [_of_short_name(name, group, meant)]
    for package in _PUBLIC:
        module = importlib.import_module(package)
        own = name.removeprefix(f"{package}.")
        if own in module.__all__:
            return [_of_public(f"{package}.{own}", getattr(module, own))]
    if bare in _FOR_STRATEGIES:
        return [_of_path(bare, import_path(_FOR_STRATEGIES[bare], "show"))]
    options = [*runner_options(), *strategy_options(), *launchers()]
    if found := [each for each in options if each.name == name]:
        return found
    if ":" in name:
        short = name.partition(":")[0]
        for group in KINDS:
            if short in _registry(group).short_names():
                return [_of_short_name(name, group, _registry(group).expand(name, "show"))]
        return [_of_path(name, import_path(name, "show"))]
    outer, _, last = name.rpartition(".")
    if outer and (found := [each for entry in find(outer) for each in _part(entry, last)]):
        return found
    for group in KINDS:
        if "." not in name and _known(group, name):
            return [of_registry(group, name)]
    if found := [each for each in options if each.name.endswith(f".{name}")]:
        return found
    if outer and importlib.util.find_spec(name.partition(".")[0]) is not None:
        with contextlib.suppress(FlexTrainError, UnknownNameError):
            return [_of_path(name, import_dotted(name, "show"))]
    return []


def _of_path(name: str, target: Any) -> Entry:
    return describe(name, target, "class" if inspect.isclass(target) else "function", "")


def _part(entry: Entry, name: str) -> Iterator[Entry]:
    """The entry of an argument or a method of what has an entry: of ``EMAHook.momentum`` or ``Hook.before_run``."""
    full = f"{entry.name.removeprefix('flextrain.')}.{name}"
    for argument in entry.arguments:
        if argument.name == name:
            yield Entry(
                name=full,
                kind=f"argument of {entry.name}",
                group=entry.group,
                home=entry.home,
                summary=argument.meaning,
                type=argument.type,
                default=argument.default,
                see_also=(entry.name,),
            )
    for method in entry.methods:
        if method.name == name:
            function = getattr(import_path(entry.home, "show"), name)
            if isinstance(function, property):
                yield Entry(full, "property", entry.group, f"{entry.home}.{name}", method.summary)
            else:
                text = f"{name}{method.signature}"
                yield replace(describe(full, function, "method", entry.group), example=text, see_also=(entry.name,))


def _of_short_name(name: str, group: str, meant: dict[str, Any]) -> Entry:
    long = of_registry(group, meant["type"])
    options = ", ".join(f"{key}={value!r}" for key, value in meant.items())
    return replace(
        long,
        name=name,
        kind=f"short name of a {long.kind}",
        text=f"Short for dict({options.replace(chr(39), chr(34))}).\n\n{long.text}".strip(),
        example=f'strategy="{name}"',
        see_also=(long.name, *long.see_also),
    )


def near(name: str) -> list[str]:
    """The names most like ``name``, at most three: those that are spelled alike, then those that contain it."""
    if len(name.strip()) < 2:
        return []
    if name in NAMES:
        return [NAMES[name]]
    names = list(all_names())
    found: list[str] = []
    rest = [*names, *(each.rpartition(".")[2] for each in names)]
    while len(found) < 3 and (best := nearest(name, rest, 0.7)):
        found.append(best)
        rest = [each for each in rest if each.lower() != best.lower()]
    containing = sorted((each for each in names if name.lower() in each.lower()), key=len)
    return list(dict.fromkeys([*found, *containing]))[:3]


def all_names() -> Iterator[str]:
    """Every name that ``find`` takes; nothing optional is imported for them."""
    for group in KINDS:
        yield from _registry(group).short_names()
        yield from _listed(group)
    for package in _PUBLIC:
        module = importlib.import_module(package)
        yield from (name if package == "flextrain" else f"{package}.{name}" for name in sorted(set(module.__all__)))
    yield from _FOR_STRATEGIES
    yield from dict.fromkeys(each.name for each in (*runner_options(), *strategy_options(), *launchers()))


def _listed(group: str) -> frozenset[str]:
    return frozenset(_registry(group))


def _known(group: str, name: str) -> bool:
    try:
        return _registry(group).get(name) is not None
    except FlexTrainError:  # it is known, and cannot be loaded
        return True


def _registry(group: str) -> registry.Registry:
    found: registry.Registry = getattr(registry, KINDS[group].registry)
    return found


def _public(name: str) -> Any:
    return getattr(importlib.import_module("flextrain"), name.removeprefix("flextrain."))
