"""MMEngine's visualizer as a reporter of flextrain: what is logged goes to its back ends too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import VISUALIZERS
from mmengine.visualization import Visualizer

from ..core.config import check_call
from ..runner.reporting import Reporter
from .registries import factory, find


class VisualizerReporter(Reporter):
    """Gives the scalars of log lines to a visualizer of MMEngine.

    Args:
        given: the visualizer, or its configuration; it is built when ``build`` is called.
    """

    def __init__(self, given: Visualizer | Mapping[str, Any]) -> None:
        super().__init__()
        self._given = given
        self._visualizer: Visualizer | None = None
        self._config, self._file = Config(), ""

    @property
    def visualizer(self) -> Visualizer:
        """MMEngine's visualizer."""
        assert self._visualizer is not None, "the runner builds it"
        return self._visualizer

    def build(self, name: str, log_dir: str, config: Config) -> None:
        """Build the visualizer, as MMEngine's runner does.

        Args:
            name: its name for ``get_instance`` if it has none; an older one of this name is forgotten.
            log_dir: the folder for its back ends, which write to ``vis_data`` in it.
            config: the configuration to record.
        """
        self._config, self._file = config, f"{Path(log_dir).name}.json"
        if isinstance(self._given, Visualizer):
            self._visualizer = self._given
            return
        cfg = {"name": name, "save_dir": log_dir, **self._given}
        for kind in (Visualizer, find(VISUALIZERS, cfg["type"])):
            kind._instance_dict.pop(cfg["name"], None)
        self._visualizer = VISUALIZERS.build(cfg)

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Record the configuration."""
        if len(self._config):
            self.visualizer.add_config(self._config)

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Store one record."""
        self.visualizer.add_scalars(dict(scalars), step=step, file_path=self._file)

    def close(self) -> None:
        """Close the back ends."""
        self.visualizer.close()


def adapted_visualizer(cfg: Any, where: str) -> Any:
    """``visualizer`` for flextrain's runner; reporters of flextrain are taken as they are."""
    if cfg is None:
        cfg = {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]}
    if not isinstance(cfg, Visualizer):
        found = find(VISUALIZERS, cfg["type"]) if isinstance(cfg, Mapping) and "type" in cfg else None
        if not (isinstance(found, type) and issubclass(found, Visualizer)):
            return cfg
        check_call(factory(found), {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}, where)
    return {"type": "Visualizer", "vis_backends": [VisualizerReporter(cfg)], "json_lines": False}
