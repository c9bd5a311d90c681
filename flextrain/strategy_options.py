"""The configuration of a strategy that a tool is asked for by name, with the options that the user's script has for its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .core.base.config import Config
from .core.base.errors import ConfigError, FlexTrainError
from .core.base.registry import STRATEGIES
from .strategies.base import Strategy

_ELSEWHERE = ("type", "launcher", "backend", "timeout_s", "compile")
"""Options of a run on its own machine, which tools give themselves or leave out; and ``device``."""


def names_in(text: str, where: str) -> list[str]:
    """Return the names of strategies that a command is given, with commas between them.

    Raises:
        ConfigError: there is none, or one of them twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{where}: is empty, give names with commas between them")
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise ConfigError(f'{where}: "{twice}" is there twice, leave one out')
    return names


def strategy_options(
    name: str | Mapping[str, Any], given: Mapping[str, Any], device: str
) -> tuple[dict[str, Any], list[str]]:
    """Return a strategy's configuration, and a note for each option of the script's strategy that it does not take.

    A strategy of the class that the script itself uses gets all its options. Another one gets those that both classes have
    from a common base class, and that are possible together with what ``name`` says.

    Args:
        name: a short or registered name, ``package.module:Name``, or a configuration with ``type``.
        given: the script's arguments of the runner.
        device: the device to use instead of the script's.
    """
    spec = STRATEGIES.expand(name, "strategies")
    kind = STRATEGIES.resolve(spec["type"], "strategies")
    notes: list[str] = []
    spec = {key: value for key, value in spec.items() if key != "type"}
    own_kind, own = _of_script(given["strategy"])
    if own_kind is kind:
        spec = _merged(own, spec)
    elif own:
        spec, notes = _carried(own_kind, own, kind, spec)
    return {**spec, "type": kind, "device": device}, notes


def own_dtype(spec: Any) -> torch.dtype | None:
    """Return the dtype in which options of a strategy itself let it compute; None: that of the optim_wrapper, or not known."""
    kind, options = _of_script(spec)
    try:
        return kind(**options).config.own_dtype if kind is not None else None
    except FlexTrainError:  # which planning it says
        return None


def _of_script(own: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class and the options of the script's own strategy; None without one."""
    if isinstance(own, Strategy):
        kind: Any = type(own)
        options = {key: getattr(own.config, key) for key in sorted(own.config.model_fields_set)}
    elif own is None:
        return None, {}
    else:
        options = STRATEGIES.expand(own, "strategy")
        kind = STRATEGIES.resolve(options["type"], "strategy.type")
    return kind, {key: value for key, value in options.items() if key not in (*_ELSEWHERE, "device")}


def _merged(options: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(options)
    for key, value in spec.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = {**found[key], **value} if both else value
    return found


def _carried(
    own_kind: Any, own: Mapping[str, Any], kind: Any, spec: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return ``spec`` with the options of ``own`` that the strategy ``kind`` has too, and why each other one is left out."""
    why: dict[str, str] = {}
    shared = _shared(own_kind, kind)
    left = [key for key in own if key in shared and key not in spec]
    if problem := _refusal(kind, spec):  # whatever the script has
        return spec, [problem] if left else []
    while left:  # again as long as it helps: an option may need another one
        before = [*left]
        for key in before:
            if problem := _refusal(kind, {**spec, key: own[key]}):
                why[key] = problem
            else:
                spec = {**spec, key: own[key]}
                left.remove(key)
        if left == before:
            break
    for key in own:
        if key not in shared and key not in spec:
            why[key] = f"{_name(kind)} has no such option"
    missing = [key for key in own if key not in spec]
    return spec, [f"strategy.{key} of the script's {_name(own_kind)}: left out, {why[key]}" for key in missing]


def _shared(one: Any, other: Any) -> set[str]:
    """The options that two strategies have from a common base class, so that they mean the same."""
    # A strategy may be made by a function, which says nothing of its options.
    bases: list[type[Config]] = [getattr(kind, "Config", Config) for kind in (one, other)]
    common = [base for base in bases[0].__mro__ if issubclass(base, Config) and issubclass(bases[1], base)]
    return {key for base in common for key in base.model_fields}


def _refusal(kind: Any, options: Mapping[str, Any]) -> str | None:
    """Why a strategy does not take these options; None if it does."""
    try:
        kind(**options)
    except FlexTrainError as error:
        return str(error)
    return None


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
