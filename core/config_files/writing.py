"""Configurations as text: a Python file, YAML, JSON."""

from __future__ import annotations

import inspect
import json
import keyword
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .merging import path_text
from .origins import Key
from .templates import TEMPLATE

_WIDTH = 100


def as_python(values: Mapping[str, Any]) -> str:
    """A Python file that assigns the values; it reads as the same ones.

    Raises:
        ConfigError: a value is an object that no text stands for, or a name is no name of Python.
    """
    lines = []
    for name, value in values.items():
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise ConfigError(f"{name}: is no name of Python, so that no .py file can hold it; give another suffix")
        lines.append(f"{name} = {_python(value, (name,), 0, len(name) + 3)}\n")
    return "".join(lines)


def _python(value: Any, path: tuple[Key, ...], indent: int, before: int) -> str:
    """``value`` as an expression; in lines of ``_WIDTH`` characters, of which ``before`` are taken in the first."""
    if type(value) not in (dict, list, tuple):
        return _single(value, path)
    items, opening, closing = _items(value, path, indent + 4)
    short = f"{opening}{', '.join(items)}{',' if type(value) is tuple and len(value) == 1 else ''}{closing}"
    if "\n" not in short and before + indent + len(short) <= _WIDTH:
        return short
    margin = " " * (indent + 4)
    return opening + "\n" + "".join(f"{margin}{item},\n" for item in items) + " " * indent + closing


def _items(value: Any, path: tuple[Key, ...], indent: int) -> tuple[list[str], str, str]:
    if type(value) is not dict:
        texts = [_python(item, (*path, number), indent, 1) for number, item in enumerate(value)]
        return texts, *("[]" if type(value) is list else "()")
    if all(isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in value):
        return [f"{k}={_python(item, (*path, k), indent, len(k) + 2)}" for k, item in value.items()], "dict(", ")"
    texts = []
    for key, item in value.items():
        name = _single(key, (*path, str(key)))
        texts.append(f"{name}: {_python(item, (*path, key), indent, len(name) + 3)}")
    return texts, "{", "}"


def _single(value: Any, path: tuple[Key, ...]) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float, bytes):
        return repr(value)
    text = repr(_text(value, path))
    # Braces that would be filled in when the file is read.
    return text.replace("{{", "{\\x7b") if TEMPLATE.search(text) else text


def _text(value: Any, path: tuple[Key, ...]) -> str:
    """A string, or the text that stands for a class, a function or a path."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if (inspect.isclass(value) or inspect.isroutine(value)) and "<" not in value.__qualname__:
        return f"{value.__module__}:{value.__qualname__}"
    named = type(value).__module__, str(value)
    if named[0] == "torch" and named[1].startswith("torch."):  # torch.bfloat16
        return named[1]
    raise ConfigError(f"{path_text(path)}: {type(value).__name__} is an object, for which no text stands")


def as_json(values: Mapping[str, Any]) -> str:
    """JSON; tuples are lists in it.

    Raises:
        ConfigError: a value is an object that no text stands for, or a key is no string.
    """
    return json.dumps(_data(values, (), strings_only=True), indent=2, ensure_ascii=False) + "\n"


def as_yaml(values: Mapping[str, Any]) -> str:
    """YAML; tuples are lists in it.

    Raises:
        ConfigError: a value is an object that no text stands for.
    """
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    # Strings that are numbers for the reader, which PyYAML would write without quotes.
    Dumper.add_representer(str, _yaml_string)
    return str(yaml.dump(_data(values, ()), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def _yaml_string(dumper: Any, text: str) -> Any:
    try:
        float(text)
        style = "'"
    except ValueError:
        style = None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _data(value: Any, path: tuple[Key, ...], *, strings_only: bool = False) -> Any:
    if isinstance(value, dict):
        for key in value:
            if strings_only and not isinstance(key, str):
                raise ConfigError(f"{path_text((*path, key))}: JSON has keys that are strings, write .py or .yaml")
        return {key: _data(item, (*path, key), strings_only=strings_only) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_data(item, (*path, number), strings_only=strings_only) for number, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float):
        return value
    text = _text(value, path)
    if TEMPLATE.search(text):
        raise ConfigError(f"{path_text(path)}: {text!r} would be filled in when it is read, write .py")
    return text
