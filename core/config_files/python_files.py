"""Execute configuration files in Python: those with ``_base_ = ...``, and those with ``with read_base():``."""

from __future__ import annotations

import ast
import builtins
import copy
import os
import re
import sys
import traceback
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, FlexTrainError, suggest
from .config_dict import ConfigDict, LazyImport, Origins, ValueOrigin, at_origin, raw_items, reading

# What stands between double braces in a configuration file: the file's name, environment variables, values of bases.


BASE = "_base_"
_ENVIRONMENT = re.compile(r"""\{\{['"]?\s*\$(\w+)\s*:\s*(\S*?)\s*['"]?\}\}""")
_REFERENCE = re.compile(r"\{\{\s*" + BASE + r"\.([\w.]+)\s*\}\}")
_FILE = re.compile(r"\{\{\s*(fileDirname|fileBasename|fileBasenameNoExtension|fileExtname)\s*\}\}")
TEMPLATE = re.compile("|".join(each.pattern for each in (_ENVIRONMENT, _REFERENCE, _FILE)))
"""Any of them, as it stands in a file."""


@dataclass
class Filled:
    """The text of a file after its templates were filled in.

    Attributes:
        text: with a string of its own for each reference to a base.
        references: the dotted path in the base, by that string.
        environment: the variables that were found, by name.
    """

    text: str
    references: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    _mark: str = field(default_factory=lambda: f"_reference_{uuid.uuid4().hex}_")

    @classmethod
    def of(cls, text: str, path: Path, *, file_names: bool = True, environment: bool = True) -> Filled:
        """Fill in the templates of the file at ``path``.

        Raises:
            ConfigError: an environment variable is not set and has no default.
        """
        found = cls(text)
        if file_names:
            names = {
                "fileDirname": path.parent.as_posix(),
                "fileBasename": path.name,
                "fileBasenameNoExtension": path.stem,
                "fileExtname": path.suffix,
            }
            found.text = _FILE.sub(lambda match: names[match[1]], found.text)
        if environment:
            found.text = _ENVIRONMENT.sub(lambda match: found._variable(match, path), found.text)
        found.text = _REFERENCE.sub(found._refer, found.text)
        return found

    def _variable(self, match: re.Match[str], path: Path) -> str:
        name, default = match[1], match[2]
        if name in os.environ:
            self.environment[name] = default = os.environ[name]
        if not default:
            line = self.text.count("\n", 0, match.start()) + 1
            raise ConfigError(
                f"{ValueOrigin(str(path), line)}: the environment variable {name} is not set, "
                f"set it or give a default, {{{{${name}:default}}}}"
            )
        return default

    def _refer(self, match: re.Match[str]) -> str:
        mark = f"{self._mark}{len(self.references)}"
        self.references[mark] = match[1]
        return f'"{mark}"'

    def resolved(self, value: Any, base: Mapping[str, Any], origins: Origins) -> Any:
        """``value`` with the base's values in place of references.

        Raises:
            ConfigError: the base has no such value, or a reference stands inside a string or for a key.
        """
        if not self.references:
            return value
        if isinstance(value, str):
            if value in self.references:
                return copy.deepcopy(looked_up(self.references[value], base, origins.origin))
            if self._mark in value:
                raise ConfigError(
                    f"{at_origin(origins)}a reference {{{{ {BASE}.... }}}} stands inside a string, "
                    "it must be the whole value, without quotes"
                )
        elif isinstance(value, dict):
            if any(self._mark in str(key) for key in value):
                raise ConfigError(f"{at_origin(origins)}a reference {{{{ {BASE}.... }}}} is no key, give it as a value")
            items = {key: self.resolved(item, base, origins.under([key])) for key, item in raw_items(value)}
            return ConfigDict(items) if type(value) in (dict, ConfigDict) else value
        elif type(value) in (list, tuple):
            return type(value)(self.resolved(item, base, origins.under([i])) for i, item in enumerate(value))
        return value


