"""Which of two values of a metric is the better one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ...core.errors import ConfigError

Rule = Literal["greater", "less"]

# MMEngine's words for metrics, found in part and in any case.
GREATER_KEYS = ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")
LESS_KEYS = ("loss",)


def check_rule(rule: str, where: str) -> Rule:
    """``rule`` itself.

    Raises:
        ConfigError: it is neither "greater" nor "less".
    """
    if rule not in ("greater", "less"):
        raise ConfigError(f'{where}: "{rule}" is not allowed, choose greater or less')
    return rule  # type: ignore[return-value]


def infer_rule(
    key: str, where: str, greater_keys: Sequence[str] = GREATER_KEYS, less_keys: Sequence[str] = LESS_KEYS
) -> Rule:
    """Whether greater or less is better, by the metric's name: first the whole name counts, then a part of it.

    Raises:
        ConfigError: the name says nothing.
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


def is_better(rule: Rule, value: float, than: float) -> bool:
    """Whether ``value`` is better; NaN and infinity, which nothing could be better than, never are."""
    return math.isfinite(value) and (value > than if rule == "greater" else value < than)


def worst(rule: Rule) -> float:
    """A value that every number is better than."""
    return -math.inf if rule == "greater" else math.inf
