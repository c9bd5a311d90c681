"""The flextrain command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import flextrain
from flextrain.cli import main
from flextrain.commands.list_names import registries
from flextrain.core.base.registry import Registry


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"flextrain {flextrain.__version__}\n"


@pytest.mark.processes
def test_run_as_module() -> None:
    done = subprocess.run([sys.executable, "-m", "flextrain", "--version"], capture_output=True, text=True)
    assert done.stdout == f"flextrain {flextrain.__version__}\n"


def test_list_shows_names_with_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "strategies", "--json"]) == 0
    strategies = json.loads(capsys.readouterr().out)
    assert set(strategies) >= {"SingleDeviceStrategy", "DDPStrategy"}
    assert all(strategies.values())
    assert strategies["zero3"] == "short for dict(type='DeepSpeedStrategy', zero_optimization={'stage': 3})"
    assert main(["list", "--json"]) == 0
    assert "CosineAnnealingLR" in json.loads(capsys.readouterr().out)["param-schedulers"]


def test_list_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "optimizers"]) == 0
    assert "AdamW" in capsys.readouterr().out
    assert main(["list"]) == 0
    overview = capsys.readouterr().out
    assert all(word in overview for word in ("strategies", "hooks", "DDPStrategy"))


def test_a_list_in_a_pipe_has_one_name_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {("strategies", "DDPStrategy"), ("strategies", "zero3"), ("optimizers", "AdamW")} <= {
        tuple(line.split()) for line in lines
    }


@pytest.mark.parametrize("kind", registries())
def test_a_description_is_one_sentence(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Of a narrow line; not the signature that ``dataclass`` writes, not a paragraph."""
    assert main(["list", kind, "--json"]) == 0
    for name, description in json.loads(capsys.readouterr().out).items():
        assert len(description) <= 200, (name, description)
        assert not description.startswith(f"{name}("), description


def test_unknown_kind_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "strategy"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert 'did you mean "strategies"?' in error


@pytest.mark.processes
@pytest.mark.parametrize("command", [["list", "--json"], pytest.param(["list", "optimizers"], marks=pytest.mark.full)])
def test_a_reader_that_leaves_early_is_no_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "flextrain", *command], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: object) -> int:
        raise BrokenPipeError("a worker's")

    monkeypatch.setattr("flextrain.commands.doctor.run", run)
    with pytest.raises(BrokenPipeError, match="a worker's"):
        main(["doctor"])


@pytest.mark.parametrize(
    "given, says",
    [
        (["chekpoint"], 'argument COMMAND: "chekpoint" is not allowed, give checkpoint, completion, config, doctor, init, list, plan, report, run, show, test, train or verify, did you mean '
         '"checkpoint"?'),
        (["checkpoint", "lss"], 'argument ACTION: "lss" is not allowed, give ls, show, verify, export or diff, did you mean "ls"?'),
        (["checkpoint", "export", "a", "b", "--dtype", "bfloat"], 'did you mean "bfloat16"?'),
    ],
)  # fmt: skip
def test_a_misspelt_command_gets_the_nearest_name(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(given)
    assert exit_info.value.code == 2
    assert says in capsys.readouterr().err


def test_broken_third_party_name_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Registry("strategy")

    def lookup(name: str) -> None:
        raise OSError("its library is missing")

    broken.add_lookup(lookup, lambda: ["Broken"])
    monkeypatch.setattr("flextrain.core.base.registry.STRATEGIES", broken)
    assert main(["list", "strategies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"Broken": "cannot be loaded: its library is missing"}
