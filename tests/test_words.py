"""One name for one thing, and one place for what several need: read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .test_architecture import Sources, sources

HOMES = {
    "set_epoch": ("flextrain.runner.data.epochs", "tell_epoch() and tell_loader_epoch() call it"),
    "optim.state.": ("flextrain.optim.canonical", "import STATE, or split_key()"),
    "optim.group.": ("flextrain.optim.canonical", "import GROUP, or split_key()"),
}
"""What only one module may say in code, which all others ask: attribute or string, the module, what to do instead."""


def strays(modules: Sources) -> list[str]:
    """Places outside of its home where one of ``HOMES`` is said; docstrings and definitions may."""
    found = []
    for module, source in modules.items():
        for line, said in _said(ast.parse(source)):
            for word, (home, advice) in HOMES.items():
                if word in said and module != home:
                    found.append(f"{module}:{line} says {word}, {advice}")
    return found


def _said(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every attribute that is read and every string that is no docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_what_several_need_stands_in_one_place() -> None:
    modules = sources()
    assert {home for home, _ in HOMES.values()} <= modules.keys()
    assert strays(modules) == []


@pytest.mark.parametrize(
    "source, word",
    [
        ("sampler.set_epoch(1)", "set_epoch"),
        ("f = getattr(sampler, 'set_epoch', None)", "set_epoch"),
        ("key = f'optim.group.{name}.lr'", "optim.group."),
        ("if key.startswith('optim.state.'): pass", "optim.state."),
    ],
)
def test_strays_are_found(source: str, word: str) -> None:
    assert [found.split(",")[0] for found in strays({"flextrain.runner.a": source})] == [
        f"flextrain.runner.a:1 says {word}"
    ]


def test_docstrings_and_definitions_may_say_it() -> None:
    source = 'def set_epoch(self):\n    """Called by ``set_epoch``; ``optim.group.x``."""\n'
    assert strays({"flextrain.runner.a": source}) == []
