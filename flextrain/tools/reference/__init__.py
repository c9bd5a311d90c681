"""Everything that a user can name, with its arguments: what `flextrain show` prints and the reference pages are made of."""

from .catalogue import all_names, catalogue, find, groups, near, public_names
from .describe import documentation
from .entry import Argument, Entry, Method, Raised
from .launchers import launchers
from .option_keys import runner_options, strategy_options

__all__ = [
    "Argument",
    "Entry",
    "Method",
    "Raised",
    "all_names",
    "catalogue",
    "documentation",
    "find",
    "groups",
    "launchers",
    "near",
    "public_names",
    "runner_options",
    "strategy_options",
]
