"""JsonLinesReporter: writes scalars as lines of JSON, and pictures as PNG files, next to the log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from ...core.registry import REPORTERS
from .pictures import Picture, as_png
from .reporter import Reporter, plain_value


@REPORTERS.register_module(["JsonLinesReporter", "LocalVisBackend"])
class JsonLinesReporter(Reporter):
    """Writes one JSON object per record to ``scalars.json``, and the configuration to ``config.json``.

    A picture becomes ``vis_image/<name>_<step>.png``, a model's structure ``graph.txt``.

    Args:
        save_dir: folder of the files.
        config_save_file: name of the file for the configuration.
        scalar_save_file: name of the file for the scalars.
        img_save_dir: folder for pictures in ``save_dir``.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        config_save_file: str = "config.json",
        scalar_save_file: str = "scalars.json",
        img_save_dir: str = "vis_image",
    ) -> None:
        super().__init__(save_dir)
        self._image_dir = self.save_dir / img_save_dir
        self._config: dict[str, Any] = {}
        self._config_path = self.save_dir / config_save_file
        self._scalar_path = self.save_dir / scalar_save_file
        self._file: TextIO | None = None
        self._encode = json.JSONEncoder(default=plain_value).encode

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Open the files."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self._config = {}
        self.on_config(config)
        self.close()
        # The file is line-buffered, so a killed run leaves only whole records.
        self._file = self._scalar_path.open("a", buffering=1, encoding="utf-8")

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Write one line."""
        if self._file is not None:
            self._file.write(self._encode({**scalars, "step": step}) + "\n")

    def on_config(self, config: Mapping[str, Any]) -> None:
        """Write the file again, with these settings in it."""
        self._config |= config
        self._config_path.write_text(json.dumps(self._config, indent=2, default=str) + "\n", encoding="utf-8")

    def on_image(self, name: str, image: Picture, step: int) -> None:
        """Write a PNG file."""
        # A name such as "../a" must not leave the folder, and "val/a" makes one in it.
        path = self._image_dir.joinpath(*(part for part in f"{name}_{step}.png".split("/") if part not in ("", "..")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_png(image))

    def on_graph(self, model: nn.Module, data_batch: Any) -> None:
        """Write the modules as torch prints them."""
        (self.save_dir / "graph.txt").write_text(f"{model}\n", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
