"""`flextrain completion`: a script that completes commands, options and names in bash or zsh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .output import FoldedHelp

DESCRIPTION = """\
Print a script that completes commands, options, and names after `show`, `list` and `--strategies`. Install it with
`flextrain completion SHELL > FILE`, and again after an update. FILE is for

  bash  ~/.local/share/bash-completion/completions/flextrain
  zsh   ~/.zfunc/_flextrain

For bash the package bash-completion reads the file; without it, write `source` and the file's name into ~/.bashrc. For
zsh ~/.zshrc needs `fpath+=~/.zfunc` before `autoload -Uz compinit && compinit`."""

_WITH_COMMAS = {
    "bash": '_flextrain_strategies() {{\n    local before=""\n    [[ $1 != *,* ]] || before="${{1%,*}},"\n'
    '    compgen -P "$before" -W "{names}" -- "${{1##*,}}"\n}}',
    "zsh": "_flextrain_strategies() {{\n    _values -s , strategy {names}\n}}",
}
"""A function for names with commas between them, which shtab has no completion for."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "completion",
        help="print a script that completes names in bash or zsh",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")
    command.set_defaults(run=run, commands=commands)


def run(arguments: argparse.Namespace) -> int:
    """Print the script; it holds all names, so that no Python runs when a key is hit."""
    import shtab  # takes half a second

    from ..core.base.registry import STRATEGIES
    from ..plan.machines import MACHINES
    from ..reference.catalogue import all_names  # imports torch, which other commands do not need
    from .list_names import kinds

    commands = arguments.commands
    names = " ".join(sorted({*STRATEGIES, *STRATEGIES.short_names()}))
    words = {
        ("show", "name"): sorted({*all_names(), *kinds(), *commands.choices}),
        ("list", "kind"): kinds(),
        ("plan", "machine"): sorted(MACHINES),
    }
    for name, parser in commands.choices.items():
        _say_what_may_follow(parser, name, words, shtab.FILE)
    function = _WITH_COMMAS[arguments.shell].format(names=names)
    sys.stdout.write(shtab.complete(arguments.parser, arguments.shell, preamble=function) + "\n")
    return 0


def _say_what_may_follow(
    parser: argparse.ArgumentParser, command: str, words: Mapping[tuple[str, str], Sequence[str]], files: Any
) -> None:
    """Tell shtab what argparse does not know: names that a command checks by itself, and that the rest are files."""
    for action in parser._actions:  # argparse has no public way to ask a parser for its arguments
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _say_what_may_follow(inner, command, words, files)
        elif action.dest == "strategies":
            action.complete = dict.fromkeys(_WITH_COMMAS, "_flextrain_strategies")  # type: ignore[attr-defined]
        elif known := words.get((command, action.dest)) or action.choices:
            action.choices = list(known)  # shtab takes a mapping for subcommands
        elif action.nargs != 0:
            action.complete = files  # type: ignore[attr-defined]
