"""`flextrain init`: write a small project that trains."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.base.errors import ConfigError, counted
from .output import FoldedHelp

TEMPLATES = Path(__file__).parents[1] / "templates"
IGNORED = TEMPLATES / "gitignore"
"""Of every project; its own name would have a meaning in this repository."""


class Project(NamedTuple):
    """A kind of project: what it is, and the command that trains it."""

    what: str
    command: str


PROJECTS = {
    "classification": Project("a script that trains a classifier of pictures, with validation", "python train.py"),
    "language-model": Project("a small GPT and a configuration file", "flextrain train config.py"),
    "gan": Project("a script with two optimizers", "python train.py"),
    "mmengine": Project("registries and configurations as in MMEngine", "flextrain train configs/lines.py"),
}
DESCRIPTION = """\
Write a small project that trains at once: code, README.md and .gitignore. Its data is made by the code or comes with
Python. Nothing is overwritten.

KIND is
"""
DESCRIPTION += "\n".join(f"  {name:<16}{project.what}" for name, project in PROJECTS.items())


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "init", help="write a small project that trains", formatter_class=FoldedHelp, description=DESCRIPTION
    )
    command.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        choices=PROJECTS,
        default="classification",
        help="see above; default: classification",
    )
    command.add_argument("folder", nargs="?", metavar="FOLDER", help="where to; default: a new folder named like KIND")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the project; see `init`."""
    folder = Path(arguments.folder or arguments.kind)
    written = write_project(arguments.kind, folder)
    command = PROJECTS[arguments.kind].command
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"{counted(len(written), 'file')} in {folder}; next: {there}{command}")  # noqa: T201
    return 0


def write_project(kind: str, folder: Path) -> list[Path]:
    """Write the files of a kind of project into a folder, and return them.

    Raises:
        ConfigError: one of them exists, or the folder is a file or cannot be written to; nothing has been written then,
            except before an error of the disk.
    """
    source = TEMPLATES / kind.replace("-", "_")
    own = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = {path.relative_to(source): path.read_text() for path in own} | {Path(".gitignore"): IGNORED.read_text()}
    return write_files(files, folder, "init")


def write_files(files: Mapping[Path, str], folder: Path, command: str) -> list[Path]:
    """Write texts by their paths in a folder, and return the paths.

    Raises:
        ConfigError: see ``write_project``; its message begins with ``command``.
    """
    texts = {folder / path: text for path, text in files.items()}
    if there := next((path for path in texts if path.exists() or path.is_symlink()), None):
        raise ConfigError(f"{command}: {there} exists and nothing is overwritten, give another folder")
    try:
        for target, text in texts.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x") as file:  # it may have come into being since
                file.write(text)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{command}: {error.filename} is a file, give another folder") from None
    except OSError as error:
        raise ConfigError(f"{command}: {error.filename or folder} cannot be written, {error.strerror}") from None
    return list(texts)
