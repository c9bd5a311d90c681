"""Find what a configuration names in MMEngine's registries, and choose between it and flextrain's own class."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from mmengine.registry import DefaultScope
from mmengine.registry import Registry as Theirs

from ..core.base.config import is_of_mmengine
from ..core.base.errors import ConfigError, suggest
from ..core.base.registry import Registry as Ours
from ..core.base.registry import import_path


def find(registry: Theirs, kind: Any) -> Any:
    """The class or function that ``kind`` names, by scope, parents and default scope; None if the registry has none.

    A class or function is returned as it is. An import path with a colon is found if it names a class of MMEngine. MMEngine's own look-up warns when a scope has no registry of this kind.
    """
    if not isinstance(kind, str):
        return kind
    if ":" in kind:  # flextrain's import paths
        try:
            found = import_path(kind, "type")
        except ConfigError:  # who reads the configuration says so, with its key
            return None
        return found if is_of_mmengine(found) else None
    try:
        found = _in_default_scope(registry).get(kind)
    except RuntimeError as error:
        if not str(error).startswith("Failed to get"):
            raise
        return None
    return found if callable(found) else None  # a name such as "json" would give a module


def _in_default_scope(registry: Theirs) -> Theirs:
    """The registry of the default scope in the tree of ``registry``; ``registry`` itself if there is none."""
    current = DefaultScope.get_current_instance()
    if current is None:
        return registry
    module = f"{current.scope_name}.registry"
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, current.scope_name):
            raise
    found = registry.root._search_child(current.scope_name)
    return registry if found is None else found  # one whose modules are not imported yet has length 0


def refuse_unknown(kind: Any, theirs: Theirs, ours: Collection[str], where: str) -> None:
    """Raise ConfigError if neither MMEngine's registries nor flextrain's have a name.

    The message says the nearest name, or the scope that has it. Classes and import paths with a colon are left alone.
    """
    if not isinstance(kind, str) or ":" in kind or kind in ours:
        return
    own = _in_default_scope(theirs)
    near = {*ours, *own.module_dict}
    while own.parent is not None:
        own = own.parent
        near |= {*own.module_dict}
    scoped = [f"{each.scope}.{name}" for each in _tree(theirs.root) for name in each.module_dict]
    elsewhere = next((name for name in scoped if name.endswith(f".{kind}")), None)
    hint = f', did you mean "{elsewhere}"?' if elsewhere else suggest(kind, scoped if "." in kind else near)
    raise ConfigError(f'{where}: "{kind}" is no known {theirs.name}{hint}')


def _tree(registry: Theirs) -> Iterator[Theirs]:
    yield registry
    for child in registry.children.values():
        yield from _tree(child)


def is_mmengines(kind: Any) -> bool:
    """Whether MMEngine itself defines the class or function, not a project on top of it."""
    return (getattr(kind, "__module__", None) or "").partition(".")[0] == "mmengine"


def translated(cfg: Any, theirs: Theirs, where: str, ours: Ours | None = None, *, also: Ours | None = None) -> Any:
    """``cfg`` with a type that flextrain can build.

    Args:
        cfg: ``dict(type=..., **arguments)`` or a name; anything else is returned as it is.
        theirs: MMEngine's registry, in which names are looked up first.
        where: the configuration key, for messages.
        ours: flextrain's registry, if its classes take the places of MMEngine's own classes of the same names.
        also: flextrain's registry, if names that neither has are refused here.

    Raises:
        ConfigError: MMEngine's class works with its runner only, or the name is unknown.
    """
    if isinstance(cfg, str) and ours is not None and cfg in ours:
        return cfg
    given = {"type": cfg} if isinstance(cfg, str) else cfg
    if not isinstance(given, Mapping) or "type" not in given:
        return cfg
    found = found_in_scope(given, theirs)
    if found is None:
        if also is not None:
            refuse_unknown(given["type"], theirs, also, where if isinstance(cfg, str) else f"{where}.type")
        return cfg if isinstance(cfg, str) else without(cfg)
    arguments = without(given, "type")
    name = getattr(found, "__name__", "")
    if ours is not None and is_mmengines(found):
        if name not in ours:
            raise ConfigError(
                f"{where}.type: MMEngine's {name} works with MMEngine's runner only, and flextrain has none of this name"
            )
        return {"type": name, **arguments}
    return {"type": factory(found, given.get("_scope_")), **arguments}


def found_in_scope(cfg: Any, theirs: Theirs) -> Any:
    """What ``cfg`` or its type names, looked up in its ``_scope_`` if it has one; None if the registry has none.

    MMEngine writes ``_scope_`` into what a file inherits from another project's: ``_base_ = "mmdet::..."``.
    """
    if not isinstance(cfg, Mapping):
        return find(theirs, cfg)
    with DefaultScope.overwrite_default_scope(cfg.get("_scope_")):
        return find(theirs, cfg["type"])


def without(cfg: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """``cfg`` without ``_scope_``, which says where its type is looked up, and without ``names``."""
    return {key: value for key, value in cfg.items() if key not in ("_scope_", *names)}


def factory(found: Any, scope: str | None = None) -> Any:
    """A function that builds ``found`` in its scope; of its arguments flextrain then checks the names only.

    MMEngine checks no types, and annotations of projects are often wrong.
    """
    if scope is None:
        return functools.partial(found)
    made = functools.partial(_built_in_scope, found, scope)
    with contextlib.suppress(TypeError, ValueError):  # a class of C may have none
        made.__signature__ = inspect.signature(found)  # type: ignore[attr-defined]
    return made


def _built_in_scope(found: Any, scope: str, /, *inputs: Any, **arguments: Any) -> Any:
    with DefaultScope.overwrite_default_scope(scope):
        return found(*inputs, **arguments)


def built_by(made: Any) -> Any:
    """The class or function behind a result of ``factory``; None for anything else."""
    if not isinstance(made, functools.partial):
        return None
    return made.args[0] if made.func is _built_in_scope else made.func
