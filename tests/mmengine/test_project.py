"""A project that keeps MMEngine trains with flextrain's runner: as with MMEngine's own, and under every strategy."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.model import BaseTTAModel

from flextrain.testing import WorkerGroup

from .digits import configuration, journal_of, largest_difference, metrics_with_tta, saved_weights, train, with_tta

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy", wrap=["Block"]),
    "zero1": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=1)),
    "zero2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
    "zero3": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3)),
}


FULL, DEEPSPEED = pytest.mark.full, pytest.mark.deepspeed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[Any], dict[str, Any]]:
    """The project's training on one device."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, *train(str(folder), 16)


def test_it_trains_as_with_mmengines_own_runner(tmp_path: Path) -> None:
    from mmengine.runner import Runner

    from flextrain.mmengine import FlexibleRunner

    # MMEngine draws other numbers for the initial weights: both start from the same ones.
    start = tmp_path / "start.pth"
    first = FlexibleRunner.from_cfg(configuration(tmp_path / "first"))
    torch.save(dict(state_dict=first.model.state_dict(), meta={}), start)
    drawing = {"visualizer.name": "theirs"}  # MMEngine's runner would take the visualizer that exists
    theirs = Runner.from_cfg(configuration(tmp_path / "theirs", load_from=str(start), **drawing))
    theirs.train()
    ours = FlexibleRunner.from_cfg(configuration(tmp_path / "ours", load_from=str(start)))
    ours.train()
    assert journal_of(ours).losses == pytest.approx(journal_of(theirs).losses, abs=1e-6)
    assert len(journal_of(ours).losses) == 12
    assert journal_of(ours).entries == journal_of(theirs).entries
    assert largest_difference(dict(ours.model.state_dict()), dict(theirs.model.state_dict())) < 1e-6
    averages = torch.load(tmp_path / "theirs" / "epoch_3.pth", weights_only=False)[
        "state_dict"
    ]  # in the weights' place
    assert largest_difference(saved_weights(tmp_path / "ours", averaged=True), averages) < 1e-6
    found, expected = ours.test(), theirs.test()
    assert found == pytest.approx(expected)
    assert found["digits/count"] == 19
    pictures = [sorted(path.name for path in (tmp_path / who).rglob("*.png")) for who in ("ours", "theirs")]
    assert pictures[0] == pictures[1] != []


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=FULL),
        pytest.param("fsdp", marks=FULL),
        pytest.param("zero3", marks=DEEPSPEED),
        pytest.param("zero1", marks=[FULL, DEEPSPEED]),
        pytest.param("zero2", marks=[FULL, DEEPSPEED]),
    ],
)
def test_it_trains_under_every_strategy(
    tmp_path: Path, workers2: WorkerGroup, alone: tuple[Path, list[float], list[Any], dict[str, Any]], strategy: str
) -> None:
    folder, losses, entries, metrics = alone
    results = workers2.run(train, str(tmp_path), 8, strategy=STRATEGIES[strategy])
    mean = [sum(parts) / 2 for parts in zip(*(found for found, _, _ in results), strict=True)]
    assert mean == pytest.approx(losses, abs=1e-5)
    assert len(set(losses)) == 12
    for _, seen, tested in results:
        assert seen == entries
        assert tested == pytest.approx(metrics)
    for averaged in (False, True):
        expected = saved_weights(folder, averaged=averaged)
        assert largest_difference(saved_weights(tmp_path, averaged=averaged), expected) < 1e-4
    start = saved_weights(folder, "epoch_1")
    assert largest_difference(start, saved_weights(folder)) > 1e-3  # training moves them further than what is allowed


def test_weights_are_initialised_as_init_cfg_says(tmp_path: Path) -> None:
    from flextrain.mmengine import FlexibleRunner

    model = FlexibleRunner.from_cfg(configuration(tmp_path)).model
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert all(bool((norm.weight == 1).all()) for norm in norms)
    assert bool((model.head.scale == 0.5).all())
    assert float(model.head.fc.weight.std()) == pytest.approx(0.05, rel=0.4)
    biases = itertools.chain(*(m.bias.tolist() for m in model.modules() if isinstance(m, torch.nn.Conv2d)))
    assert set(biases) == {0.0}


