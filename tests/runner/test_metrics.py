"""Evaluators by configuration, predictions as objects, results in files, and metrics that fail, on one process and two."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flextrain import EVALUATOR, BaseMetric, ConfigError, Evaluator, FlexTrainError
from flextrain.core.comm.topology import Topology
from flextrain.runner import DumpResults
from flextrain.runner.metrics.evaluator import build_evaluator, check_evaluator
from flextrain.testing import WorkerGroup

from .test_evaluation import evaluate
from .training import At, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")


class Element:
    """A prediction as an object, as MMEngine's data elements are."""

    def __init__(self, index: Tensor, logits: Tensor) -> None:
        self.index, self.logits = index, logits

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "logits": self.logits}


class Elements(nn.Module):
    """A model that predicts an object for every sample; of every second one a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)
        nn.init.constant_(self.net.weight, 0.1)

    def forward(self, index: Tensor, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        found = [Element(i, row) for i, row in zip(index, self.net(x), strict=True)]
        return [element.to_dict() if i % 2 else element for i, element in zip(index, found, strict=True)]


class Trained(Elements):
    def forward(self, index: Tensor, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        return {"loss": self.net(x).mean()} if mode == "loss" else super().forward(index, x, y)


class Indices(BaseMetric):
    """Which samples there were."""

    default_prefix = "seen"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        assert all(type(sample) is dict for sample in data_samples)
        self.results += [int(sample["index"]) for sample in data_samples]

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        return {"indices": results}


@EVALUATOR.register_module(force=True)
class Counting(Evaluator):
    """One of the user's own."""

    def __init__(self, metrics: Any, start: int = 0) -> None:
        super().__init__(metrics)
        self.start = start

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        return {**super().evaluate(size), "start": self.start}


def elements(length: int, evaluator: Any) -> dict[str, Any]:
    return {**validation(length), "model": Elements, "val_evaluator": evaluator}


# Evaluators by configuration


@pytest.mark.parametrize(
    "cfg",
    [
        dict(type="Evaluator", metrics=[dict(type=Indices)]),
        dict(type=Evaluator, metrics=dict(type=Indices)),
        dict(metrics=[Indices]),
        dict(type="Counting", metrics=[Indices()]),
        dict(type=f"{__name__}:Counting", metrics=Indices, start=3),
        dict(type=Counting, metrics=(Indices(),), start=3),
        Evaluator(dict(type=Indices)),
        Counting([dict(type=Indices)]),
    ],
    ids=["name", "class", "metrics", "own-name", "path", "own-class", "built", "own-built"],
)
def test_an_evaluator_in_every_spelling(tmp_path: Path, cfg: Any) -> None:
    check_evaluator(cfg, "val_evaluator")
    built = build_evaluator(cfg, "val_evaluator")
    assert [type(metric) for metric in built.metrics] == [Indices]
    found = evaluate(tmp_path, **elements(5, cfg))
    assert found.pop("seen/indices") == [0, 1, 2, 3, 4]
    assert found == ({"start": built.start} if isinstance(built, Counting) else {})


