"""Reporters: what they write, that nothing opens early, and what is said when a package is missing."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flextrain import REPORTERS, ConfigError
from flextrain.runner.reporting import JsonLinesReporter, Reporter, TensorboardReporter, build_visualizer
from flextrain.runner.reporting.reporter import describe
from flextrain.runner.reporting.trackers import MlflowReporter, WandbReporter

from .training import refuses

IMAGE = np.zeros((2, 2, 3), np.uint8)


class Calls:
    """Stands for a module or object; keeps what was called, as (name, positional, named)."""

    def __init__(self, log: list[Any], name: str = "") -> None:
        self._log, self._name = log, name
        self.id = self.run_id = "run-1"

    def __getattr__(self, name: str) -> Calls:
        if name.startswith("__"):
            raise AttributeError(name)
        return Calls(self._log, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> Calls:
        self._log.append((self._name, args, kwargs))
        return self


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """``stub(name)`` puts a package in place that only keeps its calls."""

    def make(name: str) -> list[Any]:
        log: list[Any] = []
        module = types.ModuleType(name)
        module.__getattr__ = Calls(log).__getattr__  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
        return log

    return make


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``missing(name)`` makes a package as if it were not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]


def build_all(given: Any, save_dir: Path | str = "vis_data") -> list[Reporter]:
    """The reporters of a run that is given this visualizer."""
    visualizer = build_visualizer(given)
    visualizer.belong_to_run("test", Path(save_dir), {}, reports=True)
    return visualizer.reporters


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_records_and_steps_and_can_be_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "vis_data"
    reporter = JsonLinesReporter(folder)
    assert not folder.exists(), "a constructor opens nothing"
    reporter.on_scalars({"lost": 1.0}, step=0, mode="train")
    for step in (10, 20):
        reporter.on_start({"max_epochs": 3})
        reporter.on_scalars({"loss": 1.5, "epoch": 1, "table": torch.eye(2)}, step=step, mode="train")
        written = read_lines(folder / "scalars.json")
        assert written[-1] == {"loss": 1.5, "epoch": 1, "table": [[1.0, 0.0], [0.0, 1.0]], "step": step}, "at once"
        reporter.close()
        reporter.close()
    assert [record["step"] for record in written] == [10, 20]
    assert json.loads((folder / "config.json").read_text()) == {"max_epochs": 3}


def test_tensorboard_gets_numbers_by_name_and_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reporter = TensorboardReporter(tmp_path / "tb")
    assert not (tmp_path / "tb").exists()
    reporter.on_scalars({"lost": 1.0}, step=0, mode="train")
    reporter.on_start({"lr": 0.1})
    reporter.on_scalars({"loss": 1.5, "name": "text"}, step=10, mode="train")
    reporter.on_scalars({"accuracy": 0.5, "loss": 2.0, "time": 0.1}, step=1, mode="val")
    reporter.on_scalars({"accuracy": 0.5, "f1": 0.5}, step=20, mode="train")
    reporter.on_scalars({"accuracy": 0.25, "f1": 0.5}, step=2, mode="test")
    reporter.close()
    reporter.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    # What training has by the iteration and an evaluation by the epoch is not one chart.
    apart = ["test/accuracy", "test/f1", "val/loss", "val/time"]
    assert sorted(events.Tags()["scalars"]) == ["accuracy", "f1", "loss", *apart]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 1.5)]
    assert [(event.step, event.value) for event in events.Scalars("accuracy")] == [(1, 0.5), (20, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("val/loss")] == [(1, 2.0)]


def test_wandb_goes_on_with_its_run_after_close(tmp_path: Path, stub: Callable[[str], list[Any]]) -> None:
    log = stub("wandb")
    init = {"project": "digits", "mode": "offline"}
    reporter = WandbReporter(tmp_path, init_kwargs=init, define_metric_cfg={"accuracy": "max"}, commit=False)
    reporter.on_scalars({"lost": 1.0}, step=0, mode="train")
    assert log == []
    for _ in range(2):
        reporter.on_start({"lr": 0.1})
        reporter.on_scalars({"loss": 1.5, "name": "text"}, step=10, mode="train")
        reporter.close()
        reporter.close()
    first = {"dir": str(tmp_path), "config": {"lr": 0.1}, "project": "digits", "mode": "offline"}
    during = [
        ("init.define_metric", (), {"name": "accuracy", "summary": "max"}),
        ("init.log", ({"loss": 1.5},), {"commit": False}),
        ("init.finish", (), {}),
    ]
    again = {**first, "id": "run-1", "resume": "allow"}
    assert [entry for entry in log if entry[0] == "init"] == [("init", (), first), ("init", (), again)]
    assert [entry for entry in log if entry[0] != "init"] == during * 2
    assert init == {"project": "digits", "mode": "offline"}, "the configuration is not changed"


def test_mlflow_gets_parameters_metrics_and_small_files(tmp_path: Path, stub: Callable[[str], list[Any]]) -> None:
    log = stub("mlflow")
    (tmp_path / "vis_data").mkdir()
    for name in ("run.log", "vis_data/scalars.json", "weights.pth"):
        (tmp_path / name).write_text("x")
    reporter = MlflowReporter(
        tmp_path / "vis_data",
        exp_name="digits",
        tags={"team": "a"},
        params={"extra": 1},
        tracking_uri="sqlite:///x.db",
        tracked_config_keys=["train_cfg"],
    )
    reporter.on_scalars({"lost": 1.0}, step=0, mode="train")
    assert log == []
    reporter.on_start({"train_cfg": {"max_epochs": 3, "long": "y" * 600}, "model": "hidden"})
    reporter.on_scalars({"loss": 1.5, "name": "text"}, step=10, mode="train")
    reporter.close()
    reporter.close()
    calls = {name.rpartition(".")[2]: (args, kwargs) for name, args, kwargs in log if name != "log_artifact"}
    assert calls["set_tracking_uri"][0] == ("sqlite:///x.db",)
    assert calls["set_experiment"][0] == ("digits",)
    assert calls["set_tags"][0] == ({"team": "a"},)
    assert calls["log_params"][0] == ({"train_cfg.max_epochs": "3", "train_cfg.long": "y" * 500, "extra": "1"},)
    assert calls["log_metrics"] == (({"loss": 1.5},), {"step": 10})
    artifacts = [Path(args[0]).name for name, args, _ in log if name == "log_artifact"]
    assert sorted(artifacts) == ["run.log", "scalars.json"]
    assert [name for name, _, _ in log].count("end_run") == 1
    log.clear()
    reporter.on_start({})
    names = [name for name, _, _ in log]
    assert "log_params" not in names, "the run has them"
    assert log[names.index("start_run")][2]["run_id"] is not None


def test_mlflow_keeps_a_record_beside_the_log_unless_told_another_place(
    tmp_path: Path, stub: Callable[[str], list[Any]]
) -> None:
    log = stub("mlflow")
    reporter = MlflowReporter(tmp_path / "vis_data")
    reporter.on_start({})
    assert "set_tracking_uri" not in [name for name, _, _ in log], "MLflow's own setting stands"
    log.clear()
    mlflow: Any = sys.modules["mlflow"]
    mlflow.is_tracking_uri_set = lambda: False
    mlflow.get_experiment_by_name = lambda name: None
    MlflowReporter(tmp_path / "vis_data").on_start({})
    calls = {name: (args, kwargs) for name, args, kwargs in log}
    assert calls["set_tracking_uri"][0] == (f"sqlite:///{tmp_path}/vis_data/mlflow.db",)
    artifacts = {"artifact_location": f"file://{tmp_path}/vis_data/mlartifacts"}
    assert calls["create_experiment"] == (("flextrain",), artifacts)
    assert calls["set_experiment"][0] == ("flextrain",)


def test_wandb_gets_pictures_settings_and_graphs(tmp_path: Path, stub: Callable[[str], list[Any]]) -> None:
    log = stub("wandb")
    reporter = WandbReporter(tmp_path)
    for _ in range(2):  # the first time nothing is open
        reporter.on_image("val/sample", IMAGE, 3)
        reporter.on_config({"a": 1})
        reporter.on_graph(torch.nn.Linear(1, 1), None)
        calls = {name: (args, kwargs) for name, args, kwargs in log}
        log.clear()
        reporter.on_start({})
    (image,), caption = calls["Image"]
    assert image is IMAGE
    assert caption == {"caption": "step 3"}
    assert calls["init.config.update"] == (({"a": 1},), {"allow_val_change": True})
    assert "Linear(in_features=1" in calls["Html"][0][0]
    assert list(calls["init.log"][0][0]) == ["graph"]


def test_mlflow_gets_pictures_by_the_number_of_its_run(tmp_path: Path, stub: Callable[[str], list[Any]]) -> None:
    """In the thread that writes pictures MLflow would start another run."""
    log = stub("mlflow")
    reporter = MlflowReporter(tmp_path / "vis_data")
    reporter.on_image("val/sample", IMAGE, 3)
    assert log == []
    reporter.on_start({})
    reporter.on_image("val/sample", IMAGE, 3)
    reporter.on_config({"a": 1})
    reporter.on_graph(torch.nn.Linear(1, 1), None)
    calls = {name: args for name, args, _ in log}
    assert calls["log_params"] == ({},), "an empty configuration has no parameter without a name"
    run, path, folder = calls["MlflowClient.log_artifact"]
    assert (Path(path).name, folder) == ("sample_3.png", "images/val")
    assert run is not None
    assert calls["log_dict"] == ({"a": 1}, "config.json")
    assert calls["log_text"][1] == "graph.txt"


def test_mlflow_sends_nothing_from_beside_a_folder_of_the_users(
    tmp_path: Path, stub: Callable[[str], list[Any]]
) -> None:
    log = stub("mlflow")
    (tmp_path / "private.json").write_text("x")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.json").write_text("x")
    reporter = MlflowReporter(tmp_path / "own")
    reporter.on_start({})
    reporter.close()
    assert [Path(args[0]).name for name, args, _ in log if name == "log_artifact"] == ["a.json"]


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_what_to_type(package: str, missing: Callable[[str], None]) -> None:
    missing("torch.utils.tensorboard" if package == "tensorboard" else package)
    with refuses(ConfigError, f"pip install flextrain[{package}]"):
        build_all([{"type": f"{package.capitalize()}Reporter"}])


def test_names_of_mmengine_are_aliases() -> None:
    assert REPORTERS.get("LocalVisBackend") is JsonLinesReporter
    assert REPORTERS.get("TensorboardVisBackend") is TensorboardReporter
    assert REPORTERS.get("WandbVisBackend") is WandbReporter
    assert REPORTERS.get("MLflowVisBackend") is MlflowReporter


def test_configurations_of_mmengine_and_of_our_own(tmp_path: Path) -> None:
    def kinds(given: Any) -> list[tuple[str, str]]:
        return [(type(reporter).__name__, reporter.save_dir.name) for reporter in build_all(given, tmp_path / "vis")]

    json_lines = [("JsonLinesReporter", "vis")]
    assert kinds(None) == kinds({"type": "Visualizer"}) == kinds(["LocalVisBackend"]) == json_lines
    both = {"type": "Visualizer", "name": "v", "vis_backends": [{"type": "LocalVisBackend"}, "TensorboardVisBackend"]}
    assert kinds(both) == [*json_lines, ("TensorboardReporter", "vis")]
    assert kinds({**both, "save_dir": str(tmp_path / "other")})[0] == ("JsonLinesReporter", "other")
    assert kinds({"type": "JsonLinesReporter"}) == json_lines
    assert kinds([{"type": "JsonLinesReporter", "save_dir": str(tmp_path / "own")}]) == [("JsonLinesReporter", "own")]
    mine = JsonLinesReporter(tmp_path)
    assert build_all([mine]) == [mine]


def test_json_lines_stay_beside_other_reporters(tmp_path: Path) -> None:
    """Unless they are left out by name: whoever adds TensorBoard has not asked for that."""

    def kinds(given: Any) -> list[str]:
        return [type(reporter).__name__ for reporter in build_all(given, tmp_path)]

    board = [dict(type="TensorboardVisBackend")]
    assert kinds(board) == kinds(board[0]) == ["TensorboardReporter", "JsonLinesReporter"]
    assert kinds(dict(type="Visualizer", vis_backends=board)) == ["TensorboardReporter", "JsonLinesReporter"]
    assert kinds([*board, "LocalVisBackend"]) == ["TensorboardReporter", "JsonLinesReporter"]
    assert kinds(dict(type="Visualizer", vis_backends=board, json_lines=False)) == ["TensorboardReporter"]
    assert kinds([]) == kinds(dict(vis_backends=[])) == kinds(dict(json_lines=False)) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "Visualiser"}, 'visualizer.type: "Visualiser" is no known visualizer, did you mean "Visualizer"?'),
        (
            {"type": "Visualizer", "vis_backend": []},
            'visualizer.vis_backend: unknown key, did you mean "vis_backends"?',
        ),
        ({"type": "Visualizer", "vis_backends": {}}, "visualizer.vis_backends[0].type: missing"),
        ({"type": "Visualizer", "vis_backends": 3}, "visualizer.vis_backends: 3 is not allowed"),
        ({"type": dict}, "visualizer.type: dict is no Visualizer and no Reporter"),
        ({"type": torch.nn.Linear}, "visualizer.type: Linear is no Visualizer and no Reporter"),
        ({"typ": "Visualizer"}, 'visualizer.typ: unknown key, did you mean "type"?'),
        ([{"type": "LocalVisBackends"}], 'visualizer[0].type: "LocalVisBackends" is no known reporter, did you mean'),
        ([{"type": "LocalVisBackend", "file": "x"}], "visualizer[0].file: unknown key"),
        ([{"type": dict}], "visualizer[0].type: dict is not allowed, give a subclass of Reporter"),
        ([{}], "visualizer[0].type: missing"),
        (5, "visualizer: 5 is not allowed"),
    ],
)
def test_wrong_configurations(given: Any, message: str) -> None:
    with refuses(ConfigError, message):
        build_all(given)


def test_a_configuration_is_described_without_what_it_holds() -> None:
    described = describe(
        {
            "model": torch.nn.Linear(1, 1),
            "type": JsonLinesReporter,
            "data": [0] * 1000,
            "betas": (0.9, 0.99),
            "collate": torch.utils.data.default_collate,
            "path": Path("/x"),
            "dtype": torch.bfloat16,
            3: None,
        }
    )
    assert described == {
        "model": "torch.nn.modules.linear:Linear",
        "type": "flextrain.runner.reporting.jsonl:JsonLinesReporter",
        "data": "1000 items",
        "betas": [0.9, 0.99],
        "collate": "torch.utils.data._utils.collate:default_collate",
        "path": "/x",
        "dtype": "torch.bfloat16",
        "3": None,
    }
    json.dumps(described)


def test_a_third_party_reporter_needs_one_method(tmp_path: Path) -> None:
    class Mine(Reporter):
        def on_scalars(self, scalars: Any, step: int, mode: str) -> None:
            self.last = (scalars, step, mode)

    reporter, _ = build_all([{"type": Mine}], tmp_path)
    assert isinstance(reporter, Mine)
    reporter.on_start({})
    reporter.on_scalars({"loss": 1.0}, 1, "train")
    reporter.close()
    assert reporter.last == ({"loss": 1.0}, 1, "train")
    with pytest.raises(TypeError):
        Reporter()  # type: ignore[abstract]
