"""pseudo_collate: MMEngine's way of making a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.base.config import check_call
from ...core.base.errors import ConfigError, FlexTrainError
from ...core.base.registry import FUNCTIONS


@FUNCTIONS.register_module()
def pseudo_collate(samples: Sequence[Any]) -> Any:
    """Gather the fields of the samples into lists, without stacking; MMEngine's default.

    Args:
        samples: what the dataset gives: dicts, tuples, lists or anything else, all alike.

    Raises:
        ConfigError: they have lists of different lengths.
    """
    return _gathered(samples, None)


def _gathered(samples: Sequence[Any], key: Any) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: _gathered([sample[key] for sample in samples], key) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_gathered(field, key) for field in zip(*samples, strict=True)))
    if isinstance(first, (list, tuple)):
        if other := next((sample for sample in samples if len(sample) != len(first)), None):
            where = "samples" if key is None else f'"{key}" of samples'
            raise ConfigError(
                f"collate_fn: {where} of one batch are lists of different lengths, {len(first)} and {len(other)}; give a function "
                f"that pads, {PADDING}"
            )
        return [_gathered(field, key) for field in zip(*samples, strict=True)]
    return list(samples)


PADDING = (
    'for texts collate_fn=dict(type="transformers:DataCollatorForSeq2Seq", tokenizer=...), which pads labels too, or '
    "transformers:DataCollatorWithPadding"
)


# The ``collate_fn`` of a configuration: a function, or a class whose instances make batches, such as transformers'
# data collators.


def named_function(cfg: Mapping[str, Any] | str, where: str) -> tuple[Any, dict[str, Any]]:
    """Return the function or class that a configuration names, and its keyword arguments."""
    if isinstance(cfg, Mapping) and "type" not in cfg:
        raise ConfigError(f"{where}.type: missing, say which function")
    kind = cfg["type"] if isinstance(cfg, Mapping) else cfg
    arguments = {key: value for key, value in cfg.items() if key != "type"} if isinstance(cfg, Mapping) else {}
    return FUNCTIONS.resolve(kind, f"{where}.type"), arguments


def check_collate(collate: Any, where: str) -> None:
    """Raise ConfigError if a ``collate_fn`` is invalid; nothing is built."""
    if isinstance(collate, (Mapping, str)):
        function, arguments = named_function(collate, where)
        if inspect.isclass(function):
            if not any("__call__" in vars(base) for base in function.__mro__):
                raise ConfigError(f"{where}.type: {function.__name__} is no collator, its objects cannot be called")
            check_call(function, arguments, where)
            for name, value in arguments.items():
                if _is_described(value):
                    check_call(*named_function(value, f"{where}.{name}"), f"{where}.{name}")
            return
        batch = next(iter(inspect.signature(function).parameters), "")
        check_call(function, arguments, where, (batch,))
    elif not callable(collate):
        raise ConfigError(f"{where}: {collate!r} is not allowed, give a function, its name, or dict(type=...)")


def build_collate(collate: Any, where: str) -> Callable[[Any], Any]:
    """Return the function that makes a batch of samples.

    Args:
        collate: a function; or the name of one, or ``dict(type=..., **arguments)``. Of a class an object is made, and its
            arguments may be described by ``dict(type=...)`` too, such as a tokenizer.
        where: the configuration key, for messages.
    """
    if not isinstance(collate, (Mapping, str)):
        given: Callable[[Any], Any] = collate
        return given
    function, arguments = named_function(collate, where)
    if not inspect.isclass(function):
        # A lambda could not be pickled for worker processes that are not forked.
        named: Callable[[Any], Any] = functools.partial(function, **arguments) if arguments else function
        return named
    described = {name: value for name, value in arguments.items() if _is_described(value)}
    made = {name: _made(value, f"{where}.{name}") for name, value in described.items()}
    return _called(function, arguments | made, where)  # type: ignore[no-any-return]


def _is_described(value: Any) -> bool:
    return isinstance(value, Mapping) and "type" in value


def _made(cfg: Mapping[str, Any], where: str) -> Any:
    return _called(*named_function(cfg, where), where)


def _called(function: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> Any:
    try:
        return function(**arguments)
    except FlexTrainError:
        raise
    except Exception as error:  # such as a tokenizer's folder that is not there
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{where}: {reason}") from error
