"""The meaning of attributes: the string below an assignment in a class, which only the source has."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from .docstrings import joined


def attribute_meanings(kind: Any) -> dict[str, str]:
    """Meanings by name of the attributes that a class itself defines; empty without its source."""
    return _read(kind)


@functools.cache
def _read(kind: Any) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    last: str | None = None
    (definition,) = tree.body
    for node in definition.body if isinstance(definition, ast.ClassDef) else ():
        if last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last] = joined(str(node.value.value))
        last = _assigned(node)
    return found


def _assigned(node: ast.stmt) -> str | None:
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else None
