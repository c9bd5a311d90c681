"""Activation checkpointing and compilation of a module in place: parameter names do not change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from .errors import ConfigError, suggest

_LISTED = 12  # so many classes of a model are listed in a message


def checkpoint_activations(module: nn.Module, check_fn: Callable[[nn.Module], bool]) -> list[str]:
    """Apply activation checkpointing to the outermost submodules that ``check_fn`` accepts; return their names.

    It replaces the submodule's ``forward`` instead of wrapping the submodule, so that no name changes.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    chosen: list[str] = []
    for name, submodule in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and check_fn(submodule):
            submodule.forward = functools.partial(checkpoint, submodule.forward, use_reentrant=False)
            chosen.append(name)
    return chosen


def module_filter(
    classes: Iterable[str] | Callable[[nn.Module], bool], module: nn.Module, where: str
) -> Callable[..., bool]:
    """Return a ``check_fn`` for class names such as ``["Bottleneck"]``; a callable is returned as it is.

    Raises:
        ConfigError: no submodule has a class of this name.
    """
    if callable(classes):
        return classes
    names = set(classes)
    known = {type(submodule).__name__ for submodule in module.modules()}
    for name in sorted(names - known):
        more = ", ..." if len(known) > _LISTED else ""
        there = f"the model has {', '.join(sorted(known)[:_LISTED])}{more}"
        hint = suggest(name, known)
        raise ConfigError(f'{where}: no submodule is a "{name}"{f"{hint} T{there[1:]}" if hint else f"; {there}"}')
    return lambda submodule: type(submodule).__name__ in names


def compile_in_place(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    """Compile the call of each module, with options of ``torch.compile``; names do not change."""
    for module in modules:
        module.compile(**options)
