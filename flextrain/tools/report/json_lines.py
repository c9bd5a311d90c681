"""Read the files that a run has written, as far as they are whole."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; what a killed run or a full disk has cut off is left out."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with file:
        for line in file:
            try:
                found = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none, or not a whole one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the configuration beside the scalars of a run: ``config.json``, or MMEngine's ``config.py``.

    A Python file is read, never run; a value that is no literal is shown as it is written there.
    """
    if found := object_in(folder / "config.json"):
        return found
    for path in (folder / "config.py", folder.parent / "config.py"):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        return {
            node.targets[0].id: _value(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        }
    return {}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        return {
            ast.unparse(key) if not isinstance(key, ast.Constant) else str(key.value): _value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(element) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return ast.unparse(node)


def flattened(settings: Any, prefix: str = "") -> dict[str, str]:
    """Return settings as text by dotted key."""
    if isinstance(settings, Mapping) and settings:
        items = settings.items()
    elif isinstance(settings, list) and any(isinstance(each, (Mapping, list)) for each in settings):
        items = dict(enumerate(settings)).items()
    else:
        return {} if not prefix else {prefix: json.dumps(settings, default=str, ensure_ascii=False)}
    return {
        name: text
        for key, value in items
        for name, text in flattened(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
