"""Metrics over one and two processes: every sample counts once, whatever the processes get of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler, default_collate

from flextrain import BaseMetric, ConfigError, FlexibleRunner
from flextrain.runner import DumpResults, Evaluator
from flextrain.runner.hooks import Hook
from flextrain.runner.metrics.evaluator import build_evaluator, check_evaluator
from flextrain.testing import WorkerGroup

from .training import SGD, Accuracy, Net, Samples, configuration, log_lines, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")


def parts_of_test(length: int = 10, **dataloader: Any) -> dict[str, Any]:
    return {key.replace("val_", "test_"): value for key, value in validation(length, **dataloader).items()}


def evaluate(folder: Path | str, call: str = "val", model: Any = None, **changes: Any) -> dict[str, Any]:
    """The metrics of a run that only evaluates."""
    nothing = dict(train_dataloader=None, optim_wrapper=None, train_cfg=None)
    runner = make_runner(folder, **{**nothing, "model": model or fixed, **changes})
    metrics: dict[str, Any] = getattr(runner, call)()
    runner.strategy.leave()
    return metrics


def fixed() -> nn.Module:
    """The same weights on every process and in every run."""
    model = Net(dropout=0.5)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with torch.no_grad():
        model.net[3].bias.copy_(torch.tensor([0.2, 0.1]))
    return model


def expected(length: int) -> float:
    samples = Samples(length)
    predicted = fixed().eval()(None, samples.x, samples.y).argmax(1)
    return 100.0 * float((predicted == samples.y).float().mean())


# One process


@pytest.mark.parametrize("call", ["val", "test"])
@pytest.mark.parametrize("length", [1, 4, 10])
def test_all_samples_in_their_order(tmp_path: Path, length: int, call: str) -> None:
    parts = validation(length) if call == "val" else parts_of_test(length)
    metrics = evaluate(tmp_path, call, **parts)
    assert metrics == dict(accuracy=pytest.approx(expected(length)), count=length, indices=list(range(length)))


def test_a_shuffled_order(tmp_path: Path) -> None:
    metrics = evaluate(tmp_path, **validation(10, sampler=dict(type="DefaultSampler", shuffle=True)))
    assert metrics["count"] == 10
    assert sorted(metrics["indices"]) == list(range(10)) != metrics["indices"]


class PerBatch(BaseMetric):
    """Two results for every batch and a third for the first: no sampler has to do with how many there are."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [len(data_batch["y"])] * (2 if self.results else 3)

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        return {"results": len(results), "sizes": results}


def test_a_metric_may_keep_more_results_than_samples(tmp_path: Path) -> None:
    parts = validation(6) | dict(val_evaluator=dict(type=PerBatch))
    parts["val_dataloader"]["batch_size"] = 1
    assert evaluate(tmp_path, **parts)["results"] == 13


def test_what_metrics_are_given(tmp_path: Path) -> None:
    class Meta(Samples):
        metainfo = {"classes": ("a", "b")}

    class Sees(PerBatch):
        def process(self, data_batch: Any, data_samples: Any) -> None:
            assert not torch.is_grad_enabled()
            assert set(data_batch) == {"index", "x", "y"}
            assert data_samples["logits"].shape == (len(data_batch["y"]), 2)
            assert self.dataset_meta == Meta.metainfo
            self.results.append(1)

    parts = validation(6) | dict(val_evaluator=[Sees(prefix="a"), dict(type=Sees, prefix="b")])
    parts["val_dataloader"]["dataset"] = Meta(6)
    assert evaluate(tmp_path, **parts) == {"a/results": 2, "a/sizes": [1, 1], "b/results": 2, "b/sizes": [1, 1]}


def test_metrics_become_plain_numbers() -> None:
    class Values(PerBatch):
        default_prefix = "v"

        def compute_metrics(self, results: list[int]) -> dict[str, Any]:
            return dict(one=torch.tensor(2.0), many=torch.arange(3), text="x", numpy=torch.tensor(3).numpy()[()])

    metric = Values()
    metric.results.append(1)
    assert metric.evaluate() == {"v/one": 2.0, "v/many": [0, 1, 2], "v/text": "x", "v/numpy": 3}


def test_a_metric_without_results_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="flextrain")
    assert PerBatch().evaluate()["results"] == 0
    assert {*caplog.messages} == {"PerBatch: got no results, process() appended nothing to self.results"}


