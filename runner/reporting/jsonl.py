"""JsonLinesReporter: writes scalars as lines of JSON, and pictures as PNG files, next to the log."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from ...core.base.registry import REPORTERS
from .reporter import Picture, Reporter, as_png, plain_value


@REPORTERS.register_module(["JsonLinesReporter", "LocalVisBackend"])
class JsonLinesReporter(Reporter):
    """Writes one JSON object per record to ``scalars.json``, and the configuration to ``config.json``.

    If the storage fails during the run, records are lost and one warning says so; training goes on.

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
        self._fails = False
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
            line = self._encode({**scalars, "step": step}) + "\n"
            with self._surviving(self._scalar_path):
                self._file.write(line)

    def on_config(self, config: Mapping[str, Any]) -> None:
        """Write the file again, with these settings in it."""
        self._config |= config
        text = json.dumps(self._config, indent=2, default=str) + "\n"
        with self._surviving(self._config_path):
            self._config_path.write_text(text, encoding="utf-8")

    def on_image(self, name: str, image: Picture, step: int) -> None:
        """Write a PNG file."""
        # A name such as "../a" must not leave the folder, and "val/a" makes one in it.
        path = self._image_dir.joinpath(*(part for part in f"{name}_{step}.png".split("/") if part not in ("", "..")))
        content = as_png(image)
        with self._surviving(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def on_graph(self, model: nn.Module, data_batch: Any) -> None:
        """Write the modules as torch prints them."""
        path, text = self.save_dir / "graph.txt", f"{model}\n"
        with self._surviving(path):
            path.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with self._surviving(self._scalar_path):
                file.close()

    @contextlib.contextmanager
    def _surviving(self, path: Path) -> Iterator[None]:
        """Context that turns the failure of storage into one warning until it works again."""
        try:
            yield
        except OSError as error:
            if not self._fails:
                logging.getLogger("flextrain").warning(f"{path}: records are lost, {error.strerror or error}")
            self._fails = True
        else:
            self._fails = False
