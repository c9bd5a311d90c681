"""Build the hooks of a run from the runner's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.base.config import refuse_foreign
from ...core.base.errors import ConfigError, suggest
from ...core.base.registry import HOOKS
from . import DEFAULT_HOOKS, CheckpointHook, EarlyStoppingHook, Hook, ParamSchedulerHook, get_priority
from .hook import check_methods


def build_hooks(default_hooks: Any, custom_hooks: Any, *, validates: bool) -> list[tuple[Hook, int]]:
    """Build all hooks, with their priorities, in the order of the configuration.

    Args:
        default_hooks: changes to the default hooks by name; None removes one.
        custom_hooks: a list of hooks or their configurations.
        validates: True if the run has validation metrics.

    Raises:
        ConfigError: an entry is invalid; the message names its key.
    """
    built: list[tuple[Hook, int]] = []
    for key, cfg in _resolve(default_hooks, custom_hooks):
        hook = build_hook(cfg, key)
        if not validates:
            _check_needs(hook, key)
        if custom_hooks and isinstance(hook, ParamSchedulerHook):
            _refuse_twice(key, built)
        built.append((hook, priority_of(hook, cfg, key)))
    return built


def _refuse_twice(key: str, built: Sequence[tuple[Hook, int]]) -> None:
    if any(isinstance(hook, ParamSchedulerHook) for hook, _ in built):
        raise ConfigError(
            f"{key}: another ParamSchedulerHook steps the schedules too; leave it out, or set default_hooks.param_scheduler to None"
        )


def build_hook(cfg: Any, key: str) -> Hook:
    """Build the hook that ``cfg`` describes; errors of its constructor name ``key`` instead of the class."""
    if isinstance(cfg, Hook):
        check_methods(cfg, key)
        return cfg
    bare = {name: value for name, value in cfg.items() if name != "priority"} if isinstance(cfg, Mapping) else cfg
    _refuse_other_classes(bare.get("type") if isinstance(bare, Mapping) else bare, key)
    kind = HOOKS.check(bare, key)
    _refuse_other_classes(kind, key)
    if inspect.isclass(kind) and not issubclass(kind, Hook):
        raise ConfigError(f"{key}.type: {kind.__name__} is no Hook, subclass flextrain.Hook")
    try:
        hook = HOOKS.build(bare, key)
    except ConfigError as error:
        name, _, rest = str(error).partition(".")
        raise ConfigError(f"{key}.{rest}" if name in _names(kind) else str(error)) from error.__cause__
    if not isinstance(hook, Hook):
        raise ConfigError(f"{key}.type: gave {type(hook).__name__}, which is no Hook, subclass flextrain.Hook")
    check_methods(hook, key)
    return hook


def _refuse_other_classes(given: Any, key: str) -> None:
    """Raise ConfigError if ``given`` is a hook of another library, or its class."""
    refuse_foreign(given, key, "flextrain.Hook", HOOKS)
    if hasattr(given, "after_train_iter") and not inspect.isclass(given):
        raise ConfigError(f"{key}: {type(given).__name__} is no Hook, subclass flextrain.Hook")


def priority_of(hook: Hook, cfg: Any, key: str) -> int:
    """Return the priority in the configuration, or else the hook's own."""
    given = cfg.get("priority") if isinstance(cfg, Mapping) else None
    return get_priority(hook.priority if given is None else given, f"{key}.priority")


def _resolve(default_hooks: Any, custom_hooks: Any) -> list[tuple[str, Any]]:
    """Return all hooks as (configuration key, hook or configuration)."""
    if default_hooks is not None and not isinstance(default_hooks, Mapping):
        raise ConfigError(
            f"default_hooks: {default_hooks!r} is not allowed, give a dict such as dict(checkpoint=dict(...))"
        )
    if custom_hooks is not None and not isinstance(custom_hooks, (list, tuple)):
        raise ConfigError(f"custom_hooks: {type(custom_hooks).__name__} is not allowed, give a list")
    hooks: dict[str, Any] = {f"default_hooks.{name}": cfg for name, cfg in DEFAULT_HOOKS.items()}
    for name, cfg in (default_hooks or {}).items():
        key = f"default_hooks.{name}"
        if isinstance(cfg, Mapping) and "type" not in cfg:
            if name not in DEFAULT_HOOKS:
                raise ConfigError(f"{key}: unknown key{suggest(name, DEFAULT_HOOKS)} or give it a type")
            cfg = {**DEFAULT_HOOKS[name], **cfg}
        elif name not in DEFAULT_HOOKS and (same_class := _default_of_its_class(cfg, key)):
            raise ConfigError(
                f'{key}: unknown key, did you mean "{same_class}"? A second hook of its class goes into custom_hooks'
            )
        hooks[key] = cfg
    given = [(key, cfg) for key, cfg in hooks.items() if cfg is not None]
    return given + [(f"custom_hooks[{i}]", cfg) for i, cfg in enumerate(custom_hooks or ())]


def _default_of_its_class(cfg: Any, key: str) -> str | None:
    """Return the name of the default hook that has the class of ``cfg``; None if there is none."""
    kind = type(cfg) if isinstance(cfg, Hook) else None if cfg is None else _class_of(cfg, key)
    return next((name for name, default in DEFAULT_HOOKS.items() if _class_of(default, key) is kind), None)


def _class_of(cfg: Any, key: str) -> Any:
    kind = cfg["type"] if isinstance(cfg, Mapping) else cfg
    _refuse_other_classes(kind, key)
    return HOOKS.resolve(kind, f"{key}.type")


def _check_needs(hook: Hook, key: str) -> None:
    """Raise ConfigError if a hook needs metrics and there is no validation."""
    needed = "needs validation, give val_dataloader, val_cfg and val_evaluator"
    if isinstance(hook, CheckpointHook) and hook.saves_best:
        raise ConfigError(f"{key}.save_best: {needed}")
    if isinstance(hook, EarlyStoppingHook):
        raise ConfigError(f"{key}: {needed}")


def _names(kind: Any) -> list[str]:
    return [cls.__name__ for cls in kind.__mro__] if inspect.isclass(kind) else []
