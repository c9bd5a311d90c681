"""Reporters that send scalars and pictures to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import html
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...core.base.registry import REPORTERS
from .reporter import Picture, Reporter, as_png, import_extra, numbers


class _Tracker(Reporter):
    """One that draws a chart for each name."""

    _of_training = frozenset({"loss", "time", "data_time"})

    def _points(self, scalars: Mapping[str, Any], mode: str) -> dict[str, float]:
        """Return the numbers; in an evaluation those that training has too, by iteration, are ``val/loss`` and the like."""
        found = numbers(scalars)
        if mode == "train":
            self._of_training |= found.keys()
        apart = self._of_training if mode in ("val", "test") else ()
        return {f"{mode}/{name}" if name in apart else name: value for name, value in found.items()}


@REPORTERS.register_module(["TensorboardReporter", "TensorboardVisBackend"])
class TensorboardReporter(_Tracker):
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
            for name, value in self._points(scalars, mode).items():
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


# WandbReporter: sends scalars and pictures to Weights & Biases.


@REPORTERS.register_module(["WandbReporter", "WandbVisBackend"])
class WandbReporter(_Tracker):
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
            self._run.log(self._points(scalars, mode), commit=self._commit)

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


# MlflowReporter: sends scalars and pictures to MLflow.


# The longest parameter value that MLflow's servers accept.
_MAX_VALUE_LENGTH = 500


@REPORTERS.register_module(["MlflowReporter", "MLflowReporter", "MLflowVisBackend"])
class MlflowReporter(_Tracker):
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
            self._mlflow.log_metrics(self._points(scalars, mode), step=step)

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
