"""Tables of the commands: no width of a terminal breaks a name, and a pipe gets a line for each row."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from flextrain.commands.output import console as of_commands
from flextrain.tables import WIDEST, FittedTable

ROWS = [
    ("DeepSpeedStrategy\nzero0, zero3", "yes", "torch.distributed, deepspeed (pip install 'flextrain[deepspeed]')"),
    (
        "model.layers.11.attention.projection.weight",
        "no",
        "a sentence of many words, so that it has to be wrapped somewhere",
    ),
]
WORDS = {word for row in ROWS for cell in row for word in cell.split()}


def table() -> FittedTable:
    made = FittedTable("name", "runs here", "needs", title="Strategies", caption=Text("what follows"))
    for row in ROWS:
        made.add_row(*row)
    return made


def shown(width: int) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width, markup=False, emoji=False, color_system=None).print(table())
    return [line.rstrip() for line in output.getvalue().splitlines()]


@pytest.mark.parametrize("width", [46, 60, 80, 110, 200])
def test_no_name_is_broken_and_no_line_is_too_long(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= min(width, WIDEST)
    words = {word.strip(",;") for line in lines for word in line.replace("│", " ").split()}
    assert {word.strip(",;") for word in WORDS} <= words
    assert "what follows" in " ".join(lines)


def test_a_wide_terminal_gets_a_frame_and_a_narrow_one_paragraphs() -> None:
    assert any("│" in line for line in shown(80))
    assert shown(46)[:4] == [
        "Strategies",
        "DeepSpeedStrategy, zero0, zero3",
        "  runs here: yes; needs: torch.distributed,",
        "  deepspeed (pip install",
    ]


def test_names_may_take_more_than_a_table_usually_does() -> None:
    long = FittedTable("key", "value")
    long.add_row("k" * 130, "v")
    output = io.StringIO()
    Console(file=output, width=200, markup=False, emoji=False).print(long)
    assert "k" * 130 in output.getvalue()


def test_a_pipe_gets_a_line_for_each_row_without_a_frame(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    of_commands().print(table())
    assert capsys.readouterr().out.splitlines() == [
        "Strategies",
        "name                                         runs here  needs",
        "DeepSpeedStrategy, zero0, zero3              yes        " + ROWS[0][2],
        "model.layers.11.attention.projection.weight  no         " + ROWS[1][2],
        "what follows",
    ]
