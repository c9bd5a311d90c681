"""Config: the contents of a configuration file, with attributes, references, options, and where each value comes from."""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib
import inspect
import json
import keyword
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from ..base.errors import ConfigError, one_of
from .config_dict import ConfigDict, Key, LazyImport, Origins, ValueOrigin, builtin, merge, nested, path_text
from .python_files import TEMPLATE
from .reading import SUFFIXES, FileReader

# Configurations as text: a Python file, YAML, JSON.


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


logger = logging.getLogger("flextrain")
_RESERVED = ("filename", "text", "pretty_text", "env_variables")
_WRITERS = {".py": as_python, ".json": as_json, ".yaml": as_yaml, ".yml": as_yaml}


class Config:
    """A configuration: a mapping whose keys are attributes too, at every level.

    ``Config.fromfile`` reads one with all that it inherits. MMEngine's files of both styles are read as MMEngine reads
    them, without MMEngine; docs/configuration.md says what differs.

    Args:
        cfg_dict: names with values; default: none.
        cfg_text: the text that it was read from.
        filename: the file that it was read from.
        env_variables: the environment variables that it used, by name.
        format_python_code: for MMEngine's callers; the text is always formatted.

    Raises:
        ConfigError: it is no dict, or a key is the name of one of the properties.
    """

    def __init__(
        self,
        cfg_dict: Mapping[str, Any] | None = None,
        cfg_text: str | None = None,
        filename: str | Path | None = None,
        env_variables: Mapping[str, str] | None = None,
        format_python_code: bool = True,
    ) -> None:
        if cfg_dict is not None and not isinstance(cfg_dict, Mapping):
            raise ConfigError(f"Config: {cfg_dict!r} is not allowed, give a dict")
        for key in cfg_dict or ():
            if not isinstance(key, str):
                raise ConfigError(f"Config: the key {key!r} is no name, give a string")
            if key in _RESERVED:
                raise ConfigError(f"{key}: is a property of every Config, give it another name")
        hidden = {
            "_contents": cfg_dict if isinstance(cfg_dict, ConfigDict) else ConfigDict(cfg_dict or {}),
            "_filename": None if filename is None else str(filename),
            "_text": cfg_text or "",
            "_env_variables": dict(env_variables or {}),
            "_origins": Origins(),
            "_imports_done": False,
        }
        self.__dict__.update(hidden)

    # Making

    @classmethod
    def fromfile(
        cls,
        filename: str | Path,
        use_predefined_variables: bool = True,
        import_custom_modules: bool = True,
        use_environment_variables: bool = True,
        lazy_import: bool | None = None,
        format_python_code: bool = True,
    ) -> Config:
        """Read a file: Python, YAML, JSON or TOML, by its suffix.

        A Python file is executed. The others are data: nothing is executed, and the modules of their ``custom_imports``
        are imported when a runner is made.

        Args:
            filename: the file.
            use_predefined_variables: whether ``{{ fileBasename }}`` and its kin are filled in.
            import_custom_modules: whether the modules of ``custom_imports`` are imported, for Python files.
            use_environment_variables: whether ``{{ $NAME:default }}`` is filled in.
            lazy_import: whether a Python file is of MMEngine's new style; None: its contents tell.
            format_python_code: for MMEngine's callers; the text is always formatted.

        Raises:
            ConfigError: the file, or one that it inherits from, is missing or wrong; with file and line.
        """
        path = Path(filename)
        found = FileReader(use_predefined_variables, use_environment_variables, lazy_import).read(path)
        values = ConfigDict()
        for name, value in dict.items(found.values):
            if name not in found.imported:
                dict.__setitem__(values, name, value)
        if taken := next((key for key in values if key in _RESERVED), None):
            where = found.origins.at([taken])
            raise ConfigError(f"{where}: {taken}: is a property of every Config, give it another name")
        config = cls(values, "\n".join(found.texts), path, found.environment)
        config.__dict__["_origins"] = found.origins
        if import_custom_modules and found.is_code:
            config.import_custom_modules()
        return config

    @classmethod
    def fromstring(cls, cfg_str: str, file_format: str) -> Config:
        """Read a text as a file with the suffix ``file_format`` (such as ".py"), in a temporary folder.

        Raises:
            ConfigError: see ``fromfile``.
        """
        if file_format not in SUFFIXES:
            raise ConfigError(f'file_format: "{file_format}" is not allowed, choose {one_of(SUFFIXES)}')
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"text{file_format}"
            path.write_text(cfg_str, encoding="utf-8")
            found = cls.fromfile(path)
        found.__dict__["_filename"] = str(path)
        return found

    def merge_from_dict(
        self, options: Mapping[str, Any], allow_list_keys: bool = True, *, origins: Mapping[str, Origins] | None = None
    ) -> None:
        """Set values by dotted keys: ``{"optim_wrapper.optimizer.lr": 0.01}``.

        Args:
            options: values by key; a dict is merged into the one that is there.
            allow_list_keys: whether numbers in keys stand for items of lists: ``custom_hooks.0.interval``.
            origins: where they come from, by key.

        Raises:
            ConfigError: a key leads through a value that has no keys, or to an item that its list has not.
        """
        given, where = nested(options, origins or {})
        merged, merged_origins = merge(given, self._contents, where, self._origins, by_index=allow_list_keys)
        self.__dict__.update(_contents=merged, _origins=merged_origins)

    def import_custom_modules(self) -> None:
        """Import the modules of ``custom_imports``, unless that was done.

        Raises:
            ConfigError: one cannot be imported, or ``custom_imports`` is wrong.
        """
        given = self._contents.get("custom_imports")
        if not given or self._imports_done:
            return
        where, allowed = "custom_imports", ("imports", "allow_failed_imports")
        at = self.origin(where)
        prefix = f"{at}: " if at else ""
        if not isinstance(given, Mapping) or "imports" not in given or set(given) - set(allowed):
            raise ConfigError(
                f"{prefix}{where}: {given!r} is not allowed, give dict(imports=[...], {allowed[1]}=False)"
            )
        names = given["imports"]
        for number, name in enumerate([names] if isinstance(names, str) else names):
            key = f"{where}.imports[{number}]"
            if not isinstance(name, str):
                raise ConfigError(f"{prefix}{key}: {name!r} is not allowed, give the name of a module")
            try:
                importlib.import_module(name)
            except ImportError as error:
                said = " ".join(str(error).split())
                if not given.get("allow_failed_imports", False):
                    hint = (
                        ", put the folder that has it on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
                    )
                    raise ConfigError(f'{prefix}{key}: "{name}" cannot be imported, {said}{hint}') from error
                logger.warning('%s%s: "%s" cannot be imported, %s', prefix, key, name, said)
        self.__dict__["_imports_done"] = True

    # Reading

    @property
    def filename(self) -> str | None:
        """The file that it was read from."""
        return cast("str | None", self.__dict__["_filename"])

    @property
    def text(self) -> str:
        """The text that it was read from, with the names and texts of the files that it inherits from."""
        return cast(str, self.__dict__["_text"])

    @property
    def env_variables(self) -> dict[str, str]:
        """The environment variables that were filled in, by name."""
        return cast("dict[str, str]", self.__dict__["_env_variables"])

    @property
    def pretty_text(self) -> str:
        """The configuration as a Python file that reads as the same configuration.

        Raises:
            ConfigError: it holds an object that no text stands for.
        """
        return as_python(self.to_dict())

    def origin(self, *path: Key) -> ValueOrigin | None:
        """Where a value was written: ``config.origin("optim_wrapper", "optimizer", "lr")``; None: not known."""
        found = self._origins.below.get(path[0]) if path else None
        return None if found is None else found.at(path[1:])

    def to_dict(self, keep_imported: bool = False) -> dict[str, Any]:
        """A built-in dict of built-in dicts; what new-style files import is text: "torch.optim.SGD".

        Args:
            keep_imported: for MMEngine's callers; names that a file only imports are never in it.
        """
        return cast("ConfigDict", self.__dict__["_contents"]).to_dict()

    def imported(self) -> dict[str, Any]:
        """A built-in dict of built-in dicts, with what new-style files import.

        Raises:
            ConfigError: something cannot be imported.
        """
        return cast("dict[str, Any]", builtin(self._contents, LazyImport.resolve))

    def dump(self, file: str | Path | None = None) -> str | None:
        """Write the configuration to a file, in the language of its suffix; without a file, return it as text.

        The text is Python, or the language of the file that it was read from.

        Raises:
            ConfigError: the language cannot hold it.
        """
        suffix = Path(file or self.filename or ".py").suffix if (file or self.filename) else ".py"
        if file is None:
            return _WRITERS.get(suffix, as_python)(self.to_dict())
        if suffix not in _WRITERS:
            raise ConfigError(f'dump: "{file}" is not allowed, the name must end with {one_of(_WRITERS)}')
        Path(file).write_text(_WRITERS[suffix](self.to_dict()), encoding="utf-8")
        return None

    @staticmethod
    def diff(cfg1: str | Config, cfg2: str | Config) -> str:
        """The lines in which two configurations, or files, differ, as by ``diff -u``."""
        first, second = (
            (each if isinstance(each, Config) else Config.fromfile(each)).pretty_text.splitlines()
            for each in (cfg1, cfg2)
        )
        return "\n".join(difflib.unified_diff(first, second, lineterm=""))

    # As a mapping with attributes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_contents"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._contents[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._contents, name)

    def __getitem__(self, name: str) -> Any:
        return self._contents[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._contents[name] = value

    def __delitem__(self, name: str) -> None:
        del self._contents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __dir__(self) -> Sequence[str]:
        return [*super().__dir__(), *self._contents]

    def __repr__(self) -> str:
        return f"Config (path: {self.filename}): {dict(dict.items(self._contents))!r}"

    def __copy__(self) -> Config:
        """A copy with top-level values of its own; deeper ones are shared, deepcopy copies these too."""
        other = Config.__new__(Config)
        other.__dict__.update(self.__dict__, _contents=self._contents.copy())
        return other

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> Config:
        other = Config.__new__(Config)
        memo[id(self)] = other
        other.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return other

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


Mapping.register(Config)


@contextmanager
def read_base() -> Iterator[None]:
    """Marks the imports of other configuration files in one of pure Python: ``with read_base(): from .base import *``."""
    yield


# Errors about values of a configuration, with the file and line, or the option, that the value comes from.


@contextmanager
def located(config: Any) -> Iterator[None]:
    """Context in which a ConfigError about a key of ``config`` gets the file and line of its value in front.

    Any other error, and any other kind of configuration, is left as it is.
    """
    try:
        yield
    except ConfigError as error:
        path = error.path
        if path[:1] == ("cfg",) and isinstance(config, Config) and "cfg" not in config:
            path = path[1:]  # the runner's argument, which is the configuration itself
        origin = config.origin(*path) if isinstance(config, Config) and path else None
        if origin is None or error.origin is not None:
            raise
        error.say_where(str(origin))
        raise


# Options of the command line, ``key.in.config=value``: how values are read, and the action for argparse.


def parse_option(text: str, where: str = "cfg-options") -> Any:
    """Return the value that an option's text stands for.

    Numbers, ``True``, ``False`` (in any case) and ``None`` are what they are in Python, ``[a,b]`` and ``a,b`` are lists,
    ``(a,b)`` is a tuple, nested ones too. All else is a string; quotes around it are left out.

    Raises:
        ConfigError: brackets are not closed, or the text is a dict.
    """
    value = text.strip().strip("'\"").strip()
    if value.startswith("{"):
        raise ConfigError(f"{where}: {text} is not allowed, give keys with dots between them, a.b=1 for {{b: 1}} in a")
    brackets = {"(": ")", "[": "]"}
    if value[:1] in brackets and value.endswith(brackets[value[:1]]) and len(_split(value, where)) == 1:
        items = [parse_option(item, where) for item in _split(value[1:-1], where)]
        return tuple(items) if value.startswith("(") else items
    if "," in value:
        return [parse_option(item, where) for item in _split(value, where)]
    return _scalar(value)


def _split(text: str, where: str) -> list[str]:
    """The parts between commas that stand outside of brackets; a comma at the end adds none."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ConfigError(f"{where}: {text} has a bracket without its counterpart")
    return [*parts, text[start:]] if text[start:].strip() else parts


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), None if text == "None" else text)


def parse_options(texts: Sequence[str], flag: str = "--cfg-options") -> tuple[dict[str, Any], dict[str, Origins]]:
    """The options ``key=value`` by key, and where they come from: ``flag``.

    Raises:
        ConfigError: a text is no ``key=value``, or a key is given twice.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f'{flag}: "{text}" is not allowed, give key=value')
        if key in options:
            raise ConfigError(f"{flag} {key}: is given twice")
        options[key] = parse_option(value, f"{flag} {key}")
    return options, {key: Origins(ValueOrigin(flag)) for key in options}


class DictAction(argparse.Action):
    """Action for argparse that collects ``KEY=VALUE ...`` in a dict, as MMEngine's does; see ``parse_option``.

    Use it with ``nargs="+"``, and give the dict to ``Config.merge_from_dict``.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the options to those that were given before; a later one of the same key wins."""
        options = dict(getattr(namespace, self.dest, None) or {})
        for text in [values] if isinstance(values, str) else values or ():
            try:
                options.update(parse_options([text], option_string or self.dest)[0])
            except ConfigError as error:
                raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, options)
