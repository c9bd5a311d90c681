"""Code that does not run here: what can be checked without running it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Iterator

import yaml

from flextrain import FlexibleRunner
from flextrain.core.base import registry
from flextrain.core.base.config import Config
from flextrain.core.base.registry import Registry
from flextrain.optim.schedulers.from_config import NAMES

from .pages import Block
from .shell import lines, wrong

REGISTRIES = [value for value in vars(registry).values() if isinstance(value, Registry)]


def problems(block: Block, defined: set[str]) -> Iterator[str]:
    """What is wrong with a block, with page and line. ``defined``: names of classes and functions on the page."""
    if block.language == "sh":
        for line in lines(block.code):
            if said := wrong(line):
                yield f"{block.page}:{block.line + line.number}: {line.text}: {said}"
    elif block.language == "python":
        try:
            tree = ast.parse("\n" * (block.line - 1) + block.code)
        except SyntaxError as error:
            yield f"{block.page}:{error.lineno}: {error.msg}"
            return
        for node in ast.walk(tree):
            for said in _wrong(node, defined):
                yield f"{block.page}:{getattr(node, 'lineno', block.line)}: {said}"
    elif said := _wrong_data(block):
        yield f"{block.where}: {said}"


def names(block: Block) -> set[str]:
    """The classes and functions that Python code defines; none if it is no Python."""
    try:
        tree = ast.parse(block.code)
    except SyntaxError:
        return set()
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def _wrong(node: ast.AST, defined: set[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flextrain" and not node.level:
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if alias.name != "*" and not hasattr(module, alias.name):
                yield f"{node.module} has no {alias.name}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if node.func.id == "FlexibleRunner":
            known = inspect.signature(FlexibleRunner).parameters
            yield from (f"FlexibleRunner has no {key}" for key in keywords.keys() - known.keys())
        elif node.func.id == "dict" and isinstance(kind := keywords.pop("type", None), ast.Constant):
            yield from _wrong_type(str(kind.value), set(keywords), defined)


def _wrong_type(name: str, keywords: set[str], defined: set[str]) -> Iterator[str]:
    if name in defined or ":" in name or "." in name:
        return
    if name in NAMES:
        yield from (f"{name} has no {key}" for key in keywords - inspect.signature(NAMES[name]).parameters.keys())
        return
    homes = [found for found in REGISTRIES if name in found]
    if not homes:
        yield f'no registry has "{name}"'
        return
    for home in homes:
        try:
            kind = home.get(name)
        except Exception as error:  # of an optional package: only its name is known here
            if "pip install" in str(error) or "install" in str(error):
                continue
            raise
        options = getattr(kind, "Config", None)
        if inspect.isclass(options) and issubclass(options, Config):
            known = {alias for key, field in options.model_fields.items() for alias in (key, field.alias)}
            if options.model_config.get("extra") == "allow":
                return
        elif inspect.isclass(kind) or inspect.isfunction(kind):
            parameters = inspect.signature(kind).parameters
            if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                return
            known = set(parameters)
        else:
            return
        if keywords <= known:
            return
        yield from (f"{name} has no {key}" for key in sorted(keywords - known))


def _wrong_data(block: Block) -> str:
    try:
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.code))
        elif block.language == "toml":
            _read_toml(block.code)
    except ValueError as error:
        return str(error)
    except yaml.YAMLError as error:
        return str(error)
    return ""


def _read_toml(text: str) -> None:
    try:
        import tomllib
    except ModuleNotFoundError:  # before Python 3.11
        import tomli as tomllib
    tomllib.loads(text)
