"""Names of MMEngine's runners that FlexibleRunner has not, and what to use instead."""

from __future__ import annotations

from typing import Any

from ..core.errors import ConfigError

_AT_FIRST_USE = "train(), val() and test() do it when they begin"
INSTEAD = {
    "build_strategy": "give strategy=... to the runner, and read runner.strategy",
    "build_message_hub": "read runner.message_hub",
    "build_visualizer": "give visualizer=... to the runner, and read runner.visualizer",
    "build_logger": "read runner.logger",
    "wrap_model": "the strategy wraps the model; read runner.model",
    "setup_env": "give env_cfg=... to the runner, which applies it when it is made",
    "set_randomness": "give randomness=dict(seed=...) to the runner",
    "load_or_resume": _AT_FIRST_USE,
    "register_default_hooks": "give default_hooks=dict(...) to the runner",
    "register_hooks": "give default_hooks and custom_hooks to the runner, or call register_hook",
    "dump_config": "the configuration is in the log folder and with the reporters; read runner.cfg",
}
"""Name to what to use."""


class MissingNameError(ConfigError, AttributeError):
    """A name of MMEngine's that is not here; ``hasattr`` is False."""


class _Missing:
    # Not __getattr__: that would also be called, and hide the reason, when a property of a runner ends with an AttributeError.
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, runner: object | None, kind: type) -> Any:
        if runner is None:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {self._name!r}")
        raise MissingNameError(f"runner.{self._name}: is not here, {INSTEAD[self._name]}")


class MissingNames:
    """Answers with what to use when one of these names is asked for."""


for _name in INSTEAD:
    setattr(MissingNames, _name, _Missing(_name))
