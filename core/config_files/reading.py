"""Read a configuration file with the files that it inherits from."""

from __future__ import annotations

import ast
import datetime
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, one_of, suggest
from .config_dict import ConfigDict, Key, Origins, ValueOrigin, merge, path_text, with_attributes, without_delete
from .python_files import (
    BASE,
    Filled,
    LazyFile,
    ReadError,
    base_paths,
    bases_of,
    execute,
    is_lazy,
    module_path,
    package_folder,
    parse,
)

# The lines of the values in Python source and in JSON, read off the syntax tree without executing anything.


class SourceLines:
    """Finds where the names of a module get their values.

    Args:
        file: path for the origins.
        names: what is known of names before the first statement, such as ``_base_``.
        references: path in ``_base_`` of strings that stand for its values.
        imported: what each statement with ``read_base()`` imports, by the module as it is written: ``..models.resnet``.
    """

    def __init__(
        self,
        file: str,
        names: Mapping[Key, Origins] | None = None,
        references: Mapping[str, str] | None = None,
        imported: Mapping[str, Origins] | None = None,
    ) -> None:
        self._file, self._references, self._imported = file, references or {}, imported or {}
        self.origins = Origins(ValueOrigin(file), dict(names or {}))

    def read(self, statements: Iterable[ast.stmt]) -> Origins:
        """The origins of all names after these statements."""
        for statement in statements:
            self._read(statement)
        return self.origins

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, self._value(node.value))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self._value(node.value))
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, self._here(node))
        elif isinstance(node, ast.ImportFrom):
            self._import(node)
        elif isinstance(node, ast.Expr):
            self._call(node.value)
        elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            if isinstance(node, ast.For):
                self._assign(node.target, self._here(node))
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, ()):
                    self.read(inner.body) if isinstance(inner, ast.ExceptHandler) else self._read(inner)

    def _here(self, node: ast.AST) -> Origins:
        return Origins(ValueOrigin(self._file, getattr(node, "lineno", None)))

    def _assign(self, target: ast.expr, origins: Origins) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._assign(each, self._here(target))
        elif path := _path(target):
            self.origins.put(path, origins)

    def _import(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        found = self._imported.get(module)
        if found is None:
            return
        for alias in node.names:
            if alias.name == "*":
                self.origins.below.update(found.copy().below)
            elif alias.name in found.below:
                self.origins.below[alias.asname or alias.name] = found.below[alias.name].copy()

    def _call(self, node: ast.expr) -> None:
        """Read ``name.update(...)`` and ``name.merge(...)``, which new-style files call."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return
        path = _path(node.func.value)
        if path and node.func.attr in ("update", "merge", "setdefault"):
            given = self._keywords(node)
            for argument in node.args:
                given.below.update(self._value(argument).below)
            for key, value in given.below.items():
                self._overlay([*path, key], value)

    def _overlay(self, path: list[Key], origins: Origins) -> None:
        """Put what is known of a dict above what was known, key by key."""
        if origins.below:
            for key, value in origins.below.items():
                self._overlay([*path, key], value)
        else:
            self.origins.put(path, origins)

    def _value(self, node: ast.expr) -> Origins:
        found = self._here(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in self._references:
            found.below = self._known(["_base_", *self._references[node.value].split(".")])
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    found.below.update(self._value(value).below)
                elif isinstance(key, ast.Constant) and isinstance(key.value, str | int):
                    found.below[key.value] = self._value(value)
                    found.below[key.value].origin = ValueOrigin(self._file, key.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            found.below = self._keywords(node).below
        elif isinstance(node, (ast.List, ast.Tuple)):
            for position, item in enumerate(node.elts):
                if isinstance(item, ast.Starred):
                    break
                found.below[position] = self._value(item)
        elif path := _path(node):
            found.below = self._known(path)
        return found

    def _keywords(self, node: ast.Call) -> Origins:
        found = self._here(node)
        for keyword in node.keywords:
            if keyword.arg is None:
                found.below.update(self._value(keyword.value).below)
            else:
                found.below[keyword.arg] = self._value(keyword.value)
                found.below[keyword.arg].origin = ValueOrigin(self._file, keyword.lineno)
        return found

    def _known(self, path: Iterable[Key]) -> dict[Key, Origins]:
        return self.origins.under(path).copy().below


def _path(node: ast.expr) -> list[Key]:
    """The path of ``a``, ``a.b`` or ``a["b"][0]``; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        above = _path(node.value)
        return [*above, node.attr] if above else []
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        above, key = _path(node.value), node.slice.value
        return [*above, key] if above and isinstance(key, str | int) else []
    return []


def lines_of_json(text: str, file: str) -> tuple[Origins, tuple[str, int] | None]:
    """The lines of the values in JSON, and the first key that stands twice in an object, with its line.

    JSON is read as a Python expression, whose syntax tree has the lines; the values come from elsewhere.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JSON has escapes that Python has not
            node = ast.parse(f"({text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Origins(ValueOrigin(file)), None
    return SourceLines(file)._value(node), _twice(node)


def _twice(tree: ast.AST) -> tuple[str, int] | None:
    for node in ast.walk(tree):
        seen: set[object] = set()
        for key in node.keys if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant):
                if key.value in seen:
                    return str(key.value), key.lineno
                seen.add(key.value)
    return None


# Read YAML, JSON and TOML: data only, with the line of each value. A key that is given twice raises.


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


SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml")
_DATA = {".json": read_json, ".toml": read_toml, ".yaml": read_yaml, ".yml": read_yaml}

_DEPRECATED = "_deprecation_"


@dataclass
class Contents:
    """What a file says, with all that it inherits.

    Attributes:
        values: by name.
        origins: of each value.
        texts: the texts of all files, bases first.
        environment: the environment variables that were used.
        imported: names of ``values`` that are imports; for files that import this one.
        is_code: whether the file is executed.
        is_pure_python: whether it inherits by ``with read_base()``, or imports packages.
    """

    values: ConfigDict
    origins: Origins
    texts: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    is_code: bool = False
    is_pure_python: bool = False


@dataclass
class FileReader:
    """Reads files; one for each file with its bases.

    Attributes:
        file_names, environment: whether these templates are filled in.
        lazy: how Python files are read; None: as their contents say.
        above: the files that inherit from the one that is read.
    """

    file_names: bool = True
    environment: bool = True
    lazy: bool | None = None
    above: tuple[Path, ...] = ()

    def read(self, path: str | Path, origin: ValueOrigin | None = None) -> Contents:
        """Read a file; ``origin`` is where it was named.

        Raises:
            ConfigError: the file, or one that it inherits from, is missing or wrong.
        """
        try:
            return self._read(Path(path).expanduser().absolute(), f"{origin}: " if origin else "")
        except ReadError:
            raise
        except ConfigError as error:
            raise ReadError(str(error)) from error.__cause__

    def _read(self, path: Path, where: str) -> Contents:
        if path.suffix not in SUFFIXES:
            given = path.suffix or path.name
            named = [each.name for each in map(path.with_suffix, SUFFIXES) if not path.suffix and each.is_file()]
            hint = suggest(path.suffix, SUFFIXES) if path.suffix else suggest(path.name, named)
            raise ConfigError(f'{where}"{given}" is no kind of configuration file, give {one_of(SUFFIXES)}{hint}')
        if not path.is_file():
            kind = "is a folder" if path.is_dir() else "does not exist"
            siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ConfigError(f"{where}{ValueOrigin(str(path))} {kind}{suggest(path.name, siblings)}")
        resolved = path.resolve()
        if resolved in self.above:
            circle = [*self.above[self.above.index(resolved) :], resolved]
            raise ConfigError(f"{where}{BASE}: goes in a circle, {' -> '.join(each.name for each in circle)}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}{ValueOrigin(str(path))}: cannot be read, {error}") from None
        inner = FileReader(self.file_names, self.environment, self.lazy, (*self.above, resolved))
        if path.suffix == ".py" and self.lazy is not False:
            tree = _parsed_or_none(text, path)
            lazy = self.lazy or (tree is not None and is_lazy(tree))
            if lazy:
                return inner._lazy(parse(text, path), path, text)
        return inner._inheriting(path, text)

    def _inheriting(self, path: Path, text: str) -> Contents:
        """Read a file that inherits with ``_base_``."""
        filled = Filled.of(text, path, file_names=self.file_names, environment=self.environment)
        tree = values = None
        origins = Origins(ValueOrigin(str(path)))
        if path.suffix == ".py":
            tree = parse(filled.text, path)
            names, origin = bases_of(tree, path)
        else:
            values, origins = _DATA[path.suffix](filled.text, str(path))
            origin = origins.at([BASE]) or ValueOrigin(str(path))
            names = base_paths(values.pop(BASE, []), origin)
            origins.below.pop(BASE, None)
        base = self._bases(names, path, origin, is_data=tree is None)
        if tree is not None:
            values = execute(tree, path, base.values)
            lines = SourceLines(str(path), {BASE: base.origins}, filled.references)
            origins = lines.read(tree.body)
            origins.below.pop(BASE, None)
        assert values is not None
        for name in values:
            if not isinstance(name, str):
                raise ConfigError(f"{origins.at([name])}: {name!r} is no name, give a string")
        if _DEPRECATED in values:
            _say_deprecated(values.pop(_DEPRECATED), path)
        resolved = filled.resolved(dict(values), base.values, origins)
        merged, merged_origins = merge(with_attributes(resolved), base.values, origins, base.origins)
        return Contents(
            merged,
            merged_origins,
            [*base.texts, f"{path}\n{text}"],
            {**base.environment, **filled.environment},
            is_code=tree is not None,
        )

    def _bases(self, names: list[str], path: Path, origin: ValueOrigin, *, is_data: bool) -> Contents:
        """All bases of a file, side by side."""
        found = Contents(ConfigDict(), Origins())
        for name in names:
            where, scope = _base_path(name, path, origin)
            if is_data and where.suffix == ".py":
                raise ConfigError(
                    f"{origin}: {BASE}: {name} is Python, which {path.suffix} files do not execute; "
                    "write this file in Python, or the base as data"
                )
            one = self.read(where, origin)
            if one.is_pure_python:
                raise ConfigError(
                    f"{origin}: {BASE}: {name} is a file of pure Python, which is inherited by `with read_base():`"
                )
            for key in one.values:
                if key in found.values:
                    both = f"{found.origins.at([key])} and {one.origins.at([key])}"
                    raise ConfigError(f"{origin}: {BASE}: two bases give {key}, {both}; leave one out")
            values = _scoped(one.values, scope) if scope else one.values
            for key in values:
                dict.__setitem__(found.values, key, dict.__getitem__(values, key))
            found.origins.below.update(one.origins.below)
            found.texts += one.texts
            found.environment.update(one.environment)
        return found

    def _lazy(self, tree: ast.Module, path: Path, text: str) -> Contents:
        """Read a file of pure Python."""
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(each, ast.Name) and each.id == BASE for each in node.targets
            ):
                raise ConfigError(
                    f"{ValueOrigin(str(path), node.lineno)}: {BASE} has no meaning in a file of pure Python, "
                    "inherit by `with read_base():`"
                )
        texts: list[str] = []
        read: dict[Path, Contents] = {}
        imported: set[str] = set()

        def base(where: Path, origin: ValueOrigin) -> Mapping[str, Any]:
            if where not in read:
                read[where] = one = FileReader(self.file_names, self.environment, True, self.above).read(where, origin)
                texts.extend(one.texts)
                imported.update(one.imported)
            return read[where].values

        file = LazyFile(path, base)
        values = file.execute(tree)
        modules = {module: read[where].origins for module, where in _base_modules(tree, path) if where in read}
        origins = SourceLines(str(path), imported=modules).read(tree.body)
        contents = Contents(ConfigDict(), origins, [*texts, f"{path}\n{text}"], is_code=True, is_pure_python=True)
        for name, value in values.items():
            contents.values[name] = without_delete(value)
        contents.imported = (file.imported | imported) & values.keys()
        return contents


def _say_deprecated(told: Any, path: Path) -> None:
    said = f"{ValueOrigin(str(path))} is deprecated"
    if isinstance(told, dict):
        said += f", use {told['expected']}" if "expected" in told else ""
        said += f", see {told['reference']}" if "reference" in told else ""
    warnings.warn(said, DeprecationWarning, stacklevel=2)


def _parsed_or_none(text: str, path: Path) -> ast.Module | None:
    """The syntax tree; None for a file that is Python only after its templates were filled in."""
    try:
        return ast.parse(text, str(path))
    except (SyntaxError, ValueError):
        return None


def _base_modules(tree: ast.Module, path: Path) -> list[tuple[str, Path]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for inner in node.body:
                if isinstance(inner, ast.ImportFrom):
                    shown = "." * inner.level + (inner.module or "")
                    found.append((shown, module_path(inner.module or "", inner.level, path)))
    return found


def _base_path(name: str, path: Path, origin: ValueOrigin) -> tuple[Path, str]:
    """The file that a base's path names, and the scope of the package that it is in: ``mmdet::folder/file.py``."""
    package, colons, inside = name.partition("::")
    if not colons:
        return path.parent / Path(name).expanduser(), ""
    try:
        return package_folder(package) / ".mim" / "configs" / inside, package
    except ConfigError as error:
        raise ConfigError(f"{origin}: {BASE}: {name}: {error}") from None


def _scoped(values: ConfigDict, scope: str) -> ConfigDict:
    """``values`` with ``_scope_`` in the outermost dicts that have a type."""

    def scoped(value: Any) -> Any:
        if isinstance(value, ConfigDict):
            if "type" in value:
                return ConfigDict({**dict(dict.items(value)), "_scope_": value.get("_scope_") or scope})
            return ConfigDict({key: scoped(item) for key, item in dict.items(value)})
        return type(value)(scoped(item) for item in value) if type(value) in (list, tuple) else value

    return ConfigDict({key: scoped(value) for key, value in dict.items(values)})
