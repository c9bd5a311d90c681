"""flextrain completion: bash and zsh complete what is typed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from flextrain.cli import main

TIMEOUT_S = 60.0

COMPLETED = [
    ("sho", "show"),
    ("show EMAH", "show EMAHook"),
    ("show strategy.zero_optimization.offload_o", "show strategy.zero_optimization.offload_optimizer"),
    ("list strategy-", "list strategy-options"),
    ("checkpoint exp", "checkpoint export"),
    ("checkpoint export a b --dt", "checkpoint export a b --dtype"),
    ("checkpoint export a b --dtype bf", "checkpoint export a b --dtype bfloat16"),
    ("verify train.py --strategies ddp,fs", "verify train.py --strategies ddp,fsdp"),
    ("verify train.py --strategies ddp --ste", "verify train.py --strategies ddp --steps"),
    ("init cl", "init classification"),
    ("train conf", "train config.yaml"),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of both shells."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        written = folder / shell
        with pytest.MonkeyPatch.context() as patch, written.open("w") as file:
            patch.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return folder


def candidates(script: Path, line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    code = f'source "$1"; shift; COMP_WORDS=(flextrain "$@"); COMP_CWORD={len(words)}; _shtab_flextrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    command = ["bash", "--norc", "-c", code, "bash", str(script), *words]
    empty = script.parent / "empty"
    empty.mkdir(exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S, cwd=empty)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.processes
def test_bash_is_offered_the_names(scripts: Path) -> None:
    assert candidates(scripts / "bash", "show EMAH") == ["EMAHook"]
    assert {"train", "show", "verify"} <= set(candidates(scripts / "bash", ""))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    "line, offered",
    [
        ("checkpoint ", {"ls", "show", "verify", "export", "diff"}),
        ("plan train.py --machine h", {"h100", "h100-pcie", "h200"}),
        ("verify train.py --strategies zero1,zero", {f"zero1,zero{stage}" for stage in range(4)}),
        ("init gan ", set()),
        ("train config.py ", set()),
        ("plan train.py -- --st", set()),
        ("verify --steps 5 ", set()),
        ("checkpoint diff --part ", {"model", "optimizer"}),
    ],
)
def test_what_bash_is_offered(scripts: Path, line: str, offered: set[str]) -> None:
    assert set(candidates(scripts / "bash", line)) == offered


def typed(command: list[str], script: Path, lines: list[str], folder: Path) -> list[str]:
    """The arguments that the program gets for each line that is typed in an interactive shell and ended by Tab and Enter."""
    terminal, own = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "vt100", "ZDOTDIR": str(folder)}
    shell = subprocess.Popen(
        command, stdin=own, stdout=own, stderr=own, cwd=folder, env=environment, start_new_session=True
    )
    os.close(own)
    seen = ""
    try:
        for line in [f"PS1='rea''dy> '; PROMPT=$PS1; flextrain() {{ echo \"go\"\"t:$*:\"; }}; source {script}"]:
            os.write(terminal, f"{line}\n".encode())
        seen += until(terminal, "ready> ")
        for number, line in enumerate(lines, 1):
            os.write(terminal, f"flextrain {line}\t".encode())
            time.sleep(0.3)  # readline takes what comes at once as pasted text
            os.write(terminal, b"\n")
            while len(re.findall(r"got:(.*?):", seen)) < number:
                seen += until(terminal, ":")
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
    return [found.strip() for found in re.findall(r"got:(.*?):", seen)]


def until(terminal: int, text: str) -> str:
    seen = ""
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], TIMEOUT_S)
        assert ready, f"nothing came after {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_a_user_types_is_completed(shell: str, scripts: Path, tmp_path: Path) -> None:
    """Installed as the help of the command says."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "config.yaml").touch()
    command, script = ["bash", "--norc", "-i"], scripts / "bash"
    if shell == "zsh":
        functions = tmp_path / "functions"
        functions.mkdir()
        shutil.copy(scripts / "zsh", functions / "_flextrain")
        (tmp_path / ".zshrc").write_text(f"fpath+={functions}\nautoload -Uz compinit && compinit -u -D\n")
        command, script = ["zsh", "-i"], Path("/dev/null")
    got = typed(command, script, [line for line, _ in COMPLETED], tmp_path)
    assert got == [full for _, full in COMPLETED]
