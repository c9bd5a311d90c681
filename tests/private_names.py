"""Finds what a source uses of torch though its name is private."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, made once for all that look at it."""
    return ast.parse(source)


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, found once: to walk takes longer than most of what is looked for."""
    return tuple(ast.walk(tree))


def private_names_of_torch(source: str, inherited: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Line and name of each: imported, reached through a module, overridden, or an attribute of an object of torch's.

    What an object is, the source does not say; every attribute counts that classes of torch have, but for those that classes
    of the source define, and for those of ``self`` in ``inherited``.
    """
    tree = parsed(source)
    known = _known_names(tree)
    own = own_attributes(source)
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names if _is_private(name))
        elif isinstance(node, ast.Attribute):
            if not _is_hidden(node.attr):
                continue
            name = _resolved(node, known)
            of_self = ast.unparse(node.value) in ("self", "cls", "super()")
            is_own = node.attr in own or (of_self and node.attr in inherited)
            is_attribute = node.attr in _attributes() and not is_own
            if (name and _is_private(name)) or is_attribute:
                yield node.lineno, name or node.attr
        elif isinstance(node, ast.ClassDef):
            yield from _overridden(node, known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in _attributes() and node.value not in own:
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Call):  # a keyword that is an attribute, as in vars(x).update(_y=None)
            found = [word.arg for word in node.keywords if word.arg in _attributes() and word.arg not in own]
            yield from ((node.lineno, f"{name}=") for name in found)


def _is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(map(_is_hidden, rest))


def _known_names(tree: ast.Module) -> dict[str, str]:
    """What names of the source stand for, as far as that is something of torch's."""
    known: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            known |= {
                alias.asname or alias.name.partition(".")[0]: alias.name
                if alias.asname
                else alias.name.partition(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = _resolved(node.value, known)
            known |= {node.targets[0].id: name} if name else {}
    return {name: full for name, full in known.items() if full.split(".")[0] == "torch"}


def _resolved(node: ast.AST, known: dict[str, str]) -> str | None:
    """The full name of an expression that is a name of torch's."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _resolved(node.value, known)
        return f"{base}.{node.attr}" if base else None
    if isinstance(node, ast.Call) and node.args and is_import_module(node.func):
        argument = node.args[0]
        return str(argument.value) if isinstance(argument, ast.Constant) else None
    return None


def is_import_module(function: ast.AST) -> bool:
    """Whether it is ``import_module``, by itself or of importlib."""
    return (getattr(function, "attr", None) or getattr(function, "id", "")) == "import_module"


@functools.cache
def own_attributes(source: str) -> frozenset[str]:
    """Attributes that classes of the source define."""
    tree = parsed(source)
    methods = {node.name for node in nodes(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return frozenset(methods | {node.attr for node in nodes(tree) if _is_set_on_self(node)})


def _is_set_on_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    )


def _overridden(node: ast.ClassDef, known: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Private attributes of torch's classes that a class derived from them defines anew."""
    for base in node.bases:
        if name := _resolved(base.value if isinstance(base, ast.Subscript) else base, known):
            attributes = _attributes_of(_found(name))
            for part in ast.walk(node):
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and part.name in attributes:
                    yield part.lineno, f"{name}.{part.name}"
                elif isinstance(part, ast.Attribute) and _is_set_on_self(part) and part.attr in attributes:
                    yield part.lineno, f"{name}.{part.attr}"


def _found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(importlib.import_module(module), attribute)


def _attributes_of(kind: Any) -> set[str]:
    """Private attributes of a class, and of its objects where there is one to look at."""
    objects = [one for one in _objects() if inspect.isclass(kind) and isinstance(one, kind)]
    return set(filter(_is_hidden, {*dir(kind), *_names_of(objects)}))


@functools.cache
def _attributes() -> frozenset[str]:
    """Private attributes of torch's classes whose objects are met here, and of such objects."""
    classes = [
        DTensor,
        dcp.DefaultSavePlanner,
        dcp.DefaultLoadPlanner,
        dist.ProcessGroup,
        dist.device_mesh.DeviceMesh,
        dist.fsdp.FSDPModule,
        nn.parallel.DistributedDataParallel,
        torch.Generator,
        torch.profiler.profile,
    ]
    found = _names_of(_objects()) | set(dir(nn.init)) | {"_get_fsdp_state", "_fsdp_param_group"}
    for kind in classes:
        found |= {name for base in inspect.getmro(kind) for name in vars(base)}
    # What a scaler's state_dict calls its counter is documented.
    return frozenset(filter(_is_hidden, found)) - {"_abc_impl", "_growth_tracker"}


@functools.cache
def _objects() -> tuple[object, ...]:
    layer = nn.BatchNorm1d(1)
    optimizer = torch.optim.AdamW(layer.parameters())
    return (
        layer,
        layer.weight,
        torch.empty(0).untyped_storage(),
        optimizer,
        torch.optim.lr_scheduler.LinearLR(optimizer),
        torch.amp.GradScaler("cpu"),
        DataLoader([0]),
        dist.HashStore(),
    )


def _names_of(objects: Iterable[object]) -> set[str]:
    return {name for one in objects for name in (*dir(one), *getattr(one, "__dict__", {}))}
