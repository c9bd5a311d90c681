"""Types and defaults as text for people: ``"a" | "b"``, ``int, 1 or more``, ``dict | None``."""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic

_WORDS = {
    Any: "any",
    type(None): "None",
    collections.abc.Mapping: "dict",
    collections.abc.MutableMapping: "dict",
    collections.abc.Sequence: "list",
    collections.abc.Iterable: "iterable",
    collections.abc.Collection: "list",
    collections.abc.Callable: "function",
}
_BOUNDS = {"ge": "{} or more", "gt": "above {}", "le": "{} or less", "lt": "below {}"}


def type_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type as text; ``metadata`` is pydantic's, with bounds."""
    bounds = list(_bounds(metadata))
    if typing.get_origin(annotation) is Annotated:
        bounds += _bounds(typing.get_args(annotation)[1:])
        annotation = typing.get_args(annotation)[0]
    return ", ".join([_text(annotation), *bounds])


def default_text(value: Any) -> str:
    """A default as Python writes it; functions and classes by name, a configuration as ``dict(...)``."""
    if isinstance(value, pydantic.BaseModel):
        given = {key: getattr(value, key) for key in sorted(value.model_fields_set)}
        return f"dict({', '.join(f'{key}={default_text(item)}' for key, item in given.items())})"
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if isinstance(value, str):
        return f'"{value}"' if '"' not in value else repr(value)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(default_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1_000_000_000:
        return f"{value:,}".replace(",", "_")
    text = f"{value:.6g}" if isinstance(value, float) and len(repr(value)) > 8 else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def hints_of(function: Any) -> dict[str, Any]:
    """The annotations of a function, resolved where their names can be found, else as text."""
    found: dict[str, Any] = {}
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= typing.get_type_hints(alone, scope, include_extras=True)
        except Exception:  # evaluating an annotation may raise anything: names for type checkers only, foreign code
            found[name] = annotation
    return found


def _bounds(metadata: Iterable[Any]) -> Iterable[str]:
    for each in metadata:
        inner = getattr(each, "metadata", None)  # of pydantic's FieldInfo
        if inner:
            yield from _bounds(inner)
        for name, words in _BOUNDS.items():
            if (value := getattr(each, name, None)) is not None:
                yield words.format(value)


def _text(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union(inner)
    if origin is Literal:
        return " | ".join(map(default_text, inner))
    if origin is Annotated:
        return type_text(annotation)
    if origin in _WORDS or annotation in _WORDS:
        return _WORDS[origin if origin in _WORDS else annotation] if origin is not None else _WORDS[annotation]
    if origin is type:
        return "class"
    if origin in (list, tuple, set) and inner:
        parts = [_text(each) for each in inner if each is not Ellipsis]
        return f"{origin.__name__}[{', '.join(parts)}]"
    if origin is dict or annotation is dict:
        return "dict"
    if inspect.isclass(annotation):
        is_model = issubclass(annotation, pydantic.BaseModel)
        return "dict" if is_model else annotation.__name__
    return str(annotation).replace("typing.", "")


def _union(inner: tuple[Any, ...]) -> str:
    """The members once each, None last; ``float | int`` is ``float``."""
    texts = [_text(each) for each in inner if each is not type(None)]
    if "float" in texts and "int" in texts:
        texts.remove("int")
    flat = list(dict.fromkeys(texts))
    return " | ".join([*flat, *(["None"] if type(None) in inner else [])])


def signature_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function; empty if it has no signature."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