@pytest.mark.parametrize(
    "cfg, says",
    [
        (dict(type="Evaluator"), r"^val_evaluator.metrics: missing, it must be given$"),
        (dict(type="Evaluator", metrics=[]), r"^val_evaluator.metrics: is empty, give at least one metric$"),
        (dict(type="Evaluator", metrics=[Indices], x=1), r"^val_evaluator.x: unknown key, choose metrics$"),
        (dict(type="Evaluater", metrics=[Indices]), r'^val_evaluator.type: "Evaluater" is no known metric'),
        (dict(metrics=[dict(type="Indicez")]), r'^val_evaluator.metrics\[0\].type: "Indicez" is no known metric'),
        (dict(metrics=[dict(type=Indices, prefx="a")]), r'^val_evaluator.metrics\[0\].prefx: unknown key, did you mean "prefix"'),
        (dict(type=Counting, metrics=Indices, strat=1), r'^val_evaluator.strat: unknown key, did you mean "start"'),
    ],
    ids=["no-metrics", "empty", "unknown-key", "misspelled", "metric", "metric-key", "own-key"],
)  # fmt: skip
def test_an_evaluator_that_is_wrong(tmp_path: Path, cfg: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        evaluate(tmp_path, **elements(4, cfg))


def test_prefixes(tmp_path: Path) -> None:
    both = [dict(type=Indices), dict(type=Indices, prefix="again")]
    assert evaluate(tmp_path, **elements(2, both)) == {"seen/indices": [0, 1], "again/indices": [0, 1]}
    with pytest.raises(ConfigError, match='^evaluator: two metrics are called "seen/indices", give one a prefix$'):
        evaluate(tmp_path, **elements(2, dict(metrics=[Indices, Indices])))


def test_predictions_in_a_batch_are_left_as_they_are() -> None:
    seen: list[Any] = []

    class Keeps(Indices):
        def process(self, data_batch: Any, data_samples: Any) -> None:
            seen.append(data_samples)

    samples: list[Any] = [{"logits": torch.ones(2)}, torch.ones(2), Element(torch.ones(()), torch.ones(2)), [Element]]
    for sample in samples:
        Evaluator(Keeps()).process(sample)
    assert all(a is b for a, b in zip(seen, samples, strict=True))


class Share(BaseMetric):
    """Reads its own attribute in place of the argument, and keeps what it was given."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(len(data_samples["index"]))

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        self.kept = results
        return {"samples": sum(self.results), "batches": len(self.results)}


def test_results_can_be_read_from_the_attribute(tmp_path: Path) -> None:
    metric = Share()
    assert evaluate(tmp_path, **{**validation(10), "val_evaluator": metric}) == {"samples": 10, "batches": 3}
    assert metric.kept == [4, 4, 2]
    assert metric.results == []


@pytest.mark.distributed
def test_results_in_the_attribute_are_those_of_all_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    found = workers2.run(evaluate, str(tmp_path), **{**validation(8), "val_evaluator": dict(type=Share)})
    assert found == [{"samples": 8, "batches": 2}] * 2


# Predictions that were made before


def test_offline_evaluation() -> None:
    class Batches(Indices):
        def process(self, data_batch: Any, data_samples: Any) -> None:
            super().process(data_batch, data_samples)
            batches.append(data_batch)

    batches: list[Any] = []
    samples = [Element(torch.tensor(i), torch.ones(2)) for i in range(5)]
    evaluator = Evaluator(Batches())
    assert evaluator.offline_evaluate(iter(samples), chunk_size=2) == {"seen/indices": [0, 1, 2, 3, 4]}
    assert batches == [None] * 3
    batches.clear()
    data = [dict(x=i) for i in range(5)]
    assert evaluator.offline_evaluate(samples, data, chunk_size=3) == {"seen/indices": [0, 1, 2, 3, 4]}
    assert batches == [{"x": [0, 1, 2]}, {"x": [3, 4]}]
    for wrong in (data[:4], iter(data[:4])):
        with pytest.raises(
            ConfigError, match="^offline_evaluate.data: has (fewer samples|4 samples for 5 predictions)"
        ):
            evaluator.offline_evaluate(samples, wrong, 2)
    with pytest.raises(ConfigError, match="^offline_evaluate.data: has more samples than"):
        evaluator.offline_evaluate(samples[:2], iter(data), 2)
    with pytest.raises(ConfigError, match="^offline_evaluate.chunk_size: 0 is not allowed, give 1 or more$"):
        evaluator.offline_evaluate(samples, chunk_size=0)
    assert evaluator.offline_evaluate(samples[:1]) == {"seen/indices": [0]}, "nothing is left of those that failed"


# Results in files


def read(path: Path) -> Any:
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, weights_only=True)
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("ending", [".pt", ".pth", ".pkl", ".pickle"])
def test_results_in_a_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "deep" / f"results{ending}"
    dump = dict(type="DumpResults", out_file_path=str(path))
    assert evaluate(tmp_path, **elements(5, [dict(type=Indices), dump])) == {"seen/indices": [0, 1, 2, 3, 4]}
    results = read(path)
    assert [int(result["index"]) for result in results] == [0, 1, 2, 3, 4]
    assert all(result["logits"].shape == (2,) and not result["logits"].requires_grad for result in results)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert Evaluator(Indices()).offline_evaluate(results) == {"seen/indices": [0, 1, 2, 3, 4]}


def test_metrics_that_are_appended(tmp_path: Path) -> None:
    pytest.importorskip("mmengine")
    from mmengine.evaluator import DumpResults as Theirs

    evaluator = Evaluator(Indices())
    evaluator.topology = Topology()
    evaluator.metrics.append(dict(type="DumpResults", out_file_path=str(tmp_path / "out.pt")))
    evaluator.reset()
    assert [metric.topology for metric in evaluator.metrics] == [evaluator.topology] * 2
    evaluator.metrics.append(Theirs(str(tmp_path / "out.pkl")))
    with pytest.raises(ConfigError, match=r"^evaluator.metrics\[2\]: DumpResults is made for MMEngine's runner"):
        evaluator.reset()


def test_batches_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.pt"
    assert evaluate(tmp_path, **validation(5) | dict(val_evaluator=DumpResults(path))) == {}
    results = read(path)
    assert [batch["index"].tolist() for batch in results] == [[0, 1, 2, 3], [4]]
    assert path.stat().st_size < 5000


def test_a_file_is_written_by_validation_alone(tmp_path: Path) -> None:
    """Not by the dry pass before training."""

    seen: list[bool] = []
    metric = DumpResults(tmp_path / "results.pkl")
    look = At("before_train_iter", lambda *args, **kwargs: seen.append(metric.out_file_path.exists()))
    for evaluator in (Evaluator([Indices(), metric]), Counting([metric])):
        parts = {**validation(5), "val_evaluator": evaluator, "model": Trained}
        make_runner(tmp_path / "run", **parts, train_cfg=dict(max_epochs=1), custom_hooks=[look]).train()
        assert not any(seen)
        assert len(read(metric.out_file_path)) == 5
        metric.out_file_path.unlink()


def test_what_a_file_can_hold(tmp_path: Path) -> None:
    metric = DumpResults(tmp_path / "results.pt")
    whole = torch.arange(100_000)
    given = [{"a": np.arange(3), "b": (np.float32(0.5), None, "c", b"d"), "e": [True, 2j], "f": whole[:2]}]
    metric.process(None, given)
    metric.evaluate()
    (found,) = read(metric.out_file_path)
    assert found["a"].tolist() == [0, 1, 2]
    assert (found["b"], found["e"], found["f"].tolist()) == ((0.5, None, "c", b"d"), [True, 2j], [0, 1])
    assert metric.out_file_path.stat().st_size < 5000, "a view is written without what it is a view of"
    metric.process(None, [{"a": [1, Path("x")]}])
    with pytest.raises(
        ConfigError, match=r"^evaluator: DumpResults cannot write results\[0\]\['a'\]\[1\], a PosixPath, to a"
    ):
        metric.evaluate()
    pickled = DumpResults(tmp_path / "results.pkl")
    pickled.process(None, [{"a": [1, Path("x")]}])
    pickled.evaluate()
    assert read(pickled.out_file_path) == [{"a": [1, Path("x")]}]
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r'^evaluator.out_file_path: ".*file/deep" cannot be written to, Not a directory$'
    ):
        DumpResults(tmp_path / "file" / "deep" / "results.pt")
    with pytest.raises(ConfigError, match=r'^val_evaluator.metrics\[0\].out_file_path: "x" is not allowed'):
        build_evaluator(dict(metrics=[dict(type="DumpResults", out_file_path="x")]), "val_evaluator")
    with pytest.raises(
        ConfigError, match=r'out_file_path: "results.json" is not allowed, its ending is one of \.pt, \.pth'
    ):
        DumpResults("results.json")


# Metrics that fail


class Fails(Indices):
    """Gives something else, or raises."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def compute_metrics(self, results: list[int]) -> Any:
        if self.how == "raises":
            raise KeyError("logits")
        return {"none": None, "number": 0.5}[self.how]


@pytest.mark.parametrize(("how", "given"), [("none", "None"), ("number", "float")])
def test_metrics_that_are_no_dict(tmp_path: Path, how: str, given: str) -> None:
    says = f"^evaluator: Fails.compute_metrics gave {given}, return a dict of metrics by name$"
    with pytest.raises(ConfigError, match=says):
        evaluate(tmp_path, **elements(4, Fails(how)))


# Two processes


def on_two(folder: str, length: int, evaluator: Any) -> Any:
    return evaluate(folder, **elements(length, evaluator))


def fails_on_two(folder: str, how: str) -> str:
    try:
        evaluate(folder, **elements(3, Fails(how)))
    except (FlexTrainError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("length", [1, 7])
def test_objects_and_files_on_two_processes(tmp_path: Path, workers2: WorkerGroup, length: int) -> None:
    path = tmp_path / "results.pt"
    cfg = dict(type="Evaluator", metrics=[dict(type=Indices), dict(type="DumpResults", out_file_path=str(path))])
    assert workers2.run(on_two, str(tmp_path), length, cfg) == [{"seen/indices": list(range(length))}] * 2
    assert [int(result["index"]) for result in read(path)] == list(range(length))


@pytest.mark.distributed
def test_a_metric_that_fails_ends_all_processes_with_the_reason(tmp_path: Path, workers2: WorkerGroup) -> None:
    says = "ConfigError: evaluator: Fails.compute_metrics gave None, return a dict of metrics by name"
    assert workers2.run(fails_on_two, str(tmp_path), "none") == [says] * 2
    first, second = workers2.run(fails_on_two, str(tmp_path), "raises")
    assert first == "KeyError: 'logits'"
    assert second == "FlexTrainError: Fails.compute_metrics on rank 0: KeyError('logits')"


def dumps_on_two(folder: str, call: str) -> str:
    """What this process hears where rank 0 cannot write the results."""
    dump = dict(type="DumpResults", out_file_path=f"{folder}/file/results.pt")
    parts = {**validation(5), "val_evaluator": [dump], "model": Trained}
    runner = make_runner(Path(folder) / "run", **parts, train_cfg=dict(max_epochs=1))
    try:
        runner.train() if call == "train" else runner.val()
    except ConfigError as error:
        return str(error)
    finally:
        runner.strategy.leave()
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("call", ["train", "val"])
def test_all_processes_hear_that_results_cannot_be_written(tmp_path: Path, workers2: WorkerGroup, call: str) -> None:
    (tmp_path / "file").touch()
    says = f'val_evaluator[0].out_file_path: "{tmp_path / "file"}" cannot be written to, File exists'
    assert workers2.run(dumps_on_two, str(tmp_path), call) == [says] * 2
