"""The flextrain command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flextrain
from flextrain.cli import main
from flextrain.commands.list_names import registries
from flextrain.commands.output import console, red
from flextrain.core.base.registry import Registry

from .test_doctor import package


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
@pytest.mark.parametrize("command", [["list", "--json"], pytest.param(["list", "models"], marks=pytest.mark.full)])
def test_a_reader_that_leaves_early_is_no_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "flextrain", *command], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.full
@pytest.mark.processes
def test_what_libraries_say_is_no_part_of_a_list() -> None:
    """DeepSpeed logs to standard output when it is imported."""
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "flextrain", "list", "optimizers", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "FusedLamb" in json.loads(done.stdout)
    assert "real_accelerator" in done.stderr


def test_another_pipe_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: object) -> int:
        raise BrokenPipeError("a worker's")

    monkeypatch.setattr("flextrain.commands.doctor.run", run)
    with pytest.raises(BrokenPipeError, match="a worker's"):
        main(["doctor"])


@pytest.mark.parametrize(
    "given, says",
    [
        (["chekpoint"], 'argument COMMAND: "chekpoint" is not allowed, give checkpoint, completion, config, doctor, init, list, new, plan, report, run, show, test, train or verify, did you mean '
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


@pytest.mark.parametrize(
    "given, says",
    [
        ("list --jsno", 'flextrain list: error: "--jsno" is not allowed, did you mean "--json"?'),
        ("show --jsno", 'flextrain show: error: "--jsno" is not allowed, did you mean "--json"?'),
        ("verify --strategis ddp x.py", 'flextrain verify: error: "--strategis" is not allowed, did you mean "--strategies"?'),
        ("verify --strategis=ddp x.py", 'flextrain verify: error: "--strategis" is not allowed, did you mean "--strategies"?'),
        ("verify x.py --lr 3", 'flextrain verify: error: "--lr" is not allowed, arguments of the script come after --'),
        ("list machines --js", 'flextrain list: error: "--js" is not allowed, did you mean "--json"?'),
        ("verify x.py --to 1", 'flextrain verify: error: "--to" is not allowed, did you mean "--tolerance"?'),
        ("init x -k", 'flextrain init: error: "-k" is not allowed, give --help'),
        ("checkpoint --jsno ls x", 'flextrain checkpoint: error: "--jsno" is not allowed, give --help'),
        ("checkpoint ls --jsno x", 'flextrain checkpoint ls: error: "--jsno" is not allowed, did you mean "--json"?'),
        ("--vresion", 'flextrain: error: "--vresion" is not allowed, did you mean "--version"?'),
        ("--version=3", "flextrain: error: argument --version: ignored explicit argument '3'"),
        ("show a b", 'flextrain show: error: "b" is one argument too many'),
        ("list hooks -3", 'flextrain list: error: "-3" is one argument too many'),
        ("verify x.py --steps 3x", "flextrain verify: error: argument --steps: invalid int value: '3x'"),
        ("verify x.py --steps", "flextrain verify: error: argument --steps: expected one argument"),
        ("checkpoint diff a", "flextrain checkpoint diff: error: the following arguments are required: B"),
        ("checkpoint", "flextrain checkpoint: error: the following arguments are required: ACTION"),
        ("list -- x", "flextrain: error: arguments after -- belong to a script, and this command runs none"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str], given: str, says: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(given.split())
    assert exit_info.value.code == 2
    assert capsys.readouterr() == ("", f"{says}\n")


def test_notes_on_a_terminal_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(FORCE_COLOR="1", COLUMNS="80", TERM="xterm-256color").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = console()
    with out.capture() as captured:
        out.print("3 of 7 in 'x'", red("7"))
    assert captured.get() == "3 of 7 in 'x' \x1b[31m7\x1b[0m\n"


# Commands of other packages


THEIRS = """
import sys

print("loaded")  # as some libraries do

def add(commands):
    print("added")
    command = commands.add_parser("spectrum", help="show norms of 100%% of the weights", aliases=["spec"])
    command.add_argument("checkpoint", metavar="CHECKPOINT")
    command.add_argument("--top", type=int, help="keep 50% of %(dest)s")
    command.set_defaults(run=run)

def run(arguments):
    print(arguments.checkpoint, arguments.top)
    return 3
"""
POINTS = """[flextrain.commands]
spectrum = their_spectrum
norms = their_spectrum:add_norms
half = their_spectrum:add_norms
broken = their_spectrum:missing
leaves = their_spectrum:leave
idle = their_spectrum:add_idle
no_add = their_spectrum:no_add
absent = their_spectrum:add_nothing
train = their_spectrum:missing
"""
NORMS = """
def add_norms(commands):
    commands.add_parser("norms", help="").set_defaults(run=lambda arguments: None)
    commands.add_parser("half", help="keeps 50% of it, 100% sure").set_defaults(run=lambda arguments: "done")
    commands.add_parser("else", help="cannot be called")

