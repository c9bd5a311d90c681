"""The code in docs/configuration.md runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .cases import CASES
from .test_recorded import DIFFERENT

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        if file := re.match(r"# (configs/\S+)\n", block):
            (tmp_path / file[1]).write_text(block)
        else:
            exec(compile(block, "configuration.md", "exec"), {})
    assert capsys.readouterr().out == "configs/large.py:3\n"


def test_commands_are_those_of_the_command_line() -> None:
    from flextrain.cli import COMMANDS

    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    used = set(re.findall(r"^flextrain (\w+)", block, flags=re.MULTILINE))
    assert used == {"train", "run", "config", "plan"}
    assert {"train_config", "run_script", "configurations", "plan"} <= names


def test_figures() -> None:
    assert f"{len(CASES)} cases are recorded" in PAGE
    assert len(DIFFERENT) == 5