def test_repeated_samples_that_cannot_be_dropped_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of results of whole batches nobody can say which are those of repeated samples."""
    metric, alike = PerBatch(), PerBatch()
    for _ in range(2):
        metric.results += [4, 2]
        alike.results += [1] * 5
        assert metric.evaluate(5)["results"] == 2
        assert alike.evaluate(5)["results"] == 5
    (said,) = caplog.messages
    assert said.startswith(
        "PerBatch: has 2 results for 5 samples, so those that the sampler repeats to make all processes"
    )


def test_two_metrics_of_one_name(tmp_path: Path) -> None:
    parts = validation(4) | dict(val_evaluator=[dict(type=PerBatch), dict(type=PerBatch)])
    with pytest.raises(ConfigError, match=r'^evaluator: two metrics are called "results", give one a prefix$'):
        evaluate(tmp_path, **parts)


@pytest.mark.parametrize("name", ["time", "data_time", "step"])
def test_names_of_the_log_s_own_figures(tmp_path: Path, name: str) -> None:
    """A metric called time was averaged with seconds, an output called lr with the learning rate; others were replaced."""

    class Timed(PerBatch):
        def compute_metrics(self, results: list[int]) -> dict[str, Any]:
            return {name: 3.0}

    parts = validation(4) | dict(val_evaluator=Timed)
    with pytest.raises(ConfigError, match=f'^evaluator: a metric is called "{name}", as a figure of the log is'):
        make_runner(tmp_path, **parts).train()
    parts["val_evaluator"] = dict(type=Timed, prefix="own")
    assert evaluate(tmp_path / "prefix", **parts) == {f"own/{name}": 3.0}

    class Telling(Net):
        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named) | {name: torch.tensor(5.0)}

    runner = make_runner(tmp_path / "outputs", model=Telling)
    with pytest.raises(ConfigError, match=f'^model: gives "{name}" to the log, which has a figure of its own'):
        runner.train()


def test_evaluators_in_every_spelling() -> None:
    built = Evaluator([PerBatch()])
    for cfg in (PerBatch, dict(type=PerBatch), PerBatch(), [PerBatch], built):
        check_evaluator(cfg, "val_evaluator")
        assert [type(metric) for metric in build_evaluator(cfg, "val_evaluator").metrics] == [PerBatch]
    assert build_evaluator(built, "x") is built


def test_a_predict_that_torchmetrics_can_use(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    for as_dict in (True, False):
        assert torch_metrics(tmp_path, 10, as_dict) == {
            "MulticlassAccuracy": pytest.approx(expected(10) / 100),
            "cat": pytest.approx(float(Samples(10).x.mean())),
        }
    parts = validation(4) | dict(val_evaluator=torchmetrics.MeanMetric(), model=lambda: Pairs("mean"))
    assert evaluate(tmp_path, **parts) == {"MeanMetric": pytest.approx(float(Samples(4).x.mean()))}
    # One tensor is one argument, not a row for each: update(value, weight) would take the second of two as a weight.
    parts["model"] = lambda: Pairs("tensor")
    assert evaluate(tmp_path, **parts) == {"MeanMetric": pytest.approx(float(Samples(4).x.mean()))}


class Pairs(nn.Module):
    """Predicts what torchmetrics' ``update`` takes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = fixed(), kind

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(index, x, y)
        return {
            "dict": {"preds": logits, "target": y},
            "tuple": (logits, y),
            "mean": [x],
            "tensor": x,
            "cat": {"value": x},
        }[self.kind]


def torch_metrics(folder: Path | str, length: int, as_dict: bool = True) -> dict[str, Any]:
    """A metric with counters, by name; the same in a collection; and one that keeps everything."""
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    parts = validation(length) | dict(model=lambda: Pairs("dict" if as_dict else "tuple"))
    accuracy = dict(num_classes=2, average="micro")
    parts |= dict(val_evaluator=dict(type="MulticlassAccuracy", **accuracy))
    alone = evaluate(folder, **parts)
    collection = [MulticlassAccuracy(**accuracy), MulticlassConfusionMatrix(2)]
    found = evaluate(folder, **{**parts, "val_evaluator": torchmetrics.MetricCollection(collection)})
    assert sum(sum(row) for row in found.pop("MulticlassConfusionMatrix")) == length
    assert found == alone
    found = evaluate(folder, **parts)
    parts |= dict(val_evaluator=torchmetrics.CatMetric(), model=lambda: Pairs("cat"))
    kept = torch.tensor(evaluate(folder, **parts)["CatMetric"])
    assert kept.shape == (length, 6)
    return {**found, "cat": float(kept.mean())}


def test_half_precision_for_evaluation_alone(tmp_path: Path) -> None:
    class Dtype(PerBatch):
        def process(self, data_batch: Any, data_samples: Any) -> None:
            self.results.append(str(data_samples["logits"].dtype))

        def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
            return {"dtypes": sorted(set(results))}

    parts = validation(4) | dict(val_evaluator=Dtype)
    assert evaluate(tmp_path, **parts)["dtypes"] == ["torch.float32"]
    assert evaluate(tmp_path, **{**parts, "val_cfg": dict(fp16=True)})["dtypes"] == ["torch.float16"]
    half = dict(type="AmpOptimWrapper", optimizer=SGD, dtype="bfloat16")
    runner = make_runner(tmp_path, optim_wrapper=half, **parts)
    assert runner.val()["dtypes"] == ["torch.bfloat16"]
    runner = make_runner(tmp_path, optim_wrapper=half, **{**parts, "val_cfg": dict(fp16=True)})
    assert runner.val()["dtypes"] == ["torch.float16"]


