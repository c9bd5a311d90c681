"""MlflowReporter: sends scalars and pictures to MLflow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...core.registry import REPORTERS
from .pictures import Picture, as_png
from .reporter import Reporter, import_extra, numbers

# The longest parameter value that MLflow's servers accept.
_MAX_VALUE_LENGTH = 500


@REPORTERS.register_module(["MlflowReporter", "MLflowReporter", "MLflowVisBackend"])
class MlflowReporter(Reporter):
    """Sends records to MLflow, and the run's small files at its end.

    Args:
        save_dir: folder of the files to send; if its name is ``vis_data``, those of its parent, a run's log folder, are
            sent. Without a ``tracking_uri`` here or in MLflow's own settings, records are stored in it too, as
            ``mlflow.db``.
        exp_name: name of the experiment; default: MLflow's.
        run_name: name of the run.
        tags: tags of the run.
        params: parameters of the run, in addition to the configuration.
        tracking_uri: address of MLflow's store.
        artifact_suffix: endings of the files to send.
        tracked_config_keys: top-level keys of the configuration to send; default: all.

    Raises:
        ConfigError: the package mlflow is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        exp_name: str | None = None,
        run_name: str | None = None,
        tags: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        tracking_uri: str | None = None,
        artifact_suffix: tuple[str, ...] | list[str] | str = (".json", ".log", ".py", ".yaml"),
        tracked_config_keys: list[str] | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._mlflow = import_extra("mlflow", "mlflow", "visualizer: MlflowReporter")
        self._exp_name = exp_name
        self._run_name = run_name
        self._tags = tags or {}
        self._params = params or {}
        self._tracking_uri = tracking_uri
        self._suffixes = (artifact_suffix,) if isinstance(artifact_suffix, str) else tuple(artifact_suffix)
        self._config_keys = tracked_config_keys
        self._run_id: str | None = None
        self._is_open = False

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Start the run, or continue it."""
        self._choose_experiment()
        is_new = self._run_id is None
        run = self._mlflow.start_run(run_id=self._run_id, run_name=self._run_name)
        self._run_id, self._is_open = run.info.run_id, True
        if is_new:
            self._mlflow.set_tags(self._tags)
            chosen = {k: v for k, v in config.items() if self._config_keys is None or k in self._config_keys}
            values = {**(dict(_flat(chosen)) if chosen else {}), **self._params}
            self._mlflow.log_params({key: str(value)[:_MAX_VALUE_LENGTH] for key, value in values.items()})

    def _choose_experiment(self) -> None:
        mlflow = self._mlflow
        if self._tracking_uri is not None:
            mlflow.set_tracking_uri(self._tracking_uri)
        elif not mlflow.is_tracking_uri_set():
            folder = self.save_dir.absolute()
            folder.mkdir(parents=True, exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
            name = self._exp_name or "flextrain"
            if mlflow.get_experiment_by_name(name) is None:
                # By default MLflow puts files into the current directory.
                mlflow.create_experiment(name, artifact_location=(folder / "mlartifacts").as_uri())
            self._exp_name = name
        if self._exp_name is not None:
            mlflow.set_experiment(self._exp_name)

    def on_scalars(self, scalars: Mapping[str, Any], step: int, mode: str) -> None:
        """Send one record."""
        if self._is_open:
            self._mlflow.log_metrics(numbers(scalars), step=step)

    def on_config(self, config: Mapping[str, Any]) -> None:
        """Send settings as ``config.json``: MLflow refuses to change a parameter."""
        if self._is_open:
            self._mlflow.log_dict(dict(config), "config.json")

    def on_image(self, name: str, image: Picture, step: int) -> None:
        """Send a picture as ``images/<name>_<step>.png``."""
        if not self._is_open:
            return
        folder, _, file = f"images/{name}_{step}.png".rpartition("/")
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / file
            path.write_bytes(as_png(image))
            # MLflow's functions know the run only in the thread that started it.
            self._mlflow.MlflowClient().log_artifact(self._run_id, str(path), folder)

    def on_graph(self, model: nn.Module, data_batch: Any) -> None:
        """Send the modules as ``graph.txt``."""
        if self._is_open:
            self._mlflow.log_text(str(model), "graph.txt")

    def close(self) -> None:
        """Send the files and end the run."""
        if not self._is_open:
            return
        # A run's log lies beside its vis_data; a folder of the user's own may lie beside anything.
        folder = self.save_dir.parent if self.save_dir.name == "vis_data" else self.save_dir
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name.endswith(self._suffixes) and "mlartifacts" not in path.parts:
                self._mlflow.log_artifact(str(path))
        self._mlflow.end_run()
        self._is_open = False


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
