"""TensorboardReporter: writes scalars as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.registry import REPORTERS
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
        lines = [f"    {key}: {value}" for key, value in config.items()]
        self._writer.add_text("config", "\n".join(lines))

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Write one point per scalar."""
        if self._writer is not None:
            for name, value in numbers(scalars).items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
