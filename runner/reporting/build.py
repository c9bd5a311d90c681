"""Build the reporters of a run from the argument ``visualizer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.config import Config, validate
from ...core.errors import ConfigError
from ...core.registry import REPORTERS
from .jsonl import JsonLinesReporter
from .reporter import Reporter


class VisualizerConfig(Config):
    """MMEngine's ``visualizer``; only its settings for scalars are used."""

    type: Any = "Visualizer"
    """"Visualizer"."""
    name: str | None = None
    """Accepted for compatibility; has no effect."""
    vis_backends: list[Any] | None = None
    """Configurations of reporters; an empty list: no reporters."""
    json_lines: bool = True
    """Write JSON lines too, if ``vis_backends`` has only other reporters."""
    save_dir: str | None = None
    """Folder that reporters write to."""


def build_reporters(visualizer: Any = None, save_dir: str | Path = "vis_data") -> list[Reporter]:
    """Build the reporters of a run; they open nothing before ``on_start``.

    Args:
        visualizer: ``dict(type='Visualizer', vis_backends=[...])`` as in MMEngine, or a list of reporters or their
            configurations. JSON lines are written too, unless the list is empty or ``json_lines=False``.
        save_dir: folder for reporters without a folder of their own.

    Raises:
        ConfigError: an invalid configuration, or a package that is not installed.
    """
    where, json_lines = "visualizer", True
    if isinstance(visualizer, Mapping):
        kind = visualizer.get("type", "Visualizer")
        if kind != "Visualizer":
            if isinstance(kind, str) and kind not in REPORTERS:
                raise ConfigError(f'visualizer.type: "{kind}" is not allowed, give "Visualizer" or a list of reporters')
            visualizer = [visualizer]
        else:
            config = validate(VisualizerConfig, visualizer, where)
            visualizer, where = config.vis_backends, "visualizer.vis_backends"
            json_lines = config.json_lines
            if visualizer is None and not json_lines:
                visualizer = []
            save_dir = config.save_dir or save_dir
    if visualizer is None:
        visualizer = [{"type": "JsonLinesReporter"}]
    if not isinstance(visualizer, (list, tuple)):
        raise ConfigError(f"visualizer: {visualizer!r} is not allowed, give a dict, a list of reporters, or None")
    reporters = [_build(cfg, f"{where}[{i}]", save_dir) for i, cfg in enumerate(visualizer)]
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
