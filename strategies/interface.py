"""The version of Strategy's interface, and the names of earlier versions: callers are passed on, overrides are refused."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

from ..core.base.errors import ConfigError
from ..core.base.overriding import refuse_unused
from ..core.version import __version__

INTERFACE_VERSION = 2
"""Raised when a class that is written for an earlier interface would no longer work; docs/strategy_interface.md says what changed."""

# Members of version 1: what has another name now, what a backend registers a function of strategies/parts for, and what is one
# function there for all of them.

_RENAMED = {
    "setup_environment": "join",
    "teardown": "leave",
    "drop_gradients": "abort_update",
    "init_context": "building",
    "change_context": "building",
    "named_parameters": "parameters",
    "state_dict": "state",
    "load_template": "template",
    "load_state_dict": "load",
    "rank": "topology.rank",
    "world_size": "topology.world_size",
    "check_unchanged": "noted.check_unchanged",
}
_REGISTERED = {
    **{name: name for name in (
        "average_buffers", "check_initialised", "check_window", "computed_with", "construct", "explain", "init_weights",
        "keep_own_buffers", "replicas", "shape_of", "share_buffers", "state_memory", "take_written",
    )},
    "for_rehearsal": "rehearsed",
}  # fmt: skip
_ONE_FOR_ALL = (
    "aliases", "appeared", "check_replicas", "elsewhere", "expect_values", "fingerprints_of_left_out", "full_weights",
    "keepers_elsewhere", "left_out", "meet", "note_initialised", "prepare", "saves", "state_left_out",
)  # fmt: skip
_OF_MMENGINE = ("prepare",)

EARLIER = {
    **{name: f"override {'_arrange()' if '.' in new else new}" for name, new in _RENAMED.items()},
    **{
        name: f"register a function for your class: flextrain.strategies.parts.{new}.register"
        for name, new in (
            *_REGISTERED.items(),
            ("_computes_alone", "computes_alone"),
            ("_prepare_whole", "prepare_whole"),
        )
    },
    **{name: f"flextrain.strategies.parts.{name} takes any strategy, rename yours" for name in _ONE_FOR_ALL},
    "prepare": "override setup(model, optim)",
    "check_unchanged": "override _arranged()",
}
"""Methods of earlier versions that a class may still define, each with what to do now."""


def check_interface(kind: type) -> None:
    """Raise ConfigError for a class that is written for another version of the interface, by what it says or defines."""
    stated: Any = getattr(kind, "interface_version", INTERFACE_VERSION)
    versions = stated if isinstance(stated, range) else (stated,)
    if INTERFACE_VERSION not in versions:
        newer = all(isinstance(one, int) and one > INTERFACE_VERSION for one in versions)
        advice = "update flextrain" if newer else "update its package, or change it as docs/strategy_interface.md says"
        raise ConfigError(
            f"strategy: {kind.__name__} is written for version {' or '.join(map(repr, versions))} of Strategy's interface and flextrain {__version__} has "
            f"version {INTERFACE_VERSION}; {advice}"
        )
    refuse_unused(kind, EARLIER, "strategy")


def passed_on(strategy: Any, name: str) -> Any:
    """Return what a public name of version 1 means now, with a warning; names of MMEngine stay without one.

    Raises:
        AttributeError: there was no such name.
    """
    from ..core.base.deprecation import warn_deprecated  # for old names only

    if (new := _RENAMED.get(name)) is not None:
        warn_deprecated(f"Strategy.{name}", since="1.1", removed_in="2.0", instead=f"use Strategy.{new}", stacklevel=3)
        return attrgetter(new)(strategy)
    if (new := _REGISTERED.get(name, name if name in _ONE_FOR_ALL else None)) is None:
        raise AttributeError(f"{type(strategy).__name__!r} object has no attribute {name!r}")
    if name not in _OF_MMENGINE:
        instead = f"use {new}(strategy) of flextrain.strategies.parts"
        warn_deprecated(f"Strategy.{name}", since="1.1", removed_in="2.0", instead=instead, stacklevel=3)
    function = getattr(import_module(f"{__package__}.parts"), new)
    return lambda *args, **kwargs: function(strategy, *args, **kwargs)
