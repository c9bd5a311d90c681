"""Build the transforms of a run from its argument ``transforms``, before there is a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...core.config import check_call
from ...core.errors import ConfigError, one_of
from ...core.registry import TRANSFORMS
from .lora import options_of

_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SHOWN = 80
_LIST = "give a list of functions, names, or dict(type=...)"


@dataclass(frozen=True)
class Transform:
    """A function that changes a model.

    Attributes:
        where: its key in the configuration: ``transforms[0]``.
        name: that of the function or class, for the log.
        function: takes the module; returns another one, or None if it has changed the module in place.
    """

    where: str
    name: str
    function: Callable[[nn.Module], nn.Module | None]

    @property
    def needs_values(self) -> bool:
        """Whether it computes with the model's values, and not with names, shapes and classes alone."""
        return bool(getattr(self.function, "needs_values", False))

    @property
    def quantises(self) -> bool:
        """Whether it stores parameters in a form that checkpoints cannot hold."""
        return bool(getattr(self.function, "quantises", False))


def build_transforms(given: Any) -> tuple[Transform, ...]:
    """Build the transforms, in their order.

    Args:
        given: a list of functions that take the module, of names, of ``dict(type=..., **arguments)``, and of ``peft.LoraConfig``,
            which stands for ``dict(type="LoRA", ...)`` with its arguments; None: none. A type
            that is a class is called with the arguments, and the object with the module. A type that is a function is called
            with the module first, and the arguments.

    Raises:
        ConfigError: an unknown name, or a wrong argument.
    """
    if given is None:
        return ()
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        shown = f'"{given}"' if isinstance(given, str) else type(given).__name__
        raise ConfigError(f"transforms: {shown} is not allowed, {_LIST}")
    return tuple(_built(item, f"transforms[{number}]") for number, item in enumerate(given))


def _built(item: Any, where: str) -> Transform:
    if isinstance(item, nn.Module):
        raise ConfigError(f"{where}: is a module ({type(item).__name__}), give a function that takes the model")
    if type(item).__name__ == "LoraConfig" and type(item).__module__.startswith("peft."):
        item = {"type": "LoRA", **options_of(item)}
    if not isinstance(item, (str, Mapping)) and not inspect.isclass(item):
        if not callable(item):
            if type(item).__name__ == "LoraConfig":
                raise ConfigError(f'{where}: is a LoraConfig, give dict(type="LoRA", r=8, ...) with the same options')
            shown = repr(item) if len(repr(item)) <= _SHOWN else type(item).__name__
            raise ConfigError(f"{where}: {shown} is not allowed, give a function, a name, or dict(type=...)")
        _check_takes_module(item, where, alone=True)
        return Transform(where, _name(item), item)
    config = TRANSFORMS.expand(item, where)
    kind = TRANSFORMS.resolve(config.pop("type"), where if isinstance(item, str) else f"{where}.type")
    if inspect.isclass(kind):
        if issubclass(kind, nn.Module):
            raise ConfigError(f"{where}.type: {kind.__name__} is a module, give a function that takes the model")
        if not any("__call__" in vars(each) for each in kind.__mro__):
            raise ConfigError(f"{where}.type: {kind.__name__} is not callable, define __call__(self, module)")
        built = TRANSFORMS.build({"type": kind, **config}, where)
        return Transform(where, _described(kind.__name__, config), built)
    first = _check_takes_module(kind, where)
    check_call(kind, config, where, (first,) if first else ())
    function = functools.partial(kind, **config) if config else kind
    return Transform(where, _described(_name(kind), config), function)


def _check_takes_module(function: Any, where: str, *, alone: bool = False) -> str:
    """Return the name of the parameter that gets the module; empty if there is no signature to find it in.

    Args:
        function: of a transform.
        where: the configuration key, for messages.
        alone: whether it gets nothing but the module.

    Raises:
        ConfigError: it takes no argument, or alone and needs more.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ""
    first = next((p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)), None)
    if first is None:
        raise ConfigError(f"{where}: {_name(function)} takes no argument, it must take the model")
    more = [p.name for p in parameters if p is not first and p.default is p.empty and p.kind not in _ANY]
    if alone and more:
        raise ConfigError(
            f"{where}: {_name(function)} needs {one_of(more)} beside the model, give dict(type=function, {more[0]}=...)"
        )
    return "" if first.kind in (first.VAR_POSITIONAL, first.POSITIONAL_ONLY) else first.name


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _described(_name(function.func), function.keywords)
    return str(getattr(function, "__name__", type(function).__name__))


def _described(name: str, arguments: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{name}({text if len(text) <= 80 else text[:77] + '...'})" if text else name