@pytest.fixture(scope="module")
def tested(
    alone: tuple[Path, list[float], list[Any], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """A checkpoint, and its metrics with several views of every sample, on one device."""
    checkpoint = str(alone[0] / "epoch_3")
    return checkpoint, metrics_with_tta(str(tmp_path_factory.mktemp("tta")), load_from=checkpoint)


def test_several_views_of_a_sample_are_tested_as_by_mmengine(
    tmp_path: Path, tested: tuple[str, dict[str, Any]]
) -> None:
    from mmengine.runner import Runner

    checkpoint, metrics = tested
    weights = saved_weights(Path(checkpoint).parent)
    torch.save(dict(state_dict=weights, meta={}), tmp_path / "weights.pth")
    changes = {"load_from": str(tmp_path / "weights.pth"), "visualizer.name": "tta"}
    assert metrics == pytest.approx(Runner.from_cfg(with_tta(tmp_path, **changes)).test())
    assert metrics["digits/count"] == 19


class OwnStep(BaseTTAModel):
    """Defines its own step, which calls the model inside, and takes the last view."""

    def test_step(self, data: Any) -> Any:
        views = [self.module.test_step(dict(zip(data, view, strict=True))) for view in zip(*data.values(), strict=True)]
        for sample in views[-1]:
            sample.pred_label = torch.tensor(7)
        return views[-1]

    def merge_preds(self, data_samples_list: Any) -> Any:
        raise AssertionError("its own step does not call it")


class LastView(BaseTTAModel):
    """Merges to what no view says, so that it is seen whether it is called."""

    def merge_preds(self, data_samples_list: Any) -> Any:
        samples = [views[-1] for views in data_samples_list]
        for sample in samples:
            sample.pred_label = torch.tensor(7)
        return samples


@pytest.mark.parametrize("kind", [OwnStep, LastView])
def test_what_a_model_for_augmentation_defines_is_called(
    tmp_path: Path, tested: tuple[str, dict[str, Any]], kind: type
) -> None:
    metrics = metrics_with_tta(str(tmp_path), load_from=tested[0], **{"model.type": kind})
    assert metrics["recall/7"] == 1.0
    assert sum(value for name, value in metrics.items() if name.startswith("recall/")) == 1.0


def test_what_tools_of_projects_do_before_they_test(tmp_path: Path, tested: tuple[str, dict[str, Any]]) -> None:
    """As ``tools/test.py --tta --out``: the configuration still trains, and a metric is appended to the evaluator."""
    from mmengine.evaluator import DumpResults

    from flextrain import ConfigError
    from flextrain.mmengine import FlexibleRunner

    whole, cfg = configuration(tmp_path), with_tta(tmp_path, load_from=tested[0])
    whole.merge_from_dict(dict(load_from=tested[0], test_dataloader=cfg.test_dataloader))
    whole.model = dict(cfg.model, _scope_="mm_digits")  # as a file has it that is inherited from the project
    runner = FlexibleRunner.from_cfg(whole)
    runner.test_evaluator.metrics.append(DumpResults(out_file_path=str(tmp_path / "out.pkl")))
    metrics = runner.test()
    assert [metrics, runner.test()] == [tested[1]] * 2
    assert len(pickle.loads((tmp_path / "out.pkl").read_bytes())) == 19
    with pytest.raises(ConfigError, match="model: DigitTTA merges predictions in testing and cannot be trained"):
        runner.train()


def test_several_views_of_a_sample_after_training(tmp_path: Path) -> None:
    from flextrain.mmengine import FlexibleRunner

    cfg = configuration(tmp_path, custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=dict(type="DigitTTA"))])
    for dataset in cfg.test_dataloader.dataset.datasets:
        dataset.pipeline = cfg.tta_pipeline
    runner = FlexibleRunner.from_cfg(cfg)
    runner.train()
    metrics = runner.test()
    assert metrics == metrics_with_tta(str(tmp_path / "alone"), load_from=str(tmp_path / "epoch_3"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    ["fsdp", pytest.param("ddp", marks=FULL), pytest.param("zero3", marks=[FULL, DEEPSPEED])],
)
def test_several_views_of_a_sample_under_every_strategy(
    tmp_path: Path, workers2: WorkerGroup, tested: tuple[str, dict[str, Any]], strategy: str
) -> None:
    checkpoint, metrics = tested
    results = workers2.run(metrics_with_tta, str(tmp_path), load_from=checkpoint, strategy=STRATEGIES[strategy])
    assert results == [pytest.approx(metrics)] * 2


def fresh_start(folder: str, pretrained: str, strategy: dict[str, Any] | None) -> None:
    """Save the weights with which training would begin."""
    from flextrain.mmengine import FlexibleRunner

    backbone = dict(init_cfg=dict(type="Pretrained", checkpoint=pretrained, prefix="backbone."))
    runner = FlexibleRunner.from_cfg(configuration(folder, model=dict(backbone=backbone), strategy=strategy))
    assert runner.model is not None  # builds it
    runner.save_checkpoint(folder, "start")
    runner.strategy.leave()


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=DEEPSPEED), pytest.param("ddp", marks=FULL)])
def test_pretrained_parts_under_every_strategy(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    generator = torch.Generator().manual_seed(0)
    empty = saved_start(tmp_path / "any", None, None)
    weights = {name: torch.rand(value.shape, generator=generator) for name, value in empty.items()}
    pretrained = str(tmp_path / "pretrained.pth")
    torch.save(dict(state_dict=weights), pretrained)
    alone = saved_start(tmp_path / "alone", None, pretrained)
    assert torch.equal(alone["backbone.stem.weight"], weights["backbone.stem.weight"])
    assert not torch.equal(alone["head.fc.weight"], weights["head.fc.weight"])
    workers2.run(fresh_start, str(tmp_path / strategy), pretrained, STRATEGIES[strategy])
    assert largest_difference(saved_weights(tmp_path / strategy, "start"), alone) == 0.0


def saved_start(folder: Path, strategy: dict[str, Any] | None, pretrained: str | None) -> dict[str, torch.Tensor]:
    from flextrain.mmengine import FlexibleRunner

    if pretrained is None:
        runner = FlexibleRunner.from_cfg(configuration(folder))
        return dict(runner.model.state_dict())
    fresh_start(str(folder), pretrained, strategy)
    return saved_weights(folder, "start")
