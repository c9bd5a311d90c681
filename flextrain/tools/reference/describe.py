"""Describe a class or function: its signature with what its docstrings, and those of its bases, say of each argument."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import is_dataclass
from typing import Any

from pydantic.fields import FieldInfo

from ...core.config import Config
from ...core.errors import FlexTrainError
from .annotations import default_text, hints_of, signature_of, type_text
from .docstrings import Docstring, read_docstring
from .entry import Argument, Entry, Method
from .fields import attribute_meanings
from .foreign import is_foreign, left_to_others, missing_meanings, said_by_others, unmarked

_HIDDEN = frozenset({"self", "cls", "where"})
"""Parameters that no user gives; ``where`` is the configuration key for messages."""
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def describe(name: str, target: Any, kind: str, group: str, filled_in: Collection[str] = ()) -> Entry:
    """The entry of a class or function.

    Args:
        name: what the user writes.
        target: the class or function.
        kind: see Entry.
        group: see Entry.
        filled_in: parameters that flextrain gives.
    """
    said = documentation(target)
    options = getattr(target, "Config", None)
    own_example = said.example or (documentation(options).example if inspect.isclass(options) else "")
    return Entry(
        name=name,
        kind=kind,
        group=group,
        home=home_of(target),
        summary=said.summary,
        text=said.text,
        arguments=tuple(arguments_of(target, filled_in)),
        returns="" if inspect.isclass(target) else said.returns,
        raises=said.raises,
        example=own_example,
        source=said.source,
    )


def home_of(target: Any) -> str:
    """The import path ``package.module:Name``."""
    original = getattr(target, "scheduler", target) if inspect.isclass(target) else target  # a scheduler of torch
    return f"{original.__module__}:{getattr(original, '__qualname__', original)}"


def documentation(target: Any) -> Docstring:
    """What the docstring says; that of a base where ``dataclass`` has written only the signature, or where there is none."""
    if is_foreign(target):
        return said_by_others(target)
    text = target.__doc__ or ""
    if inspect.isclass(target) and (not text or (is_dataclass(target) and text.startswith(f"{target.__name__}("))):
        base = target.__bases__[-1]  # mixins come first
        return documentation(base) if base is not object else Docstring()
    return read_docstring(text)


def arguments_of(target: Any, filled_in: Collection[str] = ()) -> Iterator[Argument]:
    """The arguments of a class or function with their meanings; of a configuration its keys."""
    if inspect.isclass(target) and issubclass(target, Config):
        yield from keys_of(target)
        return
    if isinstance(options := getattr(target, "Config", None), type) and issubclass(options, Config):
        yield from keys_of(options)
        return
    meanings, types = _said_of_arguments(target)
    hints = _hints(target)
    for parameter in signature_of(target).values():
        if parameter.name in _HIDDEN or parameter.name.startswith("_"):
            continue
        stars = _STARS.get(parameter.kind, "")
        if stars and parameter.name not in meanings:
            continue
        hint = hints.get(parameter.name, parameter.annotation)
        yield Argument(
            name=stars + parameter.name,
            type=types.get(parameter.name, "") if hint is parameter.empty else type_text(hint),
            default=_default(parameter) if not stars else "",
            meaning=meanings.get(parameter.name, "") or left_to_others(target),
            is_filled_in=parameter.name in filled_in,
        )


def keys_of(model: type[Config]) -> Iterator[Argument]:
    """The keys of a configuration, own ones before inherited ones."""
    fields = model.model_fields
    own = [name for name in fields if name in inspect.get_annotations(model)]
    for name in [*own, *(name for name in fields if name not in own)]:
        field = fields[name]
        if _refuses(model, name, field):
            continue
        meaning = next((found for kind in model.__mro__ if (found := attribute_meanings(kind).get(name))), "")
        yield Argument(
            name=name,
            type=type_text(field.annotation, field.metadata),
            default=None if field.is_required() else default_text(field.get_default(call_default_factory=True)),
            meaning=meaning,
        )


def _refuses(model: type[Config], name: str, field: FieldInfo) -> bool:
    """Whether a configuration refuses a key that it has inherited, whatever its value."""
    if field.is_required() or not _takes(model, {}):
        return False
    return not _takes(model, {name: field.get_default(call_default_factory=True)})


def _takes(model: type[Config], values: dict[str, Any]) -> bool:
    try:
        model.model_validate(values)
    except (ValueError, FlexTrainError):
        return False
    return True


def methods_of(kind: type[Any]) -> Iterator[Method]:
    """The public methods and properties that a class, or a base of the same library, defines, in their order."""
    package = kind.__module__.partition(".")[0]
    seen: set[str] = set()
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] != package:
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if isinstance(value, property):
                yield Method(name, "", read_docstring(value.__doc__).summary)
            elif inspect.isfunction(function):
                yield Method(name, _signature(function), _summary_of_method(kind, name))


def _summary_of_method(kind: type[Any], name: str) -> str:
    """The first sentence of a method's docstring, or of the one that it overrides."""
    for owner in kind.__mro__:
        if (own := vars(owner).get(name)) is not None and (text := getattr(own, "__doc__", None)):
            return read_docstring(text).summary
    return ""


def _signature(function: Callable[..., Any]) -> str:
    names = []
    for parameter in signature_of(function).values():
        if parameter.name in _HIDDEN:
            continue
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={default_text(parameter.default)}"
        names.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(names)})"


def _default(parameter: inspect.Parameter) -> str | None:
    return None if parameter.default is parameter.empty else default_text(parameter.default)


def _owners(target: Any) -> list[Any]:
    """The class with its bases and their constructors, or the function: whatever may say what an argument means."""
    if not inspect.isclass(target):
        return [target]
    found: list[Any] = []
    for kind in target.__mro__[:-1]:
        found.append(kind)
        if "__init__" in vars(kind):
            found.append(vars(kind)["__init__"])
    return found


def _said_of_arguments(target: Any) -> tuple[dict[str, str], dict[str, str]]:
    meanings: dict[str, str] = dict(missing_meanings(target))
    types: dict[str, str] = {}
    for owner in _owners(target):
        said = read_docstring(getattr(owner, "__doc__", None))
        own = {**(attribute_meanings(owner) if inspect.isclass(owner) else {}), **said.arguments}
        meanings.update({name: text for name, text in own.items() if name not in meanings and text})
        meanings.update({name: _looked_up(name, text, target) for name, text in meanings.items()})
        types.update({name: text for name, text in said.types.items() if name not in types and text})
    return meanings, types


def _looked_up(name: str, text: str, target: Any) -> str:
    """The meaning; that of another class where the docstring only says "see OptimWrapper"."""
    if is_foreign(target):
        return unmarked(text)
    refers = re.fullmatch(r"see (\w+)\.?", text)
    other = refers and getattr(sys.modules[target.__module__], refers[1], None)
    return _said_of_arguments(other)[0].get(name, text) if inspect.isclass(other) and other is not target else text


def _hints(target: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in reversed(_owners(target)):
        function = getattr(owner, "__init__", None) if inspect.isclass(owner) else owner
        found |= hints_of(function) if function is not None else {}
    return found
