"""What a process has once, and each simulated rank needs for itself: kept when its turn ends, and put back when it begins."""

from __future__ import annotations

import inspect
import logging
import os
import random
import sys
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from ...core.process_variables import PROCESS_VARIABLES, each_process_has
from ...core.registry import REGISTRIES
from ...runner.runner import FlexibleRunner

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SCRIPT = "__main__"
_NONE: Any = object()
each_process_has(FlexibleRunner, "__init__")
each_process_has(logging.getLogger("flextrain"), "handlers", "level", "propagate", "filters")
each_process_has(nn.Module, "register_parameter")  # a model that is built without memory replaces it
each_process_has(inspect.unwrap(torch.utils.checkpoint.checkpoint).__kwdefaults__, "context_fn")  # see repeating_in


class OwnState:
    """The state that changes hands with the turn. One object per simulation; a rank's state is what ``keep`` returns."""

    def __init__(self) -> None:
        self._slots: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            (_generators, _set_generators),
            (_environment, _set_environment),
            (_script, _set_script),
            (torch.get_default_dtype, torch.set_default_dtype),
            _Registered().slot,
            (_variables, _set_variables),
        ]

    def keep(self) -> list[Any]:
        """What this rank has now."""
        return [get() for get, _ in self._slots]

    def put_back(self, kept: list[Any]) -> None:
        """Give this rank what it had."""
        for (_, put), value in zip(self._slots, kept, strict=True):
            put(value)


def _variables() -> list[Any]:
    return [variable.get() for variable in PROCESS_VARIABLES]


def _set_variables(values: list[Any]) -> None:
    """Put back the values; those that a rank's turn ended without, because it was before the import, are the initial ones."""
    for variable, value in zip_longest(PROCESS_VARIABLES, values, fillvalue=_NONE):
        variable.set(variable.initial if value is _NONE else value)


def _generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in LAUNCH_VARIABLES}


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _script() -> tuple[Any, ...]:
    return sys.modules[_SCRIPT], sys.argv, list(sys.path)


def _set_script(found: tuple[Any, ...]) -> None:
    sys.modules[_SCRIPT], sys.argv, sys.path[:] = found


class _Registered:
    """Names that a rank's script has registered; those of modules, which are imported once, are shared."""

    def __init__(self) -> None:
        self._names = [registry.module_dict for registry in REGISTRIES]
        self._shared = [-1] * len(self._names)

    @property
    def slot(self) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        return self._take, self._put

    def _take(self) -> dict[int, dict[str, Any]]:
        taken: dict[int, dict[str, Any]] = {}
        for number, names in enumerate(self._names):
            if len(names) == self._shared[number]:
                continue
            own = {name: kind for name, kind in names.items() if getattr(kind, "__module__", "") == _SCRIPT}
            for name in own:
                del names[name]
            self._shared[number] = len(names)
            if own:
                taken[number] = own
        return taken

    def _put(self, taken: dict[int, dict[str, Any]]) -> None:
        for number, own in taken.items():
            self._names[number].update(own)
