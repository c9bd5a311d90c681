"""MMEngine's visualizer as the visualizer of a run."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import VISUALIZERS
from mmengine.visualization import LocalVisBackend
from mmengine.visualization import Visualizer as Theirs

from ..core.base.config import check_call
from ..runner.reporting import Visualizer
from .registries import factory, found_in_scope, without


class AdaptedVisualizer(Visualizer):
    """Gives everything to a visualizer of MMEngine, which is built when the run has its folder.

    ``Visualizer.get_current_instance()`` of MMEngine returns that one. All of its methods can be called here too.

    Args:
        given: the visualizer, or its configuration.
    """

    def __init__(self, given: Theirs | Mapping[str, Any]) -> None:
        self.theirs: Any = None
        self._theirs_given = given
        self._meta: Any = None
        super().__init__(vis_backends=[], json_lines=False)
        self._whole_config, self._file = Config(), ""

    @property
    def dataset_meta(self) -> Any:
        """The dataset's metainfo."""
        return self._meta

    @dataset_meta.setter
    def dataset_meta(self, meta: Any) -> None:
        self._meta = meta
        if self.theirs is not None and meta is not None:
            self.theirs.dataset_meta = meta

    def build(self, name: str, log_dir: str, config: Config) -> None:
        """Build MMEngine's visualizer, as its runner does.

        Args:
            name: its name for ``get_instance`` if it has none; an older one of this name is forgotten.
            log_dir: the folder for its back ends, which write to ``vis_data`` in it.
            config: the configuration to record.
        """
        self._whole_config, self._file = config, f"{Path(log_dir).name}.json"
        self.theirs = self._theirs_given
        if not isinstance(self._theirs_given, Theirs):
            cfg = {"name": name, "save_dir": log_dir, **self._theirs_given}
            for kind in (Theirs, found_in_scope(cfg, VISUALIZERS)):
                kind._instance_dict.pop(cfg["name"], None)
            self.theirs = VISUALIZERS.build(cfg)

    @property
    def record_dir(self) -> Path | None:
        """See Visualizer; the JSON lines are those of LocalVisBackend."""
        backends = getattr(self.theirs, "_vis_backends", {}).values()
        return next((Path(each._save_dir) for each in backends if isinstance(each, LocalVisBackend)), None)

    def open(self) -> None:
        """See Visualizer; records the configuration."""
        if not self._is_open and self._reports:
            super().open()
            if len(self._whole_config):
                self.theirs.add_config(self._whole_config)

    def report(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """See Visualizer."""
        self.theirs.add_scalars(dict(scalars), step=step, file_path=self._file)

    def close(self) -> None:
        """See Visualizer."""
        if self._is_open:
            super().close()
            self.theirs.close()

    # Methods that Visualizer has too; all others are found by __getattr__.
    add_config: Any = property(attrgetter("theirs.add_config"))
    add_scalar: Any = property(attrgetter("theirs.add_scalar"))
    add_scalars: Any = property(attrgetter("theirs.add_scalars"))
    add_image: Any = property(attrgetter("theirs.add_image"))
    add_graph: Any = property(attrgetter("theirs.add_graph"))
    add_datasample: Any = property(attrgetter("theirs.add_datasample"))
    set_image: Any = property(attrgetter("theirs.set_image"))
    get_image: Any = property(attrgetter("theirs.get_image"))
    get_backend: Any = property(attrgetter("theirs.get_backend"))

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":
            raise AttributeError(name)
        return getattr(self.theirs, name)


def adapted_visualizer(cfg: Any, where: str) -> Any:
    """``visualizer`` for flextrain's runner; reporters and visualizers of flextrain are taken as they are."""
    if cfg is None:
        cfg = {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]}
    if not isinstance(cfg, Theirs):
        found = found_in_scope(cfg, VISUALIZERS) if isinstance(cfg, Mapping) and "type" in cfg else None
        if not (isinstance(found, type) and issubclass(found, Theirs)):
            return without(cfg) if isinstance(cfg, Mapping) else cfg
        check_call(factory(found), without(cfg, "type"), where)
    return AdaptedVisualizer(cfg)
