"""Which options of `flextrain checkpoint export` go together."""

from __future__ import annotations

import argparse

from ..core.base.errors import ConfigError, one_of

_NEEDS = {
    "key": ("dcp",),
    "optimizer": ("dcp",),
    "tokenizer": ("hf",),
    "config": ("hf",),
    "base": ("merge",),
    "adapter": ("peft", "merge"),
}
"""Options to those of which they need one."""
_EXCLUDES = {
    "dcp": ("max_shard_size", "force", "hf", "peft"),
    "hf": ("force", "tied_once"),
    "peft": ("force", "tied_once", "max_shard_size", "hf"),
}
"""Options to those that have no effect with them."""


def check_options(arguments: argparse.Namespace) -> None:
    """Check that the options fit together, before anything is read.

    Raises:
        ConfigError: one has no effect.
    """
    where, given = "checkpoint export", {name for name, value in vars(arguments).items() if value not in (None, False)}
    if {"peft", "merge"} <= given:
        raise ConfigError(
            f"{where}: --peft writes the adapter alone and --merge has none in the result, give one of them"
        )
    if {"merge", "optimizer"} <= given:
        raise ConfigError(
            f"{where}: --optimizer has no effect with --merge, the optimizer has no state of merged weights; leave it out"
        )
    for name, needed in _NEEDS.items():
        if name in given and not given.intersection(needed):
            raise ConfigError(f"{where}: {_flag(name)} has no effect without {one_of(map(_flag, needed))}")
    for kind, excluded in _EXCLUDES.items():
        for name in excluded if kind in given else ():
            if name in given:
                raise ConfigError(f"{where}: {_flag(name)} has no effect with {_flag(kind)}, leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
