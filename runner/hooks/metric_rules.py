"""Compare two values of a metric: greater is better, or less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ...core.errors import ConfigError

Rule = Literal["greater", "less"]

# MMEngine's words, matched as part of a metric's name, in upper or lower case.
GREATER_KEYS = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS_KEYS = ("loss", "perplexity")


def check_rule(rule: str, where: str) -> Rule:
    """Return ``rule`` if it is valid.

    Raises:
        ConfigError: the rule is neither "greater" nor "less".
    """
    if rule not in ("greater", "less"):
        raise ConfigError(f'{where}: "{rule}" is not allowed, choose greater or less')
    return rule  # type: ignore[return-value]


def infer_rule(
    key: str, where: str, greater_keys: Sequence[str] = GREATER_KEYS, less_keys: Sequence[str] = LESS_KEYS
) -> Rule:
    """Return the rule that fits the metric's name: the whole name is looked up first, then parts of it.

    Raises:
        ConfigError: no known word is in the name.
    """
    name = key.lower()
    greater, less = [k.lower() for k in greater_keys], [k.lower() for k in less_keys]
    if name in greater:
        return "greater"
    if name in less:
        return "less"
    if any(word in name for word in greater):
        return "greater"
    if any(word in name for word in less):
        return "less"
    raise ConfigError(f'{where}: missing, the name "{key}" does not say whether greater or less is better')


def says_greater(key: str) -> bool:
    """True if the metric's name says that greater is better, and nothing of errors or losses (``top1_error``)."""
    name = key.lower()
    return any(word.lower() in name for word in GREATER_KEYS) and not any(word in name for word in ("err", "loss"))


def says_less(key: str) -> bool:
    """True if the metric's name says that less is better, and nothing that says greater."""
    name = key.lower()
    return any(word in name for word in LESS_KEYS) and not any(word.lower() in name for word in GREATER_KEYS)


def is_better(rule: Rule, value: float, than: float) -> bool:
    """True if ``value`` is better than ``than``; never for NaN and infinity, which no later value could beat."""
    return math.isfinite(value) and (value > than if rule == "greater" else value < than)


def worst(rule: Rule) -> float:
    """Return the value that every finite number is better than."""
    return -math.inf if rule == "greater" else math.inf
