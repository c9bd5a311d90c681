"""The settings of schedulers as plain values, so that a checkpoint can be compared with a configuration."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from .base import INF, ParamScheduler
from .torch_adapter import TorchScheduler

TYPE = "type"
"""Key of the settings: the name of the class."""
FUNCTION = "function "
"""What the text begins with that stands for a function, such as LambdaLR's."""

_NO_SETTINGS = frozenset({"self", "optimizer", "last_step", "verbose"})


def settings(scheduler: ParamScheduler) -> dict[str, Any]:
    """Return the class and the arguments of a scheduler, with defaults, as values that JSON keeps unchanged.

    A function is replaced by its name and a digest of its code, which may also differ between versions of Python.
    """
    if isinstance(scheduler, TorchScheduler):
        options = {name: getattr(scheduler, name) for name in ("begin", "end", "by_epoch", "param_name")}
        known = inspect.signature(scheduler.scheduler).parameters
        defaults = {name: p.default for name, p in known.items() if p.default is not p.empty and name != "last_epoch"}
        options |= {**defaults, **scheduler.options}
        name = f"torch.optim.lr_scheduler.{scheduler.scheduler.__name__}"
    else:
        window = ("param_name", "begin", "end", "by_epoch")
        names = dict.fromkeys((*inspect.signature(type(scheduler)).parameters, *window))
        options = {name: getattr(scheduler, name) for name in names if hasattr(scheduler, name)}
        name = type(scheduler).__name__
    return {TYPE: name, **{key: _as_json(value) for key, value in options.items() if key not in _NO_SETTINGS}}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, each with both values; only the class if that differs."""
    if then.get(TYPE) != now[TYPE]:
        return {TYPE: (then.get(TYPE), now[TYPE])}
    keys = [*now, *(key for key in then if key not in now)]
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def described(all_settings: Sequence[Mapping[str, Any]]) -> str:
    """Return schedulers as a reader knows them, such as ``LinearLR(end=2), CosineAnnealingLR(begin=2)``."""
    return ", ".join(f"{_short(s.get(TYPE))}({', '.join(_arguments(s))})" for s in all_settings) or "none"


def shown(value: Any) -> str:
    """Return a setting for a message."""
    if isinstance(value, str) and value.startswith(FUNCTION):
        return value.rpartition(" ")[0].removeprefix(FUNCTION)
    return "without end" if value == INF else repr(value)


def _arguments(one: Mapping[str, Any]) -> Iterator[str]:
    for key, value in one.items():
        is_usual = (
            value is None or (key, value) in (("begin", 0), ("end", INF)) or key in (TYPE, "param_name", "by_epoch")
        )
        if not is_usual:
            yield f"{key}={shown(value)}"


def _short(name: Any) -> str:
    return str(name).rpartition(".")[2]


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if callable(value):
        return _function(value)
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        if hasattr(value, "__float__"):  # of numpy, or a tensor
            return float(value)
        same = False
    return value if same else f"{FUNCTION}{type(value).__qualname__} -"


def _function(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    what = [_code(code) if code else "", str(getattr(function, "__defaults__", None))]
    what += [repr(c) for cell in cells if isinstance(c := _content(cell), (int, float, str, list, tuple, dict))]
    if code is None:
        what.append(repr(sorted((k, v) for k, v in vars(function).items() if isinstance(v, (int, float, str)))))
    return f"{FUNCTION}{name} {hashlib.sha256(' '.join(what).encode()).hexdigest()[:16]}"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _code(code: CodeType) -> str:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names}"
