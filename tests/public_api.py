"""The public interface as lines of text: names, parameters with their kinds and defaults, methods, options, commands.

    python -m tests.public_api          # what differs from the record
    python -m tests.public_api --write  # record it, after the decision that CONTRIBUTING.md asks for

Annotations are left out: they say the same in other words from one version of Python to the next.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pydantic

import flextrain
from flextrain.cli import COMMANDS
from flextrain.core.base import registry
from flextrain.runner.runner_names import AlsoOnClass

RECORD = Path(__file__).with_name("public_api.txt")
# Beside the names in `__all__` of these modules.
MODULES = (
    "flextrain",
    "flextrain.commands.output",
    "flextrain.data",
    "flextrain.ray",
    "flextrain.testing",
    "flextrain.runner.hooks",
    "flextrain.runner.reporting",
    "flextrain.strategies.parts",
)
INTERFACES = (
    "flextrain.core.checkpoint.TensorReader",
    "flextrain.core.checkpoint.open_weights",
    "flextrain.core.checkpoint.reading",
    "flextrain.core.checkpoint.push_to_hub",
    "flextrain.runner.run.Run",
    "flextrain.runner.run.TrainingProgress",
    "flextrain.runner.hooks.early_stopping.SearchTrial",
    "flextrain.script_facts.ScriptFacts",
    "flextrain.script_facts.script_facts",
    "flextrain.strategies.Needs",
    "flextrain.strategies.StrategyConfig",
    "flextrain.strategies.base.TrainStep",
)
"""What hooks, strategies, commands and the like receive, or have to offer."""


def lines() -> list[str]:
    """The whole interface, sorted; one line for each thing that can change alone."""
    found: set[str] = set()
    named: dict[int, str] = {}
    for module in MODULES:
        for name in import_module(module).__all__:
            named.setdefault(id(getattr(import_module(module), name)), f"{module}.{name}")
    for path in INTERFACES:
        module, _, name = path.rpartition(".")
        named.setdefault(id(getattr(import_module(module), name)), path)
    for module in MODULES:
        for name in import_module(module).__all__:
            found.update(_of(f"{module}.{name}", getattr(import_module(module), name), named))
    for path in INTERFACES:
        module, _, name = path.rpartition(".")
        found.update(_of(path, getattr(import_module(module), name), named))
    found.update(_registered())
    found.update(_options_of_the_runner())
    found.update(_commands())
    return sorted(found)


def _of(path: str, value: Any, named: dict[int, str]) -> Iterator[str]:
    if named.get(id(value), path) != path:
        yield f"{path} is {named[id(value)]}"
    elif inspect.isclass(value):
        yield from _of_class(path, value, named)
    elif callable(value) and not isinstance(value, registry.Registry):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def _of_class(path: str, kind: type, named: dict[int, str]) -> Iterator[str]:
    """The class, and what it defines; what it inherits from another public class stands there."""
    if issubclass(kind, BaseException):
        bases = ", ".join(base.__name__ for base in kind.__mro__[1:] if base not in (BaseException, object))
        yield f"{path}: an exception, {bases}"
    else:
        public = [named[id(base)] for base in kind.__mro__[1:] if id(base) in named]
        below = f", a {public[0]}" if public else ""
        has_call = not (_is_protocol(kind) or issubclass(kind, enum.Enum) or _is_pythons(kind.__init__))
        yield f"{path}{_signature(kind) if has_call else ''}{below}"
    for owner in reversed(kind.__mro__):
        inherited = owner is not kind and id(owner) in named
        if not owner.__module__.startswith("flextrain") or inherited:
            continue
        names = {*vars(owner), *getattr(owner, "__annotations__", {})}
        for name in names:
            if name == "model_fields" or (isinstance(kind, enum.EnumMeta) and name in dir(enum.Enum)):
                continue  # before pydantic 2.10, every model has its own
            if not name.startswith("_"):
                yield _member(f"{path}.{name}", inspect.getattr_static(kind, name, None))


def _is_pythons(function: Any) -> bool:
    """Whether a function is inherited from the standard library, where each version of Python may add an argument."""
    return getattr(function, "__module__", None) == "argparse"


def _member(path: str, value: Any) -> str:
    if isinstance(value, (staticmethod, classmethod)):
        return f"{path}{_signature(value.__func__)} [{type(value).__name__}]"
    if isinstance(value, property):
        return f"{path} [property{'' if value.fset is None else ', can be set'}]"
    if isinstance(value, AlsoOnClass):
        return f"{path}{_signature(value._function)} [also on the class]"
    if inspect.isfunction(value):
        return f"{path}{_signature(value)}"
    if inspect.isclass(value):
        return f"{path} [class]"
    return f"{path} [attribute]"


def _signature(function: Any) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a class in C
        return "(...)"
    text, kinds = [], [parameter.kind for parameter in parameters]
    for number, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.KEYWORD_ONLY not in kinds[:number]:
            text += [] if parameter.VAR_POSITIONAL in kinds else ["*"]
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        text.append(f"{stars}{parameter.name}{default}")
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.POSITIONAL_ONLY not in kinds[number + 1 :]:
            text.append("/")
    return f"({', '.join(text)})"


def _default(value: Any) -> str:
    if isinstance(value, (type(None), bool, int, float, str, bytes)) and not isinstance(value, enum.Enum):
        return repr(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        inner = [_default(each) for each in value]
        return f"{type(value).__name__}({', '.join(inner if isinstance(value, (tuple, list)) else sorted(inner))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_default(key)}: {_default(each)}' for key, each in value.items())}}}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return str(getattr(value, "__qualname__", f"<{type(value).__name__}>"))


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _registered() -> Iterator[str]:
    """What a configuration names as ``type``, and its arguments; what comes from torch and other packages is theirs."""
    for registry_name, table in vars(registry).items():
        if not isinstance(table, registry.Registry):
            continue
        for name, factory in table.module_dict.items():
            if str(getattr(factory, "__module__", "")).startswith("flextrain."):
                yield f'{registry_name} "{name}"{_signature(factory)}'
                if table is registry.STRATEGIES and (options := getattr(factory, "Config", None)) is not None:
                    yield from _options(f'{registry_name} "{name}"', options)
        for short, meant in table.short_names().items():
            yield f'{registry_name} "{short}" is {meant}'


def _options_of_the_runner() -> Iterator[str]:
    from flextrain.runner.options import FixedOptions

    yield from _options("FlexibleRunner", FixedOptions)


def _options(path: str, model: type[pydantic.BaseModel]) -> Iterator[str]:
    """The keys of a dict that a model checks, and of the dicts in it."""
    for name, field in model.model_fields.items():
        own = field.alias or name
        default = " (required)" if field.is_required() else f"={_default_of(field)}"
        yield f"{path}[{own!r}]{default}"
        for inner in _models_in(field.annotation):
            yield from _options(f"{path}[{own!r}]", inner)


def _default_of(field: Any) -> str:
    if field.default_factory is not None:
        return "<made anew>"
    return "<options>" if isinstance(field.default, pydantic.BaseModel) else _default(field.default)


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    is_generic = hasattr(annotation, "__origin__")  # Python 3.10 takes list[int] for a class
    if inspect.isclass(annotation) and not is_generic and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    else:
        for part in getattr(annotation, "__args__", ()):
            yield from _models_in(part)


def _commands() -> Iterator[str]:
    parser = argparse.ArgumentParser(prog="flextrain")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        command.add(commands)
    yield from _of_parser(parser)


def _of_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _of_parser(each)
        elif not isinstance(action, argparse._HelpAction):
            name = ", ".join(action.option_strings) or action.metavar or action.dest
            yield f"$ {parser.prog} {name if isinstance(name, str) else ' '.join(name)}"


def main() -> int:
    """Show what differs from the record, or record it."""
    new = lines()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text("\n".join(new) + "\n")
        return 0
    old = RECORD.read_text().splitlines()
    print(*(f"- {line}" for line in old if line not in set(new)), sep="\n")
    print(*(f"+ {line}" for line in new if line not in set(old)), sep="\n")
    return int(old != new)


if __name__ == "__main__":
    assert flextrain.__all__
    sys.exit(main())
