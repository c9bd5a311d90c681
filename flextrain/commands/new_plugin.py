"""`flextrain new plugin NAME`: write a package that adds a strategy, device, hook, source of data or reporter."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ..core.base.errors import ConfigError, counted
from .init_project import IGNORED, TEMPLATES, write_files
from .output import FoldedHelp


class PluginKind(NamedTuple):
    """A kind of plug-in: what it is, its group of entry points, the name and object there, and how a configuration uses it."""

    what: str
    group: str
    name: str
    object: str
    use: str
    test: str = "pytest"


_CHECKS = "pytest --flextrain-strategy my_plugin:MyPluginStrategy"
KINDS = {
    "strategy": PluginKind(
        "how a model is spread over processes, with the conformance checks",
        *("strategies", "MyPluginStrategy", "MyPluginStrategy", 'strategy="my_plugin"', _CHECKS),
    ),
    "device": PluginKind(
        "what flextrain has to know of an accelerator new to torch",
        *("devices", "my_plugin", "DEVICE", 'strategy=dict(type="single", device="my_plugin")'),
    ),
    "hook": PluginKind(
        "code that runs at points of a training",
        *("hooks", "MyPluginHook", "MyPluginHook", 'custom_hooks=[dict(type="MyPluginHook")]'),
    ),
    "source": PluginKind(
        "a dataset",
        *("datasets", "MyPluginDataset", "MyPluginDataset", 'dataset=dict(type="MyPluginDataset", path="rows.csv")'),
    ),
    "reporter": PluginKind(
        "where scalars and pictures of a run are written to",
        *("reporters", "MyPluginReporter", "MyPluginReporter", 'visualizer=[dict(type="MyPluginReporter")]'),
    ),
}
DESCRIPTION = """\
Write a package that others install beside flextrain: pyproject.toml, README.md with two commands, code, and tests that
pass. Its name in configurations comes from an entry point. Nothing is overwritten.

KIND is
"""
DESCRIPTION += "\n".join(f"  {name:<10}{kind.what}" for name, kind in KINDS.items())


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "new", help="write a package with a plug-in", formatter_class=FoldedHelp, description=DESCRIPTION
    )
    command.add_argument("what", choices=["plugin"], metavar="plugin", help="what to write")
    command.add_argument("name", metavar="NAME", help="lower-case words with hyphens between them; also the folder")
    command.add_argument(
        "--kind", choices=KINDS, default="strategy", metavar="KIND", help="see above; default: strategy"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the package; see `new`."""
    folder = Path(arguments.name)
    files = plugin_files(arguments.name, arguments.kind)
    write_files(files, folder, "new")
    commands = re.findall(r"^    (\S.*)$", files[Path("README.md")], re.MULTILINE)
    next_ones = " && ".join([f"cd {shlex.quote(str(folder))}", *commands])
    print(f"{counted(len(files), 'file')} in {folder}; next: {next_ones}")  # noqa: T201
    return 0


def plugin_files(name: str, kind: str) -> dict[Path, str]:
    """Return the texts of a package by their paths.

    Raises:
        ConfigError: ``name`` cannot be the name of a package.
    """
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", name) or keyword.iskeyword(package):
        raise ConfigError(
            f'new.name: "{name}" is not allowed, give lower-case words with hyphens between them: my-plugin'
        )
    chosen, stem = KINDS[kind], "".join(map(str.capitalize, package.removeprefix("flextrain_").split("_")))
    words = {
        "MY_KIND": kind, "MY_GROUP": chosen.group, "MY_NAME": chosen.name, "MY_OBJECT": chosen.object,
        "MY_TEST": chosen.test, "MY_USE": chosen.use, "my_plugin": package, "my-plugin": name, "MyPlugin": stem,
    }  # fmt: skip
    files = {Path(".gitignore"): IGNORED.read_text()}
    for source in (TEMPLATES / "plugin" / "common", TEMPLATES / "plugin" / kind):
        for path in sorted(source.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                key, text = str(path.relative_to(source)), path.read_text()
                for word, meant in words.items():
                    key, text = key.replace(word, meant), text.replace(word, meant)
                files[Path(key)] = text
    return files
