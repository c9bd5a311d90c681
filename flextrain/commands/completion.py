"""`flextrain completion`: a script that completes commands, options and names in bash or zsh."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .output import FoldedHelp

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
    from ..core.base.registry import STRATEGIES
    from ..plan.machines import MACHINES
    from ..reference.catalogue import all_names  # imports torch, which other commands do not need
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


# Completion scripts for bash and zsh, from argparse's parsers. The scripts hold all words: no Python runs when a key
# is hit.


Words = Mapping[tuple[str, str], Collection[str]]
"""What an argument may be, by command and name: ``{("show", "name"): [...]}``."""


@dataclass(frozen=True)
class Values:
    """What an argument may be: words, with commas between them if it takes several; files if there are no words."""

    words: tuple[str, ...] = ()
    has_commas: bool = False


@dataclass
class Grammar:
    """What can follow a command or an action of one.

    Attributes:
        path: the words that lead to it, such as ``("checkpoint", "ls")``; empty: the program alone.
        actions: the words that lead on, with their help.
        flags: options, with their help.
        values: of the options that take a value.
        positionals: what the arguments may be, in order.
    """

    path: tuple[str, ...]
    actions: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    positionals: list[Values] = field(default_factory=list)


def grammars(parsers: Mapping[str, argparse.ArgumentParser], helps: Mapping[str, str], words: Words) -> list[Grammar]:
    """The grammar of the program, of each command, and of each action of a command.

    Args:
        parsers: by command.
        helps: one line for each command.
        words: what arguments may be, if argparse does not say it.
    """
    own = {"--help": "show a help message", "--version": "show the version"}
    found = [Grammar((), dict(helps), own)]
    for name, parser in parsers.items():
        found += _below(parser, (name,), words)
    return found


def _below(parser: argparse.ArgumentParser, path: tuple[str, ...], words: Words) -> Iterator[Grammar]:
    own = Grammar(path)
    nested: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # argparse has no public way to ask a parser for its arguments
        if isinstance(action, argparse._SubParsersAction):
            nested = dict(action.choices)
            own.actions = {each.dest: _one_line(each.help) for each in action._choices_actions}
            continue
        given = words.get((path[0], action.dest)) or action.choices or ()
        values = Values(tuple(map(str, given)), has_commas=action.dest == "strategies")
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if not flags:
            own.positionals.append(values)
        for flag in flags:
            own.flags[flag] = _one_line(action.help)
            if action.nargs != 0:
                own.values[flag] = values
    yield own
    for name, inner in nested.items():
        yield from _below(inner, (*path, name), words)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").split())


def script(shell: str, found: list[Grammar]) -> str:
    """The script for "bash" or "zsh"."""
    return {"bash": _bash, "zsh": _zsh}[shell](found)


_BASH = """\
# bash completion for flextrain, written by `flextrain completion bash`
_flextrain() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" path="" word flag="" taken=0 words="" commas="" valued="" i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        case "$path/$word" in
            {paths}) path="$path/$word"; flag=""; taken=0; continue ;;
        esac
        case "$word" in
            --) return ;;
            -*) flag="$word" ;;
            *) _flextrain_valued; [[ -n $flag && " $valued " == *" $flag "* ]] || ((taken += 1)); flag="" ;;
        esac
    done
    _flextrain_valued
    if [[ -n $flag && " $valued " == *" $flag "* ]]; then
        case "$path $flag" in
{of_flags}
        esac
    elif [[ $cur == -* ]]; then
        case "$path" in
{flags}
        esac
    else
        case "$path $taken" in
{of_positionals}
        esac
    fi
    if [[ -n $commas && $cur == *,* ]]; then
        local before="${{cur%,*}},"
        COMPREPLY=($(compgen -P "$before" -W "$words" -- "${{cur##*,}}"))
    elif [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    fi
}}
_flextrain_valued() {{
    case "$path" in
{valued}
    esac
}}
complete -o bashdefault -o default -F _flextrain flextrain
"""


def _bash(found: list[Grammar]) -> str:
    of_flags, of_positionals = [], []
    for each in found:
        path = _joined(each)
        for flag, values in each.values.items():
            of_flags += _bash_case(f"{path} {flag}", values)
        if each.actions:
            of_positionals += _bash_case(f"{path} 0", Values(tuple(each.actions)))
        for number, values in enumerate(each.positionals):
            of_positionals += _bash_case(f"{path} {number}", values)
    return _BASH.format(
        paths="|".join(_joined(each) for each in found if each.path),
        of_flags="\n".join(of_flags),
        flags=_cases(found, lambda each: f"words={shlex.quote(' '.join(each.flags))}"),
        of_positionals="\n".join(of_positionals),
        valued=_cases(found, lambda each: f"valued={shlex.quote(' '.join(each.values))}"),
    )


def _joined(grammar: Grammar) -> str:
    return "".join(f"/{word}" for word in grammar.path)


def _cases(found: list[Grammar], line: Callable[[Grammar], str]) -> str:
    return "\n".join(f"            '{_joined(each)}') {line(each)} ;;" for each in found)


def _bash_case(where: str, values: Values) -> list[str]:
    if not values.words:
        return []
    commas = "; commas=1" if values.has_commas else ""
    return [f"            '{where}') words={shlex.quote(' '.join(values.words))}{commas} ;;"]


_ZSH = """\
#compdef flextrain
# zsh completion for flextrain, written by `flextrain completion zsh`
_flextrain() {{
    local context state line
    typeset -A opt_args
    local path_of="" word i
    for ((i = 2; i < CURRENT; i++)); do
        case "$path_of/${{words[i]}}" in
            {paths}) path_of="$path_of/${{words[i]}}" ;;
        esac
    done
    local depth=${{#${{(s:/:)path_of}}}}
    [[ -z $path_of ]] && depth=0
    words=("${{words[1]}}" "${{(@)words[depth + 2,-1]}}")
    ((CURRENT -= depth))
    case "$path_of" in
{cases}
    esac
}}
{functions}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _flextrain "$@"
else
    compdef _flextrain flextrain
fi
"""


def _zsh(found: list[Grammar]) -> str:
    functions: list[str] = []
    cases = []
    for each in found:
        specs = [
            shlex.quote(f"{flag}[{_zsh_text(text)}]{_zsh_value(each.values.get(flag), functions)}")
            for flag, text in each.flags.items()
        ]
        if each.actions:
            functions.append(_zsh_described(f"_flextrain_actions{len(functions)}", each.actions))
            specs.append(shlex.quote(f"1:command:_flextrain_actions{len(functions) - 1}"))
        specs += [
            shlex.quote(f"{number}{_zsh_value(values, functions)}") for number, values in enumerate(each.positionals, 1)
        ]
        cases.append(f"        '{_joined(each)}') _arguments {' '.join(specs)} ;;")
    paths = "|".join(_joined(each) for each in found if each.path)
    return _ZSH.format(paths=paths, cases="\n".join(cases), functions="\n".join(functions))


def _zsh_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")


def _zsh_value(values: Values | None, functions: list[str]) -> str:
    """The end of a specification of _arguments; words stand in a function of their own."""
    if values is None:
        return ""
    if not values.words:
        return ":value:_files"
    name = f"_flextrain_words{len(functions)}"
    listed = " ".join(map(shlex.quote, values.words))
    add = f"_values -s , value {listed}" if values.has_commas else f"compadd -- {listed}"
    functions.append(f"{name}() {{\n    {add}\n}}")
    return f":value:{name}"


def _zsh_described(name: str, actions: Mapping[str, str]) -> str:
    lines = "\n".join(f"        {shlex.quote(f'{action}:{text}')}" for action, text in actions.items())
    return f"{name}() {{\n    local -a actions=(\n{lines}\n    )\n    _describe command actions\n}}"
