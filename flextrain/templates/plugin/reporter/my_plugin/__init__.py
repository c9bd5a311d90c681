"""A reporter: writes every record of a run as a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flextrain.runner.reporting import Reporter


class MyPluginReporter(Reporter):
    """Replace where it writes to. Only rank 0 calls it; the constructor opens nothing."""

    def on_start(self, config: Mapping[str, Any]) -> None:
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self.file = (self.save_dir / "my_plugin.txt").open("a")

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        self.file.write(f"{mode} {step} " + " ".join(f"{name}={value}" for name, value in scalars.items()) + "\n")

    def close(self) -> None:
        self.file.close()
