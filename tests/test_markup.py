"""What is printed is shown as it is: no name, reason or path loses its brackets to rich's markup."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flextrain.commands.output import console
from flextrain.doctor.report import Diagnosis, StrategyStatus

ROOT = Path(__file__).parents[1]
FOLDERS = ["core", "optim", "strategies", "runner", "flextrain", "examples", "benchmarks"]
# They take every text for markup, whatever the console.
MARKUP = {"from_markup", "TextColumn", "SpinnerColumn"}


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): text
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "rich" in (text := path.read_text())
    }


def complaints(source: str) -> Iterator[str]:
    """Places at which a text of others could be taken for markup."""
    tree = ast.parse(source)
    prints_itself = any(isinstance(node, ast.FunctionDef) and node.name == "__rich__" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("rich", "rich.markup"):
            yield f"line {node.lineno}: {node.module} is not needed, consoles show what they are given"
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in MARKUP:
            yield f"line {node.lineno}: {name} reads markup"
        if name.endswith("Console") and not all(_is_false(given.get(key)) for key in ("markup", "emoji")):
            yield f"line {node.lineno}: {name} without markup=False, emoji=False"
        if name == "status" and not all(map(_is_safe, node.args)):
            yield f"line {node.lineno}: a status reads markup, give it a Text"
        if name == "update" and _is_status(node.func) and not all(map(_is_safe, node.args)):
            yield f"line {node.lineno}: a status reads markup, give it a Text"
        if prints_itself and _is_row(node.func) and not all(map(_is_safe, node.args)):
            yield f"line {node.lineno}: somebody else's console prints this, flextrain.tables.add_row shows it as it is"
        if prints_itself and name in ("Table", "Column"):
            texts = [*node.args, *(value for key, value in given.items() if key in ("title", "caption", "header"))]
            if not all(map(_is_safe, texts)):
                yield f"line {node.lineno}: somebody else's console prints this, give {name} a Text"


def _is_false(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _is_safe(value: ast.expr) -> bool:
    """A constant without brackets, something made of Text, or a part that was checked where it was made."""
    if isinstance(value, ast.Constant):
        return not (isinstance(value.value, str) and "[" in value.value)
    if isinstance(value, ast.Call):
        function = value.func.value if isinstance(value.func, ast.Attribute) else value.func
        return getattr(function, "id", "") in ("Text", "Column")
    if isinstance(value, ast.Name):
        return value.id in ("name", "why", "needs")  # columns of their own, made in the same function
    return False


def _is_status(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "status"


def _is_row(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "add_row"


@pytest.mark.parametrize("file", sources())
def test_nothing_is_read_as_markup(file: str) -> None:
    assert list(complaints((ROOT / file).read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "Console()",
        "_Console(width=3)",
        "Console(markup=False)",
        "from rich import print",
        "from rich.markup import escape",
        "Text.from_markup(reason)",
        "Progress(TextColumn('{task.description}'))",
        "console.status(f'training {name}')",
        "status.update(what)",
        "class A:\n  def __rich__(self):\n    table.add_row(self.name)",
        "class A:\n  def __rich__(self):\n    return Table(title=f'{self.name}')",
    ],
)
def test_the_lint_sees(source: str) -> None:
    assert list(complaints(source))


def test_brackets_of_others_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("needs pip install flextrain[deepspeed] :smile:")
    assert capsys.readouterr().out == "needs pip install flextrain[deepspeed] :smile:\n"
    status = StrategyStatus("DeepSpeed[x]", (), "pip install flextrain[deepspeed]", False, "not [installed]")
    report = Diagnosis({"torch[a]": "2[b]"}, {}, [status], [])
    markup = Console(width=200)  # a notebook's, or anybody's
    with markup.capture() as captured:
        markup.print(report)
    assert all(
        text in captured.get()
        for text in ("DeepSpeed[x]", "flextrain[deepspeed]", "not [installed]", "torch[a]", "2[b]")
    )
