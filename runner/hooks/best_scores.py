"""BestScores: the best value of each monitored metric, and the checkpoint with that value."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError, suggest
from .metric_rules import (
    GREATER_KEYS,
    LESS_KEYS,
    Rule,
    check_rule,
    infer_rule,
    is_better,
    says_greater,
    says_less,
    worst,
)

logger = logging.getLogger("flextrain")


class BestScores:
    """The metrics that ``save_best`` names, with their best values so far.

    Args:
        save_best, rule, greater_keys, less_keys: see CheckpointHook.
        where: the configuration key, for messages.
    """

    def __init__(
        self,
        save_best: str | list[str] | None,
        rule: str | list[str] | None,
        greater_keys: Sequence[str] | str | None,
        less_keys: Sequence[str] | str | None,
        where: str,
    ) -> None:
        keys = [] if save_best is None else [save_best] if isinstance(save_best, str) else list(save_best)
        if len(set(keys)) < len(keys):
            raise ConfigError(f"{where}.save_best: {keys} is not allowed, it names a metric twice")
        if "auto" in keys and len(keys) > 1:
            raise ConfigError(f'{where}.save_best: {keys} is not allowed, "auto" stands alone')
        if rule is not None and not keys:
            raise ConfigError(f"{where}.rule: has no meaning without save_best")
        rules = [rule] if rule is None or isinstance(rule, str) else list(rule)
        if len(rules) not in (1, len(keys)) and keys:
            raise ConfigError(f"{where}.rule: {rule} is not allowed, give one rule or one for each of {keys}")
        self._greater_keys = GREATER_KEYS if greater_keys is None else _as_tuple(greater_keys)
        self._less_keys = LESS_KEYS if less_keys is None else _as_tuple(less_keys)
        self._where = where
        self._given = rules[0]
        self._rules: dict[str, Rule] = {}
        self._waits_for_auto = keys == ["auto"]
        if self._given is not None:
            for one in rules:
                check_rule(str(one), f"{where}.rule")
        if not self._waits_for_auto:
            rules = rules * len(keys) if len(rules) == 1 else rules
            self._rules = {key: self._rule(key, one) for key, one in zip(keys, rules, strict=True)}
        self._entries: dict[str, dict[str, Any]] = {}

    @property
    def wanted(self) -> bool:
        """True if any metric is monitored."""
        return bool(self._rules) or self._waits_for_auto

    @property
    def is_single(self) -> bool:
        """True if exactly one metric is monitored."""
        return len(self._rules) == 1

    def improved(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield the metrics that are better than ever before, with their values.

        Raises:
            ConfigError: a monitored metric is missing, or is not a number.
        """
        if self._waits_for_auto:
            first = next(iter(metrics))
            self._rules, self._waits_for_auto = {first: self._rule(first, self._given)}, False
        self.check_names(metrics)
        for key, rule in self._rules.items():
            if metrics[key] is None:
                continue
            try:
                score = float(metrics[key])
            except (TypeError, ValueError):
                raise ConfigError(f'{self._where}.save_best: "{key}" is {metrics[key]!r}, which is no number') from None
            best = self._entries[key]["score"] if key in self._entries else worst(rule)
            if is_better(rule, score, best):
                yield key, score

    def check_names(self, names: Collection[str]) -> None:
        """Raise ConfigError if a monitored metric is not among ``names``, or has no rule."""
        if self._waits_for_auto and names:
            self._rule(next(iter(names)), self._given)  # raises if the name does not say which is better
        for key in self._rules:
            if key not in names:
                hint = suggest(key, names) or f", there are {sorted(names)}"
                raise ConfigError(f'{self._where}.save_best: "{key}" is no metric of the validation{hint}')

    def name(self, key: str) -> str | None:
        """Return the name of the checkpoint with the best value of ``key``; None if there is none."""
        return self._entries[key]["checkpoint"] if key in self._entries else None

    def set(self, key: str, score: float, checkpoint: str) -> None:
        """Record a new best value and its checkpoint."""
        self._entries[key] = {"score": score, "checkpoint": checkpoint}

    def state_dict(self) -> dict[str, Any]:
        """Return the best values and their checkpoints."""
        return {key: dict(entry) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._entries = {key: dict(entry) for key, entry in state.items()}

    def _rule(self, key: str, given: str | None) -> Rule:
        if given is not None:
            if (given == "greater" and says_less(key)) or (given == "less" and says_greater(key)):
                logger.warning(f'{self._where}.rule: "{given}" keeps the checkpoint with the worst {key}; leave it out')
            return check_rule(given, f"{self._where}.rule")
        return infer_rule(key, f"{self._where}.rule", self._greater_keys, self._less_keys)


def _as_tuple(keys: Sequence[str] | str) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else tuple(keys)
