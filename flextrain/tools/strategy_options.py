"""The configuration of a strategy that a tool is asked for by name, with the options that the user's script has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.registry import STRATEGIES

_ELSEWHERE = ("type", "launcher", "backend", "timeout_s", "compile")


def strategy_options(name: str | Mapping[str, Any], given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the strategy's configuration, with the options that the script gives to a strategy of this class.

    Args:
        name: a short or registered name, ``package.module:Name``, or a configuration with ``type``.
        given: the script's arguments of the runner.
        device: the device to use instead of the script's.
    """
    spec = STRATEGIES.expand(name, "strategies")
    kind, own = STRATEGIES.resolve(spec["type"], "strategies"), given["strategy"]
    own = STRATEGIES.expand(own, "strategy") if isinstance(own, (str, Mapping)) else {}
    if own and STRATEGIES.resolve(own["type"], "strategy.type") is kind:
        options = {key: value for key, value in own.items() if key not in _ELSEWHERE}
        for key, value in spec.items():
            both = isinstance(value, Mapping) and isinstance(options.get(key), Mapping)
            options[key] = {**options[key], **value} if both else value
        spec = options
    return {**spec, "type": kind, "device": device}
