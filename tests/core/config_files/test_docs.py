"""What docs/configuration.md says of commands and cases; tests/docs runs its code."""

from __future__ import annotations

import re
from pathlib import Path

from .cases import CASES
from .test_recorded import DIFFERENT

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()


def test_commands_are_those_of_the_command_line() -> None:
    from flextrain.cli import COMMANDS

    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    used = set(re.findall(r"^flextrain (\w+)", block, flags=re.MULTILINE))
    assert used == {"train", "test", "run", "config", "plan"}
    assert {"train_config", "run_script", "configurations", "plan"} <= names


def test_figures() -> None:
    assert f"{len(CASES)} cases are recorded" in PAGE
    assert len(DIFFERENT) == 5
