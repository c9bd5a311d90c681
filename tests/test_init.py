"""flextrain init: every project trains as it is written, in one process and in two; nothing is overwritten."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from flextrain.cli import main
from flextrain.commands.init_project import PROJECTS, write_project
from flextrain.testing import WorkerGroup

SHORT = {
    "classification": ["--epochs", "2"],
    "gan": ["--epochs", "2"],
    "language-model": ["--cfg-options", "train_cfg.max_iters=60", "train_cfg.val_interval=30"],
    "mmengine": ["--cfg-options", "train_cfg.max_epochs=2"],
}


def train(folder: Path, command: str, flags: list[str]) -> str:
    """What the project's own command prints, with further flags; in this process."""
    os.chdir(folder)
    program, *arguments = command.split()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        if program == "python":
            sys.argv = [*arguments, *flags]
            runpy.run_path(str(folder / arguments[0]), run_name="__main__")
        else:
            assert main([*arguments, *flags]) == 0
    return out.getvalue()


@pytest.mark.parametrize("kind", PROJECTS)
def test_a_project_is_written_and_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", kind]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / kind
    assert [path.name for path in tmp_path.iterdir()] == [kind]
    assert said.count("\n") == 1
    assert f"cd {kind} && {PROJECTS[kind].command}" in said
    assert {".gitignore", "README.md"} <= {path.name for path in folder.iterdir()}
    # Two commands, and nothing else that looks like one.
    commands = re.findall(r"^    (\S.*?)(?:  .*)?$", (folder / "README.md").read_text(), re.MULTILINE)
    assert commands[0] == PROJECTS[kind].command
    assert len(commands) == 2
    assert commands[1].startswith("torchrun --nproc-per-node 2 ")
    assert not [path for path in folder.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert main(["init", "gan", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"flextrain: init: {tmp_path / 'train.py'} exists and nothing is overwritten, give another folder\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "README.md").symlink_to(tmp_path / "elsewhere")
    assert main(["init", "gan", str(tmp_path)]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["init", "gan", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_into_this_folder_with_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["init", "classification", "."]) == 0
    assert "next: python train.py" in capsys.readouterr().out


def test_an_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["init", "clasification"])
    assert 'did you mean "classification"?' in capsys.readouterr().err


def test_the_classifier_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the other projects, whose modules would stay imported, are trained in processes of their own."""
    write_project("classification", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    printed = train(tmp_path, PROJECTS["classification"].command, SHORT["classification"])
    accuracies = [float(value) for value in re.findall(r"Epoch\(val\).* accuracy: (\d+\.\d+)", printed)]
    assert len(accuracies) == 2
    assert 40 < accuracies[0] < accuracies[-1], "four classes, so chance is 25"
    assert (tmp_path / "work_dirs" / "classification" / "epoch_2").is_dir()


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", PROJECTS)
def test_every_project_trains(kind: str, processes: int, tmp_path: Path) -> None:
    write_project(kind, tmp_path)
    strategy = [] if kind == "gan" or processes == 1 else ["fsdp"]
    flags = [*SHORT[kind]]
    if strategy:
        flags = [*flags, "strategy=fsdp"] if "--cfg-options" in flags else [*flags, "--strategy", "fsdp"]
    with WorkerGroup(processes, 300.0) as group:
        printed, *others = group.run(train, tmp_path, PROJECTS[kind].command, flags)
    assert "Trained" in printed
    assert ("FSDPStrategy on 2 processes" in printed) == bool(strategy)
    assert not any("Epoch(" in each or "Iter(" in each for each in others), "rank 0 alone reports"
    losses = [float(value) for value in re.findall(r"\(train\).* loss: (\d+\.\d+)", printed)]
    assert kind == "gan" or losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["language-model", "mmengine"])
def test_a_project_resumes_and_is_checked(kind: str, tmp_path: Path) -> None:
    write_project(kind, tmp_path)
    command = PROJECTS[kind].command
    with WorkerGroup(1, 300.0) as group:
        group.run(train, tmp_path, command, SHORT[kind])
        (checked,) = group.run(train, tmp_path, command.replace(" train ", " config check "), [])
        longer = [flag.replace("iters=60", "iters=70").replace("epochs=2", "epochs=3") for flag in SHORT[kind]]
        (resumed,) = group.run(train, tmp_path, command, [*longer, "--resume"])
    assert "is right" in checked
    assert "Resumed" in resumed
