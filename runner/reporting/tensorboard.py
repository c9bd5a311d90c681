"""TensorboardReporter: writes scalars and pictures as TensorBoard event files."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...core.registry import REPORTERS
from .pictures import Picture
from .reporter import Reporter, import_extra, numbers


@REPORTERS.register_module(["TensorboardReporter", "TensorboardVisBackend"])
class TensorboardReporter(Reporter):
    """Writes event files to ``save_dir``; ``tensorboard --logdir`` shows them.

    Args:
        save_dir: folder of the event files.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, save_dir: str | Path | None = None) -> None:
        super().__init__(save_dir)
        self._module = import_extra("torch.utils.tensorboard", "tensorboard", "visualizer: TensorboardReporter")
        self._writer: Any = None

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Open an event file and write the configuration as text."""
        self.close()
        self._writer = self._module.SummaryWriter(str(self.save_dir))
        self.on_config(config)

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Write one point per scalar."""
        if self._writer is not None:
            for name, value in numbers(scalars).items():
                self._writer.add_scalar(name, value, step)

    def on_config(self, config: Mapping[str, Any]) -> None:
        """Write settings as text."""
        if self._writer is not None:
            self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def on_image(self, name: str, image: Picture, step: int) -> None:
        """Write a picture."""
        if self._writer is not None:
            self._writer.add_image(name, image, step, dataformats="HWC")

    def on_graph(self, model: nn.Module, data_batch: Any) -> None:
        """Write the modules as text: TensorBoard's own graph would need a forward."""
        if self._writer is not None:
            self._writer.add_text("graph", textwrap.indent(str(model), "    "))

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
