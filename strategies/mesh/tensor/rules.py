"""Rules of a plan: globs over module names, each with a style."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from ....core.errors import ConfigError, one_of, suggest
from ..plans import nearest_rule


def match_rules(plan: Mapping[str, str], names: Collection[str], styles: Collection[str]) -> dict[str, str]:
    """Return the style of every module that a rule names.

    Args:
        plan: styles by glob, such as ``{"layers.*.up": "colwise"}``; a name without ``*`` is a glob too.
        names: the names of the modules.
        styles: the styles there are; a rule may add an argument, as in "packed_colwise:3".

    Raises:
        ConfigError: an unknown style, a rule that names no module, or two rules of different styles for one module.
    """
    found: dict[str, str] = {}
    by_rule: dict[str, str] = {}
    for rule, style in plan.items():
        where = f'strategy.plan["{rule}"]'
        if not isinstance(style, str):
            raise ConfigError(f"{where}: {style!r} is not allowed, give the name of a style: {one_of(styles)}")
        if style.partition(":")[0] not in styles:
            raise ConfigError(f'{where}: "{style}" is not allowed, choose {one_of(styles)}{suggest(style, styles)}')
        matching = [name for name in names if fnmatchcase(name, rule)]
        if not matching:
            raise ConfigError(f"{where}: names no module of the model{nearest_rule(rule, names)}")
        for name in matching:
            if found.setdefault(name, style) != style:
                raise ConfigError(
                    f'{where}: "{style}" for {name}, for which "{by_rule[name]}" says "{found[name]}"; give one of them'
                )
            by_rule.setdefault(name, rule)
    return found
