"""Read YAML, JSON and TOML: data only, with the line of each value. A key that is given twice raises."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .merging import path_text
from .origins import Key, Origins, ValueOrigin
from .source_lines import lines_of_json

Read = tuple[dict[str, Any], Origins]


def read_json(text: str, file: str) -> Read:
    """Read JSON."""
    origins, twice = lines_of_json(text, file)

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            name, line = twice or (next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i])), None)
            raise ConfigError(f'{ValueOrigin(file, line)}: the key "{name}" is given twice')
        return found

    try:
        value = json.loads(text, object_pairs_hook=checked)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{ValueOrigin(file, error.lineno)}: this is no JSON, {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{ValueOrigin(file)}: is nested too deeply") from None
    return _dict(value, file, "JSON"), origins


def read_toml(text: str, file: str) -> Read:
    """Read TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = re.search(r"\(at line (\d+), column \d+\)", message)
        line = int(found[1]) if found else None
        raise ConfigError(f"{ValueOrigin(file, line)}: this is no TOML, {message.partition(' (at ')[0]}") from None
    origins = _lines_of_toml(text, file, tomllib.loads)
    _refuse_times(value, origins, ())
    return value, origins


def _lines_of_toml(text: str, file: str, loads: Callable[[str], dict[str, Any]]) -> Origins:
    """The lines of all keys: each statement of the file is read alone, which gives its path."""
    origins, header, pending, start = Origins(ValueOrigin(file)), (), "", 1
    tables: dict[tuple[Key, ...], int] = {}
    table: tuple[Key, ...] = header
    for line, content in enumerate(text.splitlines(), 1):
        start = start if pending else line
        pending += content + "\n"
        try:
            statement = loads(pending)
        except ValueError:  # it goes on in the next line
            continue
        pending = ""
        if not statement:
            continue
        names = _single_path(statement)
        if content.lstrip().startswith("["):
            is_item = content.lstrip().startswith("[[")
            table = _counted(names[:-1] if is_item else names, tables)
            if is_item:
                tables[tuple(table)] = tables.get(tuple(table), -1) + 1
                table = (*table, tables[tuple(table)])
            origins.put(table, Origins(ValueOrigin(file, start)))
        else:
            origins.put((*table, *names), Origins(ValueOrigin(file, start)))
    return origins


def _single_path(statement: Any) -> tuple[Key, ...]:
    """The keys of a dict that has one key on each level."""
    path: tuple[Key, ...] = ()
    while isinstance(statement, dict) and len(statement) == 1:
        ((key, statement),) = statement.items()
        path = (*path, key)
    return (*path, 0) if isinstance(statement, list) and statement == [{}] else path


def _counted(names: tuple[Key, ...], tables: Mapping[tuple[Key, ...], int]) -> tuple[Key, ...]:
    """The path of a table, with the index of the newest item where an array of tables is on the way."""
    path: tuple[Key, ...] = ()
    for position, name in enumerate(names):
        path = (*path, name)
        if path in tables and position < len(names) - 1:
            path = (*path, tables[path])
    return path


def _refuse_times(value: Any, origins: Origins, path: tuple[Key, ...]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_times(item, origins, (*path, key))
    if isinstance(value, datetime.date | datetime.time):
        raise ConfigError(f'{origins.at(path)}: {path_text(path)}: is a date or time, write it in quotes, "{value}"')


def read_yaml(text: str, file: str) -> Read:
    """Read YAML, with the numbers of YAML 1.2: 1e-3 is a number, 12:30 and 2024-01-01 are strings."""
    import yaml

    loader = _yaml_loader()(text)
    try:
        node = loader.get_single_node()
        origins = Origins(ValueOrigin(file)) if node is None else _lines_of_yaml(node, file, set())
        value = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        line = None if mark is None else mark.line + 1
        tabs = ", indent with spaces" if "'\\t'" in problem else ""
        raise ConfigError(f"{ValueOrigin(file, line)}: this is no YAML, {problem}{tabs}") from None
    except RecursionError:
        raise ConfigError(f"{ValueOrigin(file)}: is nested too deeply") from None
    finally:
        loader.dispose()
    return _dict(value, file, "YAML"), origins


def _lines_of_yaml(node: Any, file: str, above: set[int]) -> Origins:
    import yaml

    origins = Origins(ValueOrigin(file, node.start_mark.line + 1))
    if id(node) in above:
        raise ConfigError(f"{origins.origin}: an alias stands inside of what it repeats")
    above = {*above, id(node)}
    if isinstance(node, yaml.SequenceNode):
        origins.below = {i: _lines_of_yaml(item, file, above) for i, item in enumerate(node.value)}
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = ValueOrigin(file, key.start_mark.line + 1)
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{line}: a key must be a string or a number")
            found = _lines_of_yaml(value, file, above)
            if key.tag.endswith(":merge"):  # <<: *other
                for merged in found.below.values() if isinstance(value, yaml.SequenceNode) else [found]:
                    origins.below = {**merged.below, **origins.below}
                continue
            if not key.tag.endswith((":str", ":int")):
                raise ConfigError(f"{line}: the key {key.value or 'null'} is no string, write it in quotes")
            name: Key = int(key.value) if key.tag.endswith(":int") and key.value.isdecimal() else key.value
            if any(other is not key and other.value == key.value and other.tag == key.tag for other, _ in node.value):
                second = [other for other, _ in node.value if other.value == key.value][1]
                raise ConfigError(
                    f'{ValueOrigin(file, second.start_mark.line + 1)}: the key "{key.value}" is given twice'
                )
            found.origin = line
            origins.below[name] = found
    return origins


_loader: Any = None


def _yaml_loader() -> Any:
    """PyYAML's loader of plain data, with the numbers of YAML 1.2."""
    global _loader
    if _loader is not None:
        return _loader
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    numbers = ("int", "float", "timestamp")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(numbers)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    whole = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
    real = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^(?:{whole})$"), list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{real})$"), list("-+0123456789."))
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _whole(node.value))
    _loader = Loader
    return Loader


def _whole(text: str) -> int:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _dict(value: Any, file: str, language: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{ValueOrigin(file)}: the {language} is a {type(value).__name__}, give names with values")
    return value
