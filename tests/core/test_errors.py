"""Errors: which of Python's own they are, and the names they suggest."""

from __future__ import annotations

import pytest

from flextrain.core.base.errors import (
    CheckpointError,
    ConfigError,
    FlexTrainError,
    LaunchError,
    StrategyError,
    nearest,
    one_of,
    suggest,
)


@pytest.mark.parametrize(
    "error, python",
    [
        (ConfigError, ValueError),
        (LaunchError, RuntimeError),
        (StrategyError, RuntimeError),
        (CheckpointError, RuntimeError),
    ],
)
def test_errors_are_ours_and_pythons(error: type[Exception], python: type[Exception]) -> None:
    assert issubclass(error, FlexTrainError)
    assert issubclass(error, python)


@pytest.mark.parametrize(
    "name, candidates, found",
    [
        ("AdamWW", ["Adam", "AdamW", "SGD"], "AdamW"),
        ("adamw", ["AdamW", "SGD"], "AdamW"),
        ("momentun", ["lr", "momentum"], "momentum"),
        ("zzz", ["lr", "momentum"], None),
        ("lr", [], None),
    ],
)
def test_nearest_name(name: str, candidates: list[str], found: str | None) -> None:
    assert nearest(name, candidates) == found
    assert suggest(name, candidates) == (f', did you mean "{found}"?' if found else "")


@pytest.mark.parametrize("given, words", [([1], "1"), ([1, 2], "1 or 2"), (["a", "b", "c"], "a, b or c")])
def test_allowed_values_as_words(given: list[object], words: str) -> None:
    assert one_of(given) == words