# Alone, and around training


class Phases(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def before_epoch(self, runner: FlexibleRunner, mode: str = "train") -> None:
        self.seen.append((mode, runner.model.training))


def test_evaluation_before_and_after_training_leaves_it_as_it_is(tmp_path: Path) -> None:
    plain = make_runner(tmp_path / "plain")
    weights = [p.clone() for p in plain.train().parameters()]
    phases = Phases()
    runner = make_runner(tmp_path / "more", **validation(), **parts_of_test(3), custom_hooks=[phases])
    assert runner.test()["count"] == 3
    assert runner._val_loop is None  # its data are made when they are needed
    before = runner.val()
    trained = runner.train()
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), weights, strict=True))
    after = runner.val()
    assert after["count"] == before["count"] == 10
    assert after["accuracy"] != before["accuracy"]
    assert runner.test()["count"] == 3
    assert [mode for mode, _ in phases.seen] == ["test", "val", *["train", "val"] * 3, "val", "test"]
    assert runner.iter == 21


# Two processes


class Indices(BaseMetric):
    """A result for each sample."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_batch["index"].tolist()

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        return {"indices": results}


def of_batches(folder: str, length: int, kind: str) -> list[Any]:
    samples = Samples(length)
    batches = BatchSampler(SequentialSampler(samples), 4, False)
    loaders: dict[str, Any] = {
        "list": [default_collate([samples[i] for i in batch]) for batch in batches],
        "sampler": dict(dataset=samples, batch_sampler=Own(batches), collate_fn="default_collate", shard=True),
    }
    file = Path(folder) / "predictions.pt"
    parts = dict(val_cfg=dict(), val_dataloader=loaders[kind], model=Logits)
    metrics = evaluate(folder, **parts, val_evaluator=[Indices(), DumpResults(file)])
    return [metrics["indices"], torch.load(file)]


class Own(Sampler[Any]):
    """A batch sampler of the user's own."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.batch_size = batches, 4

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Logits(nn.Module):
    """Predicts a list: the number of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fixed()

    def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> list[Any]:
        return list(index.tolist())


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["list", "sampler"])
@pytest.mark.parametrize("length", [13, pytest.param(3, marks=pytest.mark.full)])
def test_batches_that_are_dealt_whole(tmp_path: Path, workers2: WorkerGroup, length: int, kind: str) -> None:
    """Results, and predictions in a file, are in the order of the samples also then."""
    assert workers2.run(of_batches, str(tmp_path), length, kind) == [[list(range(length))] * 2] * 2


def on_two(folder: str, length: int, call: str = "val", **dataloader: Any) -> dict[str, Any]:
    return evaluate(folder, call, **(validation if call == "val" else parts_of_test)(length, **dataloader))


@pytest.mark.distributed
@pytest.mark.parametrize("length", [1, 2, 5, 8, 13])
def test_uneven_parts_on_two_processes(tmp_path: Path, workers2: WorkerGroup, length: int) -> None:
    """Thirteen samples in batches of four are two batches on each process, one of them smaller; of one, a process has none."""
    found = workers2.run(on_two, str(tmp_path), length)
    assert found == [dict(accuracy=pytest.approx(expected(length)), count=length, indices=list(range(length)))] * 2


@pytest.mark.distributed
def test_a_shuffled_order_on_two_processes(tmp_path: Path, workers2: WorkerGroup) -> None:
    shuffled = dict(type="DefaultSampler", shuffle=True)
    (first, second), alone = (
        workers2.run(on_two, str(tmp_path), 9, sampler=shuffled),
        on_two(str(tmp_path), 9, sampler=shuffled),
    )
    assert first == second
    assert first["indices"] == alone["indices"]


def counts_forward(folder: str, length: int) -> tuple[int, dict[str, Any]]:
    model = fixed()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return len(calls), evaluate(folder, model=lambda: model, **validation(length)) | {"calls": len(calls)}


@pytest.mark.distributed
@pytest.mark.parametrize("length", [1, 9])
def test_every_process_runs_forward_equally_often(tmp_path: Path, workers2: WorkerGroup, length: int) -> None:
    """Forward may communicate: a process that ran out of batches would leave the other waiting."""
    found = workers2.run(counts_forward, str(tmp_path), length)
    assert found[0][1]["calls"] == found[1][1]["calls"] == (1 if length == 1 else 2)
    assert found[0][1]["count"] == length


@pytest.mark.distributed
@pytest.mark.parametrize("length", [5, *(pytest.param(length, marks=pytest.mark.full) for length in (1, 13))])
def test_torchmetrics_on_two_processes(tmp_path: Path, workers2: WorkerGroup, length: int) -> None:
    pytest.importorskip("torchmetrics")
    assert (
        workers2.run(torch_metrics, str(tmp_path), length)
        == [
            {
                "MulticlassAccuracy": pytest.approx(expected(length) / 100),
                "cat": pytest.approx(float(Samples(length).x.mean()), abs=1e-6),
            }
        ]
        * 2
    )


def nested_torch_metrics(folder: str) -> tuple[dict[str, Any], ...]:
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy

    wrapper = torchmetrics.ClasswiseWrapper(MulticlassAccuracy(num_classes=2, average=None))
    parts = validation(1) | dict(model=lambda: Pairs("tuple"))
    kinds = (wrapper, torchmetrics.MetricCollection({"each": wrapper}), wrapper.metric + wrapper.metric)
    return tuple(evaluate(folder, **{**parts, "val_evaluator": kind}) for kind in kinds)


@pytest.mark.distributed
def test_metrics_inside_of_torchmetrics_beside_a_process_without_data(tmp_path: Path, workers2: WorkerGroup) -> None:
    """They combine their own state, and waited for the process that has none."""
    pytest.importorskip("torchmetrics")
    classwise, collection, sums = workers2.run(nested_torch_metrics, str(tmp_path))[0]
    assert list(classwise.values()) == list(collection.values())
    assert sums == {"CompositionalMetric": [2 * value for value in classwise.values()]}


class Backwards(DistributedSampler[Any]):
    """The last sample first, so that what is repeated does not come last."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def padded(
    folder: str, length: int, with_torchmetrics: bool, kind: Any = DistributedSampler
) -> tuple[dict[str, Any], list[str]]:
    """A sampler of torch's own, which repeats samples at the end, or one like it."""
    parts: dict[str, Any] = dict(model=fixed, val_cfg=dict(), val_evaluator=Accuracy, log_level="WARNING")
    if with_torchmetrics:
        parts |= dict(val_evaluator=dict(type="MeanMetric"), model=lambda: Pairs("mean"))
    config = configuration(folder, **dict.fromkeys(("train_dataloader", "optim_wrapper", "train_cfg")))
    config |= parts
    from flextrain import DDPStrategy

    strategy = DDPStrategy()
    strategy.join()
    samples = Samples(length)
    sampler: Any = kind(samples, shuffle=False)
    runner = FlexibleRunner(
        **{**config, "strategy": strategy, "val_dataloader": DataLoader(samples, batch_size=4, sampler=sampler)}
    )
    with log_lines() as lines:
        metrics = runner.val()
    strategy.leave()
    return metrics, lines


