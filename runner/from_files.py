"""A runner made from a configuration file: its arguments, its other names, and the record of it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..core.config_files import Config, ConfigDict
from ..core.errors import ConfigError, nearest

RESOLVED = "config.py"
"""Name of the file in the work directory."""
_NEAR = 0.86
# Names that MMEngine's configurations have beside the runner's arguments, some of them spelled like these.
_NO_MISTAKES = {
    "custom_imports",
    "data_preprocessor",
    "dataset_type",
    "model_wrapper_cfg",
    "test_pipeline",
    "train_pipeline",
    "val_pipeline",
    "vis_backends",
}


def arguments_of(config: Config, names: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the runner's arguments in ``config``, and lines for the log about names that only look like one.

    Args:
        config: the configuration; all other names stay in it.
        names: those of the runner's arguments.

    Raises:
        ConfigError: a name is almost that of an argument, or ``model`` is missing.
    """
    given = config.imported()
    lines = []
    for name in other_names(given, names):
        if start := next((each for each in names if name.startswith(each)), None):
            lines.append(f"{name} is no argument of the runner, as {start} is; only runner.cfg.{name} has it")
    if "model" not in given:
        raise ConfigError(f"model: missing in {config.filename or 'the configuration'}, it must be given")
    return {name: given[name] for name in given if name in names}, lines


def other_names(given: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the names of values in a configuration that are neither arguments nor imports.

    Raises:
        ConfigError: one is almost that of an argument.
    """
    others = []
    for name, value in given.items():
        if name in names or name in _NO_MISTAKES or callable(value) or inspect.ismodule(value):
            continue
        meant = nearest(str(name), names, _NEAR)
        if meant is not None:
            raise ConfigError(f'{name}: unknown key, did you mean "{meant}"? Else give it another name')
        others.append(name)
    return others


def recorded(own: Mapping[str, Any], cfg: Config | Mapping[str, Any] | None, seed: int) -> dict[str, Any]:
    """Return ``runner.cfg``: the arguments, the whole configuration, and the seed in use."""
    if isinstance(cfg, Config):
        return ConfigDict({**own, **cfg.imported(), "seed": seed})
    return {**own, **(cfg or {}), "seed": seed}


def text_of(cfg: Any) -> tuple[str, str]:
    """Return a configuration as text of a Python file, and why there is none; both are empty for what is no Config."""
    if not isinstance(cfg, Config):
        return "", ""
    try:
        return cfg.pretty_text, ""
    except ConfigError as error:
        return "", f"The configuration is not written to work_dir: {error}"


def write_record(text: str, work_dir: str, log_dir: str) -> None:
    """Write a resolved configuration to the work directory, which has the newest run's, and to the run's log folder."""
    for folder in (work_dir, log_dir):
        Path(folder, RESOLVED).write_text(text, encoding="utf-8")
