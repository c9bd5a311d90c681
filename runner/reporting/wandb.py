"""WandbReporter: sends scalars and pictures to Weights & Biases."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...core.registry import REPORTERS
from .pictures import Picture
from .reporter import Reporter, import_extra, numbers


@REPORTERS.register_module(["WandbReporter", "WandbVisBackend"])
class WandbReporter(Reporter):
    """Sends records to Weights & Biases.

    Records are sent without W&B's ``step``, because validation counts epochs and W&B drops records whose step
    decreases. Plot over ``iter`` or ``epoch``.

    Args:
        save_dir: folder for W&B's local files.
        init_kwargs: arguments of ``wandb.init``, such as ``dict(project=..., mode="offline")``.
        define_metric_cfg: ``dict(accuracy="max")``, or a list of arguments of ``wandb.define_metric``.
        commit: argument of ``wandb.log``.
        log_code_name: name under which the source in the working directory is uploaded.

    Raises:
        ConfigError: the package wandb is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        init_kwargs: dict[str, Any] | None = None,
        define_metric_cfg: dict[str, str] | list[dict[str, Any]] | None = None,
        commit: bool = True,
        log_code_name: str | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._wandb = import_extra("wandb", "wandb", "visualizer: WandbReporter")
        self._init_kwargs = dict(init_kwargs or {})
        if isinstance(define_metric_cfg, dict):
            define_metric_cfg = [{"name": name, "summary": summary} for name, summary in define_metric_cfg.items()]
        self._metrics = define_metric_cfg or []
        self._commit = commit
        self._log_code_name = log_code_name
        self._run: Any = None

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Start the run, or continue it."""
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(**{"dir": str(self.save_dir), "config": dict(config), **self._init_kwargs})
        self._init_kwargs.update(id=self._run.id, resume="allow")
        for metric in self._metrics:
            self._run.define_metric(**metric)
        if self._log_code_name:
            self._run.log_code(name=self._log_code_name)

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Send one record."""
        if self._run is not None:
            self._run.log(numbers(scalars), commit=self._commit)

    def on_config(self, config: Mapping[str, Any]) -> None:
        """Add settings to the run's configuration."""
        if self._run is not None:
            self._run.config.update(dict(config), allow_val_change=True)

    def on_image(self, name: str, image: Picture, step: int) -> None:
        """Send a picture; its caption is the step."""
        if self._run is not None:
            self._run.log({name: self._wandb.Image(image, caption=f"step {step}")}, commit=self._commit)

    def on_graph(self, model: nn.Module, data_batch: Any) -> None:
        """Send the modules as text."""
        if self._run is not None:
            text = self._wandb.Html(f"<pre>{html.escape(str(model))}</pre>")
            self._run.log({"graph": text}, commit=self._commit)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
