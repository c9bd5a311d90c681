"""One name for one thing, and one place for what several need: read off the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import LEFT_TO_FULL_UNKNOWN
from .private_names import nodes, parsed
from .test_architecture import Sources, sources

HOMES = {
    "set_epoch": ("flextrain.runner.data.samplers", "tell_epoch() and tell_loader_epoch() call it"),
    "optim.state.": ("flextrain.optim.canonical", "import STATE, or split_key()"),
    "optim.group.": ("flextrain.optim.canonical", "import GROUP, or split_key()"),
}
"""What only one module may say in code, which all others ask: attribute or string, the module, what to do instead."""

WORDS = {
    "rectangle": ("", "chunk"),
    "piece": (
        r"runner\.resume\.",
        "chunk for a box of a tensor, shard for what a process holds; pieces are those of a resumed run",
    ),
    "fragment": (r"strategies\.deepspeed\.", "shard; fragments are DeepSpeed's"),
    "place": ("", "position, index, key or path; only models are placed, on devices"),
    "plain": ("", "what it is; plain are only values and types that JSON can hold"),
    "twin": ("", "equivalent"),
    "kit": ("", "the thing's own name"),
    "peer": ("", "process, participant"),
    "accumulative": (r"optim\.", "accumulate; accumulative_counts is MMEngine's name for it in configurations"),
    "builder": (r"strategies\.deepspeed\.", "build"),
}
"""Words that names in code may not be made of: where they are allowed, and what to say instead. See CONTRIBUTING.md."""

TERMS = {"_place", "in_place", "plain_value", "plain_values", "plain_type", "plain_types", "placement"}
"""Names of the above words that are terms, alone or as a part of a name."""

SAME_FILE_NAME = {
    "__init__",
    "advice",  # what a user could change: when a run has failed, when a plan does not fit
    "base",  # the class that those of the folder derive from
    "build",  # makes what the folder has from a configuration
    "checkpoint",  # the command, the hook, and the class of that name
    "config",  # the options of the folder's strategy; core's is the base of all
    "hugging_face",  # reading its files, and the example that trains with it
    "plan",  # the command, and what it gives
    "report",  # what a person is shown in the end: by doctor, by the conformance checks
    "strategy",  # the class of the folder
    "verify",  # the command, and what it does
    "weights",  # those that are loaded, those that are exported
    "wrapper",  # the optimizer's, and DeepSpeed's
}
"""File names that several folders have, and mean alike."""

SAME_CLASS_NAME = {"Config": ["flextrain.core.base.config", "flextrain.core.config_files.config_file"]}
"""Names that two classes have for a reason: a file's contents have MMEngine's name, and a component's options had it before."""


def strays(modules: Sources) -> list[str]:
    """Places outside of its home where one of ``HOMES`` is said; docstrings and definitions may."""
    found = []
    for module, source in modules.items():
        for line, said in _said(parsed(source)):
            for word, (home, advice) in HOMES.items():
                if word in said and module != home:
                    found.append(f"{module}:{line} says {word}, {advice}")
    return found


def _said(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every attribute that is read and every string that is no docstring."""
    docstrings = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def other_words(modules: Sources) -> list[str]:
    """Names of the code that have one of ``WORDS`` in them."""
    found = []
    for module, source in modules.items():
        for line, name in _names(module, parsed(source)):
            rest = _without_terms(name)
            for word, (allowed, advice) in WORDS.items():
                if re.search(rf"(?<![a-z]){word}s?(?![a-z])", rest) and not (
                    allowed and re.match(allowed, f"{module.removeprefix('flextrain.')}.")
                ):
                    found.append(f"{module}:{line} has {name}: say {advice}")
    return found


def _names(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield 1, module.rpartition(".")[2]
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@functools.cache
def _without_terms(name: str) -> str:
    """``OnePlainValue_x`` as ``one_x``: the words in small letters, without those that make up a term."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    if words in TERMS:
        return ""
    for term in sorted(TERMS, key=len, reverse=True):
        words = (
            re.sub(rf"(?<![a-z]){term.removeprefix('_')}(?![a-z])", "", words) if not term.startswith("_") else words
        )
    return words


def classes_of_one_name(modules: Sources) -> list[str]:
    """Classes for all to use that have the name of another one."""
    homes: dict[str, list[str]] = {}
    for module, source in modules.items():
        for node in nodes(parsed(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    return [
        f"{name} is in {' and in '.join(found)}"
        for name, found in homes.items()
        if len(found) > 1 and SAME_CLASS_NAME.get(name) != found
    ]


def files_of_one_name(modules: Sources) -> list[str]:
    """Files with the name of another one, in another folder, that ``SAME_FILE_NAME`` does not explain."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        homes.setdefault(module.rpartition(".")[2], []).append(module)
    return [
        f"{name} is {' and '.join(found)}"
        for name, found in homes.items()
        if len(found) > 1 and name not in SAME_FILE_NAME
    ]


def test_what_several_need_stands_in_one_place() -> None:
    modules = sources()
    assert {home for home, _ in HOMES.values()} <= modules.keys()
    assert strays(modules) == []


def test_one_word_for_one_thing() -> None:
    assert other_words(sources()) == []


def test_no_two_classes_have_one_name() -> None:
    assert classes_of_one_name(sources()) == []


def test_files_of_one_name_mean_the_same() -> None:
    assert files_of_one_name(sources()) == []


def test_every_word_is_in_the_glossary() -> None:
    table = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().partition("## Words")[2]
    assert [word for word in WORDS if word not in table] == []


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


@pytest.mark.parametrize(
    "module, source, name",
    [
        ("core.a", "def own_piece(): ...", "own_piece"),
        ("core.a", "class Rectangle: ...", "Rectangle"),
        ("core.a", "x = [place for place in y]", "place"),
        ("runner.a", "self.places = 1", "places"),
        ("runner.a", "def f(keeps_place): ...", "keeps_place"),
        ("core.a", "class TrainingPlace: ...", "TrainingPlace"),
        ("strategies.builder", "", "builder"),
        ("core.a", "_PLAIN = 1", "_PLAIN"),
    ],
)
def test_other_words_are_found(module: str, source: str, name: str) -> None:
    found = other_words({f"flextrain.{module}": source})
    assert found
    assert all(f"flextrain.{module}:1 has {name}: say" in entry for entry in found)


def test_words_that_are_terms_are_allowed() -> None:
    allowed = {
        "runner.resume.pieces": "def piece(): ...",
        "strategies.deepspeed.a": "class Fragment: ...",
        "strategies.a": "def _place(model, placements): compile_in_place(is_in_place=1)",
        "core.a": "_PLAIN_TYPES = PlainValues = plain_value = 1\nreplace = displaced = explain = 1",
        "optim.a": "def f(accumulative_counts): ...",
    }
    assert other_words({f"flextrain.{module}": source for module, source in allowed.items()}) == []


def test_names_that_stand_twice_are_found() -> None:
    modules = {"flextrain.core.a": "class A: ...\nclass _B: ...", "flextrain.runner.a": "class A: ...\nclass _B: ..."}
    assert classes_of_one_name(modules) == ["A is in flextrain.core.a and in flextrain.runner.a"]
    assert files_of_one_name(modules) == ["a is flextrain.core.a and flextrain.runner.a"]
    assert files_of_one_name({"flextrain.core.base": "", "flextrain.optim.base": ""}) == []


def test_left_to_full_names_tests(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[LEFT_TO_FULL_UNKNOWN] == []