def add_nothing(commands):
    commands.add_parser("another")

def add_idle(commands):
    commands.add_parser("idle")

def leave(commands):
    sys.exit(3)

no_add = 3
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with commands, of which some are broken, and one has a name of the library's."""
    package(tmp_path, "their_spectrum", "1.0", THEIRS + NORMS, entry_points=POINTS)
    (tmp_path / "others").mkdir()
    other = package(tmp_path / "others", "others", "2.0", "", entry_points="[flextrain.commands]\nspectrum = others\n")
    monkeypatch.syspath_prepend(other)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_spectrum", None)


BROKEN = 'flextrain: command "broken" of their_spectrum: cannot be loaded: '
TWICE = 'flextrain: command "spectrum" of others is left out, that of their_spectrum comes first\n'


@pytest.mark.usefixtures("theirs")
def test_a_command_of_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "machines"]) == 0
    assert main(["show", "EMAHook"]) == 0
    with pytest.raises(SystemExit):
        main(["spectrm", "x"])
    assert 'did you mean "spectrum"?' in capsys.readouterr().err
    assert main(["show", "spectrm"]) == 2
    assert 'did you mean "spectrum"' in capsys.readouterr().err
    assert "their_spectrum" not in sys.modules, "nobody has asked for it"
    assert main(["spectrum", "x", "--top", "2"]) == 3
    assert capsys.readouterr() == ("x 2\n", f"loaded\nadded\n{TWICE}")
    with pytest.raises(SystemExit):
        main(["spectrum", "x", "--tpo", "2"])
    said = 'flextrain spectrum: error: "--tpo" is not allowed, did you mean "--top"?\n'
    assert capsys.readouterr().err == f"added\n{TWICE}{said}"
    assert main(["norms"]) == 0
    assert main(["show", "spectrum"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: flextrain spectrum")
    assert "keep 50% of top" in said
    assert main(["list", "plugins", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["others 2.0"] == "commands: spectrum (that of their_spectrum counts)"
    assert found["their_spectrum 1.0"].startswith("commands: spectrum, commands: norms, ")
    assert found["their_spectrum 1.0"].endswith("commands: train (that of flextrain counts)")


@pytest.mark.usefixtures("theirs")
def test_commands_of_other_packages_are_listed_with_their_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out, error = capsys.readouterr()
    said = " ".join(out.split())
    assert "spectrum show norms of 100% of the weights (their_spectrum)" in said
    assert "train train what a configuration file describes verify" in said, "the library's own comes first"
    assert "half keeps 50% of it, 100% sure (their_spectrum)" in said
    assert error.startswith(f"loaded\nadded\n{BROKEN}")
    start = 'flextrain: command "{}" of their_spectrum: cannot be loaded: {}\n'
    assert error.endswith(
        start.format("leaves", "SystemExit: 3")
        + start.format("no_add", "their_spectrum:no_add has no function add, the entry point has to name the function")
        + start.format("absent", "their_spectrum:add_nothing has added no command of this name")
        + TWICE
    )
    assert error.count("\n") == 7
    assert main(["list", "commands", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"doctor", "train"} <= found.keys()
    assert {name: said for name, said in found.items() if "their" in said} == {
        "norms": "(their_spectrum)",
        "half": "keeps 50% of it, 100% sure (their_spectrum)",
        "spectrum": "show norms of 100% of the weights (their_spectrum)",
    }
    assert "else" not in found, "it cannot be called"
    assert main(["completion", "bash"]) == 0
    assert "_shtab_flextrain_spectrum_option_strings=(-h --help --top)" in capsys.readouterr().out


@pytest.mark.usefixtures("theirs")
def test_a_broken_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broken", "x", "--y"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 2)
    assert error.startswith(f"loaded\n{BROKEN}")
    assert "missing" in error


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    "name, says",
    [
        ("idle", "has nothing to run, give set_defaults(run=...), and no argument that name"),
        ("half", "run has returned a str, give the exit status, or None for 0"),
    ],
)
def test_a_command_without_run_or_status_is_one_line(capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    assert main([name]) == 2
    assert capsys.readouterr() == ("", f'loaded\nflextrain: command "{name}" of their_spectrum: {says}\n')


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_broken_third_party_name_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    broken = Registry("strategy")

    def lookup(name: str) -> None:
        raise kind("its library is missing")

    broken.add_lookup(lookup, lambda: ["Broken"])
    monkeypatch.setattr("flextrain.core.base.registry.STRATEGIES", broken)
    assert main(["list", "strategies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"Broken": "cannot be loaded: its library is missing"}
