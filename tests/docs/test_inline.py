"""Arguments that stand in a sentence or a table, such as ``resume=dict(optimizer=False)``, are those that a runner takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flextrain import ConfigError, StrategyError
from flextrain.core.base.registry import (
    HOOKS,
    METRICS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    REPORTERS,
    STRATEGIES,
)

from .keywords import KEYWORDS, check
from .pages import name, pages

DEFAULT_HOOKS = {"checkpoint", "logger", "timer"}
OF_WRAPPER = {"clip_grad", "paramwise_cfg", "accumulative_counts"}
SGD = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.1))
NOT_OF_THIS_MODEL = ("custom_keys", "wrap", "classes")
"""Settings that name parts of the reader's model."""


def inline(page: Path) -> Iterator[dict[str, Any]]:
    """The arguments of a runner in the inline code of a page, as far as they are literal."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        given = evaluated(" ".join(code.split()))
        if given is not None:
            yield given


def evaluated(code: str) -> dict[str, Any] | None:
    """The keywords in ``code`` as arguments of a runner; None if it is something else."""
    if "..." in code or any(f"{word}=" in code for word in NOT_OF_THIS_MODEL):
        return None
    try:
        call = ast.parse(f"f({code})", mode="eval").body
    except SyntaxError:
        return None
    assert isinstance(call, ast.Call)
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)} - {"f", "dict"}
    strange = (ast.Attribute, ast.Set, ast.Lambda, ast.Starred, ast.Subscript, ast.BinOp)
    if names or any(isinstance(node, strange) for node in ast.walk(call)) or any(k.arg is None for k in call.keywords):
        return None
    args, given = eval(code_of(call), {"dict": dict})
    if not given and len(args) == 1 and isinstance(args[0], dict) and isinstance(args[0].get("type"), str):
        return of_type(args[0])
    if args or len(given) != 1:
        return None
    ((key, value),) = given.items()
    if key in DEFAULT_HOOKS:
        return {"default_hooks": given}
    if key in OF_WRAPPER:
        return {"optim_wrapper": {**SGD, **given}}
    if key == "optim_wrapper" and isinstance(value, dict):
        return {key: value if "optimizer" in value else {**SGD, **value}}
    if key == "strategy" and isinstance(value, dict) and value["type"] not in {*STRATEGIES, *STRATEGIES.short_names()}:
        return None  # one that the page writes
    if key == "train_cfg" and not {"max_epochs", "max_iters"} & value.keys():
        value = {**value, **({"max_iters": 1000} if value.get("by_epoch") is False else {"max_epochs": 100})}
    return {key: value} if key in KEYWORDS - {"auto_scale_lr"} and not isinstance(value, str) else None


def code_of(call: ast.Call) -> str:
    """A pair of the positional and the named arguments."""
    args = "".join(f"{ast.unparse(arg)}, " for arg in call.args)
    given = ", ".join(f"{keyword.arg!r}: {ast.unparse(keyword.value)}" for keyword in call.keywords)
    return f"(({args}), {{{given}}})"


def of_type(cfg: dict[str, Any]) -> dict[str, Any] | None:
    kind = cfg["type"]
    if kind in HOOKS:
        return {"custom_hooks": [cfg]}
    if kind in PARAM_SCHEDULERS:
        return {"param_scheduler": cfg}
    if kind in OPTIM_WRAPPERS:
        return {"optim_wrapper": {**SGD, **cfg}}
    if kind in OPTIMIZERS and "lr" in cfg:
        return {"optim_wrapper": {"optimizer": cfg}}
    return {"visualizer": [cfg]} if kind in REPORTERS and "Vis" not in kind and kind not in METRICS else None


MINE = [page for page in pages() if list(inline(page))]


@pytest.mark.parametrize("page", MINE, ids=name)
def test_arguments(page: Path) -> None:
    for given in inline(page):
        try:
            check(**given)
        except (ConfigError, StrategyError) as error:
            if not re.search("is not installed|needs the package", str(error)):
                pytest.fail(f"{name(page)}: {given}: {error}")


def test_mistakes_are_seen() -> None:
    for code in (
        "clip_grad=dict(maximum=1)",
        'strategy=dict(type="ddp", comm_hook="bf16")',
        'dict(type="EMAHook", decay=0.9)',
    ):
        given = evaluated(code)
        assert given is not None
        with pytest.raises(ConfigError):
            check(**given)