@pytest.mark.distributed
def test_what_a_padding_sampler_repeats_is_dropped(tmp_path: Path, workers2: WorkerGroup) -> None:
    for metrics, lines in workers2.run(padded, str(tmp_path), 9, False):
        assert metrics == dict(accuracy=pytest.approx(expected(9)), count=9, indices=list(range(9)))
        assert not any("repeats" in line for line in lines)
    (_, first), (_, second) = workers2.run(padded, str(tmp_path), 9, True)
    assert (
        "val_dataloader: its DistributedSampler repeats 1 samples, which torchmetrics' metrics count again" in first[-1]
    )
    assert not second  # other processes only write errors


@pytest.mark.distributed
def test_what_another_sampler_repeats_is_told(tmp_path: Path, workers2: WorkerGroup) -> None:
    """None of the samples is dropped in the place of one that came twice."""
    (metrics, lines), _ = workers2.run(padded, str(tmp_path), 9, False, Backwards)
    assert sorted(metrics["indices"]) == [0, *range(9)]
    assert "val_dataloader: its Backwards repeats 1 samples, which metrics count again" in lines[-1]


def rank_dependent(folder: str) -> list[Any]:
    """A metric of the user's that fails to be computed must fail everywhere, and computing happens on rank 0 alone."""

    class Where(PerBatch):
        def compute_metrics(self, results: list[int]) -> dict[str, Any]:
            return {"rank": torch.distributed.get_rank(), "results": len(results)}

    parts = validation(6) | dict(val_evaluator=Where)
    return [evaluate(folder, **parts)]


@pytest.mark.distributed
def test_metrics_are_computed_once_and_known_everywhere(tmp_path: Path, workers2: WorkerGroup) -> None:
    assert workers2.run(rank_dependent, str(tmp_path)) == [[{"rank": 0, "results": 6}]] * 2
