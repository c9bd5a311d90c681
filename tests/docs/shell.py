"""Commands on a page: run where that is cheap, and checked: files, names, and flags."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.run

from flextrain import ConfigError
from flextrain.cli import COMMANDS, _Parser, _split
from flextrain.elastic.command_line import read_options

from .pages import ROOT
from .processes import Ended, command, forked, script

IN_A_SHELL = {"cat", "cp", "diff", "echo", "grep", "head", "ls", "mkdir", "mv", "rm", "tail", "touch", "wc"}
CHECKED_ONLY = {"git", "make", "pip"}


@dataclass(frozen=True)
class Line:
    """One command: what is set for it, the words of it, and the file that its output goes to."""

    number: int
    text: str
    variables: dict[str, str]
    words: list[str]
    file: str


def lines(code: str) -> list[Line]:
    """The commands of a block."""
    found, text, start = [], "", 0
    for number, line in enumerate(code.splitlines()):
        start = start if text else number
        if line.endswith("\\"):
            text += line[:-1]
            continue
        words = shlex.split(text + line, comments=True)
        variables, file = {}, ""
        while words and (given := re.match(r"(\w+)=(.*)", words[0])):
            variables[given[1]] = given[2]
            words = words[1:]
        if words[-2:-1] == [">"]:
            words, file = words[:-2], words[-1]
        if words:
            found.append(Line(start, text + line, variables, words, file))
        text = ""
    return found


def run(line: Line, folder: Path) -> Ended:
    """Do what the command does."""
    program, flags = line.words[0], line.words[1:]
    if program in CHECKED_ONLY:
        return Ended("", 0)
    if program in IN_A_SHELL:
        done = subprocess.run(
            line.text, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return Ended(done.stdout, done.returncode)
    if program == "flextrain":
        functions = [command(flags)]
    elif program == "python":
        functions = [_started(flags)]
    elif program == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(flags)
        started = [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]
        functions = [_started(started)] * int(options.nproc_per_node)
    else:
        return Ended(f"{program} is not run here: mark the block", 1)
    done = forked(functions, folder, line.variables)
    if line.file:
        (folder / line.file).write_text(done.output)
    return done


def _started(words: list[str]):  # type: ignore[no-untyped-def]
    if words[:2] == ["-m", "flextrain"]:
        return command(words[2:])
    return script(words[0], words[1:])


def wrong(line: Line) -> str:
    """What is wrong about a command that does not run here; nothing if all that can be checked is right."""
    program, flags = line.words[0], line.words[1:]
    if program == "pip":
        extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
        asked = re.findall(r"flextrain\[([^\]]+)\]|'?\.\[([^\]]+)\]", line.text)
        names = [name for both in asked for group in both for name in group.split(",") if name]
        return "".join(f"no extra {name}" for name in names if not re.search(rf"^{name} = ", extras, re.MULTILINE))
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [
            flag
            for before, flag in zip(["", *flags], flags, strict=False)
            if "=" not in flag and "-C" not in (before, flag)
        ]
        return "".join(f"no target {t}" for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE))
    try:
        if program == "flextrain":
            return _wrong_flags(flags)
        if program == "torchrun":
            options = torch.distributed.run.get_args_parser().parse_args(flags)
            if options.module:
                return _wrong_flags(options.training_script_args) if options.training_script == "flextrain" else ""
            return _wrong_script(options.training_script, options.training_script_args)
    except SystemExit as end:
        return "an option is not known" if end.code else ""
    if program == "python" and flags and flags[0] != "-m":
        return _wrong_script(flags[0], flags[1:])
    return ""


def _wrong_flags(flags: list[str]) -> str:
    own, of_script = _split(flags)
    if own == ["run"]:
        try:
            options = read_options(of_script)
        except ConfigError as error:
            return "" if "is not a file" in str(error) else str(error)
        return "" if "--module" in of_script else _wrong_script(options.script, [])
    if own == ["--version"]:
        return ""
    parser = _Parser(prog="flextrain")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(required=True)
    for each in COMMANDS:
        each.add(commands)
    parser.parse_args(own)
    return ""


def _wrong_script(path: str, flags: list[str]) -> str:
    """Scripts of the repository are there, and know the flags."""
    if not path.startswith(("examples/", "benchmarks/", "tests/")):
        return ""
    if not (ROOT / path).is_file():
        return f"there is no {path}"
    known = (ROOT / path).read_text()
    asked = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    missing = [flag for flag in asked if not re.search(rf"(?<![\w-]){flag}(?![\w-])", known)]
    return f"{path} has no {', '.join(missing)}" if missing else ""
