"""Read a configuration file with the files that it inherits from."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, one_of, suggest
from .config_dict import ConfigDict, with_attributes, without_delete
from .data_files import read_json, read_toml, read_yaml
from .merging import merge
from .origins import Origins, ValueOrigin
from .python_files import (
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
from .source_lines import SourceLines
from .templates import BASE, Filled

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
            hint = suggest(path.suffix, SUFFIXES) if path.suffix else ""
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
