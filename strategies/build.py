"""Build the strategy of a run from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..core.base import errors as horovod
from ..core.base.config import refuse_foreign
from ..core.base.errors import ConfigError
from ..core.base.overriding import refuse_unused
from ..core.base.registry import STRATEGIES
from .base import Strategy
from .interface import EARLIER
from .launchers import detect_launch

_NEVER_CALLED = {
    "_setup_distributed": "override join()",
    "_wrap_model": "override _wrap(model)",
    "convert_model": "override _wrap(model)",
    "init_model_weights": "override building(model)",
    "save_checkpoint": "override state()",
    "load_checkpoint": "override template(saved) and load(state)",
}
"""Methods of MMEngine's strategies that flextrain never calls, with the advice for a subclass that defines one."""

STRATEGIES.refuse(dict.fromkeys(("horovod", "Horovod", "HorovodStrategy"), f"{horovod.WHY}; {horovod.INSTEAD}"))


def build_strategy(cfg: Any = None, *, given_as: Mapping[str, str] | None = None, **options: Any) -> Strategy:
    """Return the strategy that ``cfg`` describes, without starting anything.

    Args:
        cfg: a Strategy, ``dict(type=...)``, a class, a name, or None: SingleDeviceStrategy for one process, DDPStrategy
            for several.
        given_as: the keys of ``options`` in the configuration, for messages, as far as they are others.
        options: options of the strategy from other keys of the runner's configuration; None means not given.

    Raises:
        ConfigError: a wrong option, or two different values for one option.
    """
    options, names = {key: value for key, value in options.items() if value is not None}, given_as or {}
    if isinstance(cfg, Strategy):
        return _as_built(cfg, options, names)
    if cfg is None:
        several = detect_launch(options.get("launcher")).world_size > 1
        cfg = {"type": "DDPStrategy" if several else "SingleDeviceStrategy"}
    given = cfg.get("type") if isinstance(cfg, Mapping) else cfg
    if isinstance(given, str) and ":" in given:
        cfg = STRATEGIES.expand(cfg, "strategy")  # it may be a short name with options of its own
        given = cfg["type"]
    if isinstance(given, str) and set(given) & set(":."):
        given = STRATEGIES.resolve(given, "strategy.type")
    refuse_foreign(given, "strategy", "flextrain.Strategy", STRATEGIES)
    if isinstance(cfg, Mapping):
        for key, value in options.items():
            if key in cfg and cfg[key] != value:
                name = names.get(key, key)
                raise ConfigError(f"strategy.{key}: {cfg[key]!r} disagrees with {name}={value!r}, give one of them")
        names = {key: name for key, name in names.items() if key not in cfg}
        cfg = {**options, **cfg}
    else:
        cfg = {**options, "type": cfg}
    other = given if inspect.isclass(given) and not issubclass(given, Strategy) else None
    strategy = STRATEGIES.build(cfg, "strategy") if other is None else other
    if not isinstance(strategy, Strategy):
        name = (other or type(strategy)).__name__
        raise ConfigError(f"strategy.type: {name} is no Strategy, subclass flextrain.Strategy")
    strategy._given_as = {key: names[key] for key in names.keys() & options.keys()}
    refuse_unused(strategy, {**_NEVER_CALLED, **EARLIER}, "strategy.type")
    return strategy


def _as_built(strategy: Strategy, options: Mapping[str, Any], names: Mapping[str, str]) -> Strategy:
    refuse_unused(strategy, {**_NEVER_CALLED, **EARLIER}, "strategy")
    for key, value in options.items():
        if getattr(strategy.config, key) != value:
            raise ConfigError(f"{names.get(key, key)}: the strategy is already built, give {key}={value!r} to it")
    return strategy
