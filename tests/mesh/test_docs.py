"""What docs/parallelism.md and docs/axes.md show as Python are options that the strategy takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flextrain import MeshStrategy, Strategy
from flextrain.core.base.registry import STRATEGIES
from flextrain.strategies.mesh.tensor.styles import STYLES, style_of

PAGE = "\n".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("parallelism.md", "axes.md"))
RECIPES = re.findall(r"strategy ?= ?(dict\(type=\"MeshStrategy\".*\))", PAGE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    strategy = eval(recipe, {"dict": dict})
    assert isinstance(STRATEGIES.build(strategy, "strategy"), Strategy)


def test_all_options_are_named() -> None:
    assert len(RECIPES) == 4
    for option in (
        "pp_schedule",
        "pp_split",
        "pp_layers",
        "cp_kind",
        "cp_keys",
        "cp_positions",
        "plan_example",
        "tp_kind",
    ):
        assert f"`{option}" in PAGE
        assert option in MeshStrategy.Config.model_fields


def test_styles_are_known() -> None:
    rows = re.findall(r"^\| (`[a-z_:0-9`, ()]*`\)?) \|", PAGE.split("| style |")[1].split("\n\n")[0], re.MULTILINE)
    named = [style for row in rows for style in re.findall(r"`([a-z_:0-9]+)`", row)]
    assert len(named) >= 10
    for style in named:
        assert style_of(style, "docs") is not None
    assert {style.partition(":")[0] for style in named} <= set(STYLES)