def looked_up(dotted: str, base: Mapping[str, Any], origin: ValueOrigin | None) -> Any:
    """The value of the base at a dotted path.

    Raises:
        ConfigError: there is none.
    """
    found: Any = base
    done = BASE
    for name in dotted.split("."):
        if isinstance(found, list | tuple) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = dict.__getitem__(found, name)
        else:
            hint = suggest(name, found) if isinstance(found, dict) else ""
            raise ConfigError(f'{f"{origin}: " if origin else ""}{done}: has no "{name}"{hint}')
        done += f".{name}"
    return found


READ_BASE = "read_base"
_FOR_CONFIGS = ("mmengine", "flextrain")
"""Packages whose modules may offer read_base() or Config to a file; reading one imports none of them."""


def parse(text: str, path: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        ConfigError: it is no Python.
    """
    try:
        return ast.parse(text, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{ValueOrigin(str(path), line)}: this is no Python, {getattr(error, 'msg', error)}"
        ) from None


def is_lazy(tree: ast.Module) -> bool:
    """Whether a file is one of pure Python: it has ``with read_base()``, or imports what is not in Python's library.

    A file that assigns ``_base_`` is not.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _assigns(node, BASE):
            return False
        if isinstance(node, ast.With) and any(_is_read_base(item.context_expr) for item in node.items):
            return True
        if isinstance(node, ast.ImportFrom):
            ours = _package(node.module) in _FOR_CONFIGS and {alias.name for alias in node.names} <= {
                READ_BASE,
                "Config",
            }
            if node.level or not (ours or _in_library(node.module or "")):
                return True
        if isinstance(node, ast.Import) and not all(_in_library(alias.name) for alias in node.names):
            return True
    return False


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_read_base(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == READ_BASE


def _in_library(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def bases_of(tree: ast.Module, path: Path) -> tuple[list[str], ValueOrigin]:
    """What the file assigns to ``_base_``, and where.

    Raises:
        ConfigError: it is no path and no list of paths.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and _assigns(node, BASE):
            origin = ValueOrigin(str(path), node.lineno)
            try:
                value = eval(compile(ast.Expression(node.value), str(path), "eval"), {})
            except Exception as error:
                raise ConfigError(f"{origin}: {BASE}: {type(error).__name__}: {error}") from error
            return base_paths(value, origin), origin
    return [], ValueOrigin(str(path))


def base_paths(value: Any, origin: ValueOrigin | None) -> list[str]:
    """``_base_`` as a list of paths.

    Raises:
        ConfigError: it is no path and no list of paths.
    """
    paths = list(value) if isinstance(value, (list, tuple)) else [value]
    if wrong := [each for each in paths if not isinstance(each, str) or not each]:
        raise ConfigError(f"{origin}: {BASE}: {wrong[0]!r} is not allowed, give the path of a file, or a list of them")
    return paths


def execute(tree: ast.Module, path: Path, base: ConfigDict) -> dict[str, Any]:
    """The names of a file after it ran; it sees the merged bases as ``_base_``.

    Raises:
        ConfigError: the file raised.
    """
    kept = [node for node in tree.body if not (isinstance(node, ast.Assign) and _assigns(node, BASE))]
    names = _run(ast.Module(kept, tree.type_ignores), path, {BASE: base})
    return {name: value for name, value in names.items() if name != BASE and _is_value(value)}


def _is_value(value: Any) -> bool:
    return not isinstance(value, (types.FunctionType, types.ModuleType))


def _run(tree: ast.Module, path: Path, names: dict[str, Any]) -> dict[str, Any]:
    names = {"__name__": "__config__", "__file__": str(path), **names}
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    except Exception as error:
        if isinstance(error, ReadError):
            raise
        steps = [step for step in traceback.extract_tb(error.__traceback__) if step.filename == str(path)]
        line = steps[-1].lineno if steps else None
        said = str(error) if isinstance(error, FlexTrainError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{ValueOrigin(str(path), line)}: {' '.join(said.split())}") from error
    except SystemExit as error:
        raise ConfigError(f"{ValueOrigin(str(path))}: ends the program, with status {error.code}") from None
    return {name: value for name, value in names.items() if not name.startswith("__")}


class ReadError(ConfigError):
    """An error that names a file and line already."""


class LazyFile:
    """Executes a file of pure Python. What it imports is not imported, except Python's own library.

    Args:
        path: the file.
        read: reads another configuration file, all of its names with what it imports.
    """

    def __init__(self, path: Path, read: Callable[[Path, ValueOrigin], Mapping[str, Any]]) -> None:
        self._path, self._read = path, read
        self._in_bases = False
        self.imported: set[str] = set()
        """Names in the file that are imports, not values."""

    def execute(self, tree: ast.Module) -> dict[str, Any]:
        """The names of the file after it ran.

        Raises:
            ConfigError: the file raised, or imports something that it cannot.
        """
        own = {**vars(builtins), "__import__": self._import}
        with reading():
            names = _run(tree, self._path, {"__builtins__": own})
        self.imported |= {name for name, value in names.items() if isinstance(value, (LazyImport, types.ModuleType))}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and _in_library(node.module or ""):
                self.imported |= {alias.asname or alias.name for alias in node.names}
        return {name: value for name, value in names.items() if _is_value(value) or name in self.imported}

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if self._in_bases:
            return self._base(name, level)
        if level:
            raise ConfigError(
                f'"{"." * level}{name}" is imported outside of `with read_base():`, where only packages can be imported'
            )
        if _package(name) in _FOR_CONFIGS and READ_BASE in (fromlist or ()):
            self.imported.add(READ_BASE)
            found = types.SimpleNamespace(read_base=self._read_base)
            for other in set(fromlist) - {READ_BASE}:
                setattr(found, other, LazyImport(f"{name}.{other}", self._line()))
            return found
        if _in_library(name):
            return builtins.__import__(name, globals, locals, fromlist, level)
        if fromlist and "*" in fromlist:
            raise ConfigError(
                f"`from {name} import *` is not allowed outside of `with read_base():`, name what is needed"
            )
        return LazyImport(name if fromlist else name.partition(".")[0], self._line())

    @contextmanager
    def _read_base(self) -> Iterator[None]:
        self._in_bases = True
        try:
            yield
        finally:
            self._in_bases = False

    def _line(self) -> ValueOrigin:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != str(self._path):
            frame = frame.f_back
        return ValueOrigin(str(self._path), frame.f_lineno if frame else None)

    def _base(self, name: str, level: int) -> Any:
        self._in_bases = False  # while the other file is read
        try:
            names = self._read(module_path(name, level, self._path), self._line())
        finally:
            self._in_bases = True
        return _BaseModule(f"{'.' * level}{name}", names)


class _BaseModule:
    """What ``from ... import`` sees of another configuration file."""

    def __init__(self, module: str, names: Mapping[str, Any]) -> None:
        self.__dict__.update(dict.items(names) if isinstance(names, dict) else names)
        self.__all__ = list(names)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(f'{self.__module} has no "{name}"{suggest(name, self.__all__)}')


def module_path(name: str, level: int, path: Path) -> Path:
    """The file of a module that a file imports in ``with read_base()``; packages are found, not imported.

    Raises:
        ConfigError: there is none.
    """
    shown = f"{'.' * level}{name}"
    if not name:
        raise ConfigError(f"`from {shown} import ...` names no file, write from {shown}file import ...")
    if level:
        folder = path.parent.joinpath(*[".."] * (level - 1)).resolve()
        found = folder.joinpath(*name.split(".")).with_suffix(".py")
    else:
        package, *rest = name.split(".")
        found = package_folder(package).joinpath(*rest)
        found = found.parent / f"{found.name}.py"
        if not rest:
            raise ConfigError(f"{shown} is a package, name a file in it, {shown}.file")
    if not found.is_file():
        raise ConfigError(f"{shown}: there is no file {found}")
    return found


def package_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        ConfigError: it is not installed.
    """
    from importlib.util import find_spec

    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ConfigError(f'the package "{package}" is not installed')
    return Path(folders[0])
