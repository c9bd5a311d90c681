"""The lines of the values in Python source and in JSON, read off the syntax tree without executing anything."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Mapping

from .origins import Key, Origins, ValueOrigin


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
