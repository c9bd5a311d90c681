"""Changes to a module that keep every parameter's name: activation checkpointing and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from .errors import ConfigError, suggest


def checkpoint_activations(module: nn.Module, check_fn: Callable[[nn.Module], bool]) -> list[str]:
    """Recompute, in backward, the activations of every outermost submodule that ``check_fn`` accepts; returns their names.

    The submodule's own ``forward`` is replaced rather than the submodule wrapped, so no name changes.

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
    """A ``check_fn`` from class names such as ``["Bottleneck"]``, or the callable itself.

    Raises:
        ConfigError: a name that no submodule's class has.
    """
    if callable(classes):
        return classes
    names = set(classes)
    known = {type(submodule).__name__ for submodule in module.modules()}
    for name in sorted(names - known):
        raise ConfigError(f'{where}: no submodule is a "{name}"{suggest(name, known)}')
    return lambda submodule: type(submodule).__name__ in names


def compile_in_place(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    """Compile what calling each module runs, with the arguments of ``torch.compile``; names stay as they are."""
    for module in modules:
        module.compile(**options)
