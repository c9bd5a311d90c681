"""The reference: a page for each kind of name, from what `flextrain show` prints, and one for the commands."""

from __future__ import annotations

import argparse
import contextlib
import io
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from flextrain.cli import COMMANDS, main
from flextrain.reference.catalogue import groups
from flextrain.reference.entry import Argument, Entry

TITLES = {
    "strategies": "Strategies",
    "strategy-options": "Options of strategies",
    "options": "Arguments of FlexibleRunner",
    "public-names": "Public names",
    "hooks": "Hooks",
    "loops": "Loops",
    "metrics": "Metrics",
    "evaluator": "Evaluators",
    "optim-wrappers": "Optimizer wrappers",
    "optim-wrapper-constructors": "Optimizer wrapper constructors",
    "optimizers": "Optimizers",
    "param-schedulers": "Parameter schedulers",
    "datasets": "Datasets",
    "data-samplers": "Samplers",
    "functions": "Functions",
    "models": "Models",
    "reporters": "Reporters",
    "visualizers": "Visualizers",
}
"""Of each group of names, in the order of the navigation; others follow."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the navigation, before Migration."""
    found = groups()
    order = [*(group for group in TITLES if group in found), *(group for group in found if group not in TITLES)]
    config["reference"] = {"index": index(found, order), **{group: page(group, found[group]) for group in order}}
    config["reference"]["commands"] = commands()
    listed = [{title(group): f"reference/{group}.md"} for group in order]
    pages = [{"Overview": "reference/index.md"}, {"Commands": "reference/commands.md"}, *listed]
    assert config.nav is not None
    names = [next(iter(each)) for each in config.nav]
    config.nav.insert(names.index("Migration"), {"Reference": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name, text in config["reference"].items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def title(group: str) -> str:
    return TITLES.get(group, group.replace("-", " ").capitalize())


def index(found: dict[str, list[Entry]], order: list[str]) -> str:
    lines = ["# Reference", "", "Made from the code. `flextrain show NAME` prints the same of one name.", ""]
    lines += ["| page | names |", "| --- | --- |"]
    lines += [f"| [{title(group)}]({group}.md) | {len(found[group])} |" for group in order]
    return "\n".join([*lines, "| [Commands](commands.md) | |", ""])


def page(group: str, entries: list[Entry]) -> str:
    return f"# {title(group)}\n\n" + "\n".join(section(entry) for entry in entries)


def section(entry: Entry) -> str:
    """One name: what it is, its arguments, and an example."""
    parts = [f"## {plain(entry.name)}", text(entry.summary)]
    if entry.home:
        parts.append(f"`{entry.home}`")
    if entry.unavailable:
        parts.append(f"Not on the machine that built this page: {text(entry.unavailable)}")
    if entry.type:
        default = "" if entry.default is None else f", default `{entry.default}`"
        parts.append(f"Type: `{entry.type}`{default}")
    parts.append(text(entry.text))
    if entry.arguments:
        parts.append(table(entry.arguments))
    if entry.returns:
        parts.append(f"Returns {text(entry.returns)}")
    parts += [f"Raises `{raised.name}`: {text(raised.meaning)}" for raised in entry.raises]
    if entry.methods:
        rows = [
            f"| `{cell(each.name)}` | {code(each.signature)} | {cell(text(each.summary))} |" for each in entry.methods
        ]
        parts.append("\n".join(["| method | signature | |", "| --- | --- | --- |", *rows]))
    if entry.example:
        parts.append(f"```python\n{entry.example.rstrip()}\n```")
    if entry.source:
        parts.append(f"Source: {text(entry.source)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def table(arguments: tuple[Argument, ...]) -> str:
    rows = ["| argument | type | default | meaning |", "| --- | --- | --- | --- |"]
    for each in arguments:
        default = "filled in" if each.is_filled_in else "must be given" if each.default is None else code(each.default)
        rows.append(f"| `{cell(each.name)}` | {code(each.type)} | {default} | {cell(text(each.meaning))} |")
    return "\n".join(rows)


def text(given: str) -> str:
    """Docstrings as Markdown: double backticks are single ones, and nothing else is markup."""
    parts = re.split(r"(``.+?``|`[^`]+`)", given)
    return "".join(f"`{part.strip('`')}`" if part.startswith("`") else plain(part) for part in parts)


def plain(given: str) -> str:
    return re.sub(r"([*_<>\[\]])", r"\\\1", given)


def cell(given: str) -> str:
    return given.replace("|", "\\|").replace("\n", " ")


def code(given: str) -> str:
    """Code in a table: a bar in it divides no cells."""
    return f"`{given}`".replace("\n", " ") if given else ""


def commands() -> str:
    """The help of every command, as a terminal of 100 columns shows it."""
    parser = argparse.ArgumentParser()
    added = parser.add_subparsers()
    for command in COMMANDS:
        command.add(added)
    parts = ["# Commands\n"]
    for name, command in added.choices.items():
        parts.append(f"## flextrain {name}\n\n{helped([name])}")
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                parts += [f"### flextrain {name} {each}\n\n{helped([name, each])}" for each in action.choices]
    return "\n".join(parts)


def helped(words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return f"```text\n{out.getvalue().rstrip()}\n```\n"
