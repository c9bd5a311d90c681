"""`flextrain completion`: a script that completes commands, options and names in bash or zsh."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .formatting import FoldedHelp

DESCRIPTION = """\
Print a script that completes commands, options, and names after `show`, `list` and `--strategies`. Install it with
`flextrain completion SHELL > FILE`, and again after an update. FILE is for

  bash  ~/.local/share/bash-completion/completions/flextrain
  zsh   ~/.zfunc/_flextrain

For bash the package bash-completion reads the file; without it, write `source` and the file's name into ~/.bashrc. For
zsh ~/.zshrc needs `fpath+=~/.zfunc` before `autoload -Uz compinit && compinit`."""


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
    """Print the script; see `completion`."""
    from ..core.registry import STRATEGIES
    from ..tools.planning.machines import MACHINES
    from ..tools.reference import all_names  # imports torch, which other commands do not need
    from ..tools.shell_completion import grammars, script
    from .list_names import kinds

    commands = arguments.commands
    strategies = sorted({*STRATEGIES, *STRATEGIES.short_names()})
    words = {
        ("show", "name"): sorted({*all_names(), *kinds(), *commands.choices}),
        ("list", "kind"): kinds(),
        ("plan", "machine"): sorted(MACHINES),
        ("plan", "strategies"): strategies,
        ("verify", "strategies"): strategies,
    }
    helps = {action.dest: action.help for action in commands._choices_actions}  # private, see shell_completion
    sys.stdout.write(script(arguments.shell, grammars(commands.choices, helps, words)))
    return 0
