"""JsonLinesReporter: writes scalars as lines of JSON, next to the log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ...core.registry import REPORTERS
from .reporter import Reporter, plain_value


@REPORTERS.register_module(["JsonLinesReporter", "LocalVisBackend"])
class JsonLinesReporter(Reporter):
    """Writes one JSON object per record to ``scalars.json``, and the configuration to ``config.json``.

    Args:
        save_dir: folder of both files.
        config_save_file: name of the file for the configuration.
        scalar_save_file: name of the file for the scalars.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        config_save_file: str = "config.json",
        scalar_save_file: str = "scalars.json",
    ) -> None:
        super().__init__(save_dir)
        self._config_path = self.save_dir / config_save_file
        self._scalar_path = self.save_dir / scalar_save_file
        self._file: TextIO | None = None
        self._encode = json.JSONEncoder(default=plain_value).encode

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Open the files."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self._config_path.write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
        self.close()
        # The file is line-buffered, so a killed run leaves only whole records.
        self._file = self._scalar_path.open("a", buffering=1, encoding="utf-8")

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Write one line."""
        if self._file is not None:
            self._file.write(self._encode({**scalars, "step": step}) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
