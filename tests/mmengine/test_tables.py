"""The tables of docs/mmengine_keywords.md and docs/mmengine_names.md against both packages: complete, and true where a test can tell."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from typing import Any

import pytest
from packaging.version import Version

import flextrain
from flextrain import ConfigError, FlexibleRunner, Registry

from .page import MODULES, Row, find, rows

STATES = {"same", "differs", "refused", "instead"}

KEYWORDS = rows("Every keyword of FlexibleRunner")
NAMES = {module: rows(f"mmengine.{module}") for module in MODULES}
ALL = [pytest.param(module, row, id=f"{module}.{row.name}") for module in MODULES for row in NAMES[module]]


def of(state: str) -> list[Any]:
    return [param for param in ALL if param.values[1].state == state]  # type: ignore[attr-defined]


def parameters(thing: Any) -> dict[str, inspect.Parameter]:
    every = inspect.signature(thing).parameters
    return {name: p for name, p in every.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def takes_any(thing: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())


def test_states() -> None:
    for row in [*KEYWORDS, *(row for found in NAMES.values() for row in found)]:
        assert row.state in STATES, row


def test_every_keyword_is_listed_once_and_taken() -> None:
    theirs = pytest.importorskip("mmengine.runner").FlexibleRunner
    listed = [row.name for row in KEYWORDS]
    assert sorted(listed) == sorted(set(parameters(theirs)))
    assert set(listed) <= set(parameters(FlexibleRunner))
    assert {row.state for row in KEYWORDS} <= {"same", "differs"}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_listed_once(module: str) -> None:
    theirs = pytest.importorskip(f"mmengine.{module}").__all__
    listed = [row.name for row in NAMES[module]]
    assert len(listed) == len(set(listed))
    assert not set(theirs) - set(listed)
    if Version(importlib.metadata.version("mmengine")) >= Version("0.10.7"):  # which the page was written for
        assert not set(listed) - set(theirs)


@pytest.mark.parametrize("module, row", of("same"))
def test_the_same_takes_the_same_arguments(module: str, row: Row) -> None:
    ours = find(row)
    found = pytest.importorskip(f"mmengine.{module}")
    if not hasattr(found, row.name):
        pytest.skip("newer than this mmengine")
    theirs = getattr(found, row.name)
    assert type(ours).__name__ == type(theirs).__name__ or (inspect.isclass(ours) and inspect.isclass(theirs))
    if isinstance(ours, Registry) or takes_any(ours):
        return
    assert parameters(theirs).keys() <= parameters(ours).keys(), f"mmengine.{module}.{row.name} takes more"


@pytest.mark.parametrize("module, row", of("differs"))
def test_what_differs_is_where_the_table_says(module: str, row: Row) -> None:
    assert find(row) is not None


@pytest.mark.parametrize("module, row", of("refused"))
def test_what_is_refused_is_refused_by_name(module: str, row: Row) -> None:
    found = re.match(r"`([A-Z_]+)`: ", row.here)
    assert found, f"{row.name}: begin with the registry"
    with pytest.raises(ConfigError, match=rf'^part.type: "{row.name}" is not supported, \w+'):
        getattr(flextrain, found[1]).build(dict(type=row.name), "part")


@pytest.mark.parametrize("module, row", of("instead"))
def test_what_has_a_counterpart_by_now_is_not_listed_as_missing(module: str, row: Row) -> None:
    assert row.here, f"{row.name}: say what to use instead"
    for home in ("flextrain", "flextrain.optim", "flextrain.runner", "flextrain.runner.hooks", "flextrain.strategies"):
        assert not hasattr(importlib.import_module(home), row.name), f"{home} has {row.name}"
