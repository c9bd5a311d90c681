"""Check that all processes have the same configuration, except for settings that may differ."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import torch

from ..core.comm.agreement import first_difference
from ..core.comm.collectives import is_alone
from ..core.errors import ConfigError
from .arguments import Checked
from .hooks import EmptyCacheHook, Hook, ProfilerHook

# These arguments must agree completely. Data, folders and logging may differ between processes.
_ALIKE = (
    "model", "optim_wrapper", "train_cfg", "val_cfg", "test_cfg", "auto_scale_lr", "param_scheduler", "randomness", "compile", "transforms",
)  # fmt: skip
_PRESENT = ("train_dataloader", "val_dataloader", "test_dataloader", "load_from")
# A single process may have these hooks: they use no collectives and change nothing.
_LOOK_ON = (ProfilerHook, EmptyCacheHook)
_PLAIN_TYPES = (type(None), bool, int, float, str, enum.Enum, torch.dtype)


def check_agreement(given: Mapping[str, Any], checked: Checked) -> None:
    """Raise ConfigError on every process if the configurations differ; a collective.

    Args:
        given: the runner's arguments.
        checked: the checked arguments, and the parts built from them.
    """
    if is_alone():
        return
    if found := first_difference(dict(_described(given, checked))):
        raise ConfigError(f"{found}; every process has to be configured alike")


def _described(given: Mapping[str, Any], checked: Checked) -> Iterator[tuple[str, str]]:
    yield "strategy.type", _name(type(checked.strategy))
    yield from _flat("strategy", checked.strategy.config, leave_out=("timeout_s", "launcher"))
    for key in _ALIKE:
        yield from _flat(key, given[key])
    for key in _PRESENT:
        yield key, "not given" if given[key] is None else "given"
    yield "env_cfg.plan", "not given" if checked.options.env_cfg.plan is None else "given"
    for mode in ("val", "test"):
        evaluator = given[f"{mode}_evaluator"]
        for i, metric in enumerate(evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]):
            yield f"{mode}_evaluator[{i}].type", _kind(metric)
    resumed = checked.options.resume_options
    yield "resume", "not given" if resumed is None else "given"
    if resumed is not None:
        yield from _flat("resume", resumed, leave_out=("path",))
    yield from _of_hooks([hook for hook, _ in checked.hooks])


def _of_hooks(hooks: list[Hook]) -> Iterator[tuple[str, str]]:
    """Yield the library's hooks and their settings, because they may run collectives or change training."""
    home, counts = Hook.__module__.rpartition(".")[0], dict[str, int]()
    for hook in hooks:
        kind = next(cls for cls in type(hook).__mro__ if cls.__module__.startswith(home))
        if kind is Hook or issubclass(kind, _LOOK_ON):
            continue
        counts[kind.__name__] = number = counts.get(kind.__name__, 0) + 1
        name = kind.__name__ if number == 1 else f"{kind.__name__} {number}"
        yield name, "a hook"
        own = {
            key: value
            for key, value in vars(hook).items()
            if not key.startswith("_") and isinstance(value, _PLAIN_TYPES)
        }
        yield from _flat(name, own)


def _flat(key: str, value: Any, leave_out: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values as text; an object gives only its class, because its contents cannot be compared."""
    if isinstance(value, pydantic.BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for name in value:
            if name not in leave_out:
                yield from _flat(f"{key}.{name}", value[name])
    elif isinstance(value, (list, tuple)):
        yield key, f"of length {len(value)}"
        for i, item in enumerate(value):
            yield from _flat(f"{key}[{i}]", item)
    elif isinstance(value, _PLAIN_TYPES):
        if not (isinstance(value, str) and ("/" in value or "\\" in value)):  # a path
            yield key, repr(value)
    else:
        yield key, _name(value)


def _kind(cfg: Any) -> str:
    """Return the type of a part, from the part itself or its configuration."""
    return repr(kind) if isinstance(kind := cfg.get("type") if isinstance(cfg, Mapping) else cfg, str) else _name(kind)


def _name(value: Any) -> str:
    """Return a class's or function's name; for another object its class, because its repr may hold an address."""
    if isinstance(value, functools.partial):
        return f"partial of {_name(value.func)}"
    named = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return f"{named.__module__}.{named.__qualname__}"
