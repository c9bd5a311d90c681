"""Every message on the pages of troubleshooting is one of the library, or one that it gives advice on; the index has them all."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from flextrain.runner.health import failures as process_advice  # noqa: F401 - they register their rules
from flextrain.runner.health.failures import RULES

from .pages import DOCS, ROOT

ROW = re.compile(r"^\| `([^`]+)` \|", flags=re.MULTILINE)
INDEX = (DOCS / "troubleshooting.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "troubleshooting").glob("*.md"))}
OF_TORCH = "## Messages of torch"
TORCHS = ROW.findall(PAGES["training"].partition(OF_TORCH)[2])
OWN = [message for text in PAGES.values() for message in ROW.findall(text.partition(OF_TORCH)[0])]

OTHERS = ("model: ... has nothing to learn", "holds checkpoints of another run ... work_dir: ")
"""Messages that there are not."""


@cache
def texts() -> list[str]:
    """The texts in the library's code, without documentation; what is put in is a null character."""
    found = []
    beginnings = {max(message.split("..."), key=len)[:15] for message in (*OWN, *TORCHS, *OTHERS)}
    for folder in ("core", "optim", "runner", "strategies", "flextrain"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            if not any(words in text for words in beginnings):  # parsing all of them takes seconds
                continue
            nodes = list(ast.walk(ast.parse(text)))
            documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                    found.append(node.value)
    return [text for text in found if " " in text]


def is_said(message: str) -> bool:
    """Whether one text has all words of the message in their order, and something to put in wherever it says ``...``."""
    parts = message.split("...")
    longest = max(parts, key=len)
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    return any(longest in text and pattern.search(text) for text in texts())


def test_there_are_many() -> None:
    assert len(OWN) > 80
    assert len(TORCHS) > 5


@pytest.mark.parametrize("message", OWN)
def test_the_library_says_so(message: str) -> None:
    assert is_said(message), "no text in the code has these words"


def test_other_words_are_found() -> None:
    assert not any(map(is_said, OTHERS))


@pytest.mark.parametrize("message", TORCHS)
def test_there_is_advice(message: str) -> None:
    said = f"RuntimeError: {message}"
    assert any(pattern.search(said) for pattern, _ in RULES if pattern.pattern) or is_said(message)


@pytest.mark.parametrize("page", PAGES)
def test_the_index_has_the_messages_of_a_page(page: str) -> None:
    """Each message begins as one of the index does, in the section that leads to the page, and the other way round."""
    sections = [text for text in INDEX.split("\n## ") if f"](troubleshooting/{page}.md" in text]
    listed = [entry for text in sections for entry in re.findall(r"^- `([^`]+)`$", text, flags=re.MULTILINE)]
    messages = ROW.findall(PAGES[page])
    assert not [message for message in messages if not any(message.startswith(entry) for entry in listed)]
    assert not [entry for entry in listed if not any(message.startswith(entry) for message in messages)]


def test_old_headings_of_the_index_are_there() -> None:
    """Other pages may lead to them."""
    for heading in ("Configuration", "Data", "Model and loss", "Several processes", "Checkpoints", "Messages of torch"):
        assert f"\n## {heading}\n" in INDEX
