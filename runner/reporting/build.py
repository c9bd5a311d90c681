"""Build the reporters of a visualizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.registry import REPORTERS
from .jsonl import JsonLinesReporter
from .reporter import Reporter

_OTHERS = ("ClearMLVisBackend", "NeptuneVisBackend", "DVCLiveVisBackend", "AimVisBackend")  # of MMEngine
REPORTERS.refuse(dict.fromkeys(_OTHERS, "write a subclass of flextrain.runner.reporting.Reporter for it"))


def build_reporters(
    given: Any = None,
    save_dir: str | Path = "vis_data",
    *,
    json_lines: bool = True,
    where: str = "visualizer.vis_backends",
) -> list[Reporter]:
    """Build reporters; they open nothing before ``on_start``.

    Args:
        given: a reporter, its configuration, or a list of them; None: JSON lines.
        save_dir: folder for reporters without a folder of their own.
        json_lines: add JSON lines unless they are in the list, or the list is empty.
        where: the configuration key, for messages.

    Raises:
        ConfigError: an invalid configuration, or a package that is not installed.
    """
    if given is None:
        given = [{"type": "JsonLinesReporter"}] if json_lines else []
    elif isinstance(given, (Mapping, Reporter)):
        given = [given]
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"{where}: {given!r} is not allowed, give a list of reporters")
    reporters = [_build(cfg, f"{where}[{i}]", save_dir) for i, cfg in enumerate(given)]
    if reporters and json_lines and not any(isinstance(reporter, JsonLinesReporter) for reporter in reporters):
        reporters.append(JsonLinesReporter(save_dir))
    return reporters


def _build(cfg: Any, where: str, save_dir: str | Path) -> Reporter:
    if isinstance(cfg, Reporter):
        return cfg
    own = isinstance(cfg, Mapping) and "save_dir" in cfg
    provided: dict[str, Any] = {} if own else {"save_dir": save_dir}
    reporter = REPORTERS.build(cfg, where, **provided)
    if not isinstance(reporter, Reporter):
        raise ConfigError(f"{where}.type: {type(reporter).__name__} is not allowed, give a subclass of Reporter")
    return reporter
