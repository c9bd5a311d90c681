"""flextrain reads, merges, writes and parses configurations as MMEngine does; the differences are listed with reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flextrain.core.config_files import Config, DictAction

from .cases import CASES, ENVIRONMENT, Case, outcome
from .record import RECORDED

THEIRS: dict[str, Any] = json.loads(RECORDED.read_text())
B = ["b", {"dict": [["b1", {"list": [0, 1]}], ["b2", None], ["b3", {"dict": [["x", 1], ["y", 2]]}]]}]
DIFFERENT: dict[str, tuple[str, Any]] = {
    "functions and modules are left out": (
        "MMEngine in a virtual environment takes Python's own library for other packages",
        {"value": {"dict": [["a", 3], ["b", "/"]]}},
    ),
    "delete what is new": (
        "_delete_ is no argument of what is built later",
        {"value": {"dict": [["a", 1], B, ["c", {"tuple": [1, 2]}], ["d", "text"], ["new", {"dict": [["z", 1]]}]]}},
    ),
    "merge by index to a number": (
        "any item can be set",
        {
            "value": {
                "dict": [
                    ["a", 1],
                    ["b", {"dict": [["b1", {"list": [5, 1]}], *B[1]["dict"][1:]]}],  # type: ignore[index]
                    ["c", {"tuple": [1, 2]}],
                    ["d", "text"],
                ]
            }
        },
    ),
    "option 23: a=hello world": ("blanks are part of a text", {"value": {"dict": [["a", "hello world"]]}}),
    "option 27: a=(1,2),(3,4)": (
        "brackets are matched",
        {"value": {"dict": [["a", {"list": [{"tuple": [1, 2]}, {"tuple": [3, 4]}]}]]}},
    ),
}
"""Case to why flextrain differs, and what it makes of it. docs/configuration.md lists the reasons."""


def test_all_are_recorded() -> None:
    assert len(CASES) >= 60
    assert list(THEIRS) == ["mmengine", *(each.name for each in CASES)]
    assert set(DIFFERENT) <= set(THEIRS)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_same_as_recorded(one: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    found = outcome(one, tmp_path.resolve(), Config, DictAction)
    if one.name in DIFFERENT:
        assert found == DIFFERENT[one.name][1]
        assert found != THEIRS[one.name]
    elif "error" in THEIRS[one.name]:
        assert "error" in found
    else:
        assert found == THEIRS[one.name]
