"""Test-time augmentation: predictions of augmented samples are merged, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flextrain import MODELS, BaseDataPreprocessor, BaseMetric, BaseModel, BaseTTAModel, ConfigError
from flextrain.testing import WorkerGroup

from .training import SGD, Samples, make_runner, validation

pytestmark = pytest.mark.usefixtures("quick")


class Augmented(Dataset[dict[str, Any]]):
    """Every sample three times: as it is, mirrored, and scaled."""

    def __init__(self, length: int, as_tuple: bool = False) -> None:
        self.samples, self.as_tuple = Samples(length), as_tuple

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        x = [sample["x"], -sample["x"], 2 * sample["x"]]
        fields = {"index": [index] * 3, "x": x, "y": [int(sample["y"])] * 3}
        return tuple(fields.values()) if self.as_tuple else fields


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def logits(self, x: Any) -> Tensor:
        return torch.tanh(self.net(torch.stack(x) if isinstance(x, list) else x))


@MODELS.register_module(force=True)
class Listed(BaseModel, Tanh):
    """MMEngine's way: a list with an entry for each sample."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        BaseModel.__init__(self, data_preprocessor)
        self.net = nn.Linear(6, 2)

    def forward(self, index: Any, x: Any, y: Any, mode: str = "tensor") -> Any:
        logits = self.logits(x)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(logits, y)}
        return [{"index": int(i), "logits": row} for i, row in zip(index, logits, strict=True)]


class Batched(Tanh):
    """A dict with an entry for each field, from a module that is nobody's."""

    def forward(self, index: Any, x: Any, y: Any) -> Any:
        return {"index": index, "logits": self.logits(x)}


class Stepped(Tanh):
    """With steps of its own."""

    def test_step(self, data: Any) -> Any:
        return [{"index": int(i), "logits": row} for i, row in zip(data["index"], self.logits(data["x"]), strict=True)]


@MODELS.register_module(force=True)
class Mean(BaseTTAModel):
    def merge_preds(self, data_samples_list: list[tuple[Any, ...]]) -> Any:
        assert all(len({int(prediction["index"]) for prediction in own}) == 1 for own in data_samples_list)
        return [
            {"index": own[0]["index"], "logits": torch.stack([prediction["logits"] for prediction in own]).mean(0)}
            for own in data_samples_list
        ]


class OwnStep(Mean):
    """Leaves out the last augmentation."""

    def test_step(self, data: Any) -> Any:
        return super().test_step({key: value[:2] for key, value in data.items()})


class Calls(Mean):
    """Written out."""

    def test_step(self, data: Any) -> Any:
        parts = [{key: value[i] for key, value in data.items()} for i in range(3)]
        predictions = [self.module.test_step(part) for part in parts]  # type: ignore[operator]
        return self.merge_preds(list(zip(*predictions, strict=True)))


class Collected(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [(int(sample["index"]), sample["logits"].tolist()) for sample in data_samples]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"indices": [index for index, _ in results], "logits": [logits for _, logits in results]}


def fill(module: Any) -> Any:
    """The same weights everywhere."""
    with torch.no_grad():
        module.net.weight.copy_(torch.arange(12.0).view(2, 6) / 12 - 0.4)
        module.net.bias.fill_(0.1)
    return module


def augmented(length: int = 7, collate: str = "pseudo_collate", as_tuple: bool = False) -> dict[str, Any]:
    loader = dict(batch_size=2, dataset=Augmented(length, as_tuple), collate_fn=collate)
    return dict(test_dataloader=loader, test_cfg=dict(), test_evaluator=Collected)


NO_TRAINING: dict[str, Any] = dict(train_dataloader=None, optim_wrapper=None, train_cfg=None)


def evaluated(folder: Path | str, model: Any, **changes: Any) -> dict[str, Any]:
    runner = make_runner(folder, model=model, **{**NO_TRAINING, **augmented(), **changes})
    metrics = runner.test()
    runner.strategy.leave()
    return metrics


def expected(module: Any, length: int = 7, augmentations: int = 3) -> dict[str, Any]:
    x = Samples(length).x
    with torch.no_grad():
        parts = [torch.tanh(module.net(part)) for part in (x, -x, 2 * x)[:augmentations]]
    return {"indices": list(range(length)), "logits": torch.stack(parts).mean(0)}


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["indices"] == wanted["indices"]
    assert torch.allclose(torch.tensor(found["logits"]), wanted["logits"], atol=1e-6)


@pytest.mark.parametrize("collate", ["pseudo_collate", "default_collate"])
@pytest.mark.parametrize("kind", [Listed, Batched, Stepped])
def test_augmentations_are_merged(tmp_path: Path, kind: type, collate: str) -> None:
    check(evaluated(tmp_path, Mean(fill(kind())), **augmented(collate=collate)), expected(fill(kind())))


def test_a_batch_that_is_a_tuple(tmp_path: Path) -> None:
    check(evaluated(tmp_path, Mean(fill(Listed())), **augmented(as_tuple=True)), expected(fill(Listed())))


def test_a_test_step_of_ones_own(tmp_path: Path) -> None:
    check(evaluated(tmp_path, OwnStep(fill(Listed()))), expected(fill(Listed()), augmentations=2))
    check(evaluated(tmp_path, Calls(fill(Listed()))), expected(fill(Listed())))


def test_validation_uses_the_model_inside(tmp_path: Path) -> None:
    val = validation(5) | dict(val_evaluator=Collected)
    runner = make_runner(tmp_path, model=Mean(fill(Listed())), **{**NO_TRAINING, **augmented(), **val})
    check(runner.val(), expected(fill(Listed()), 5, augmentations=1))
    check(runner.test(), expected(fill(Listed())))


def test_without_a_runner() -> None:
    batch = {"index": [[0, 1]] * 2, "x": [torch.ones(2, 6), -torch.ones(2, 6)], "y": [None, None]}
    for module in (fill(Listed()).eval(), fill(Batched())):
        found = Mean(module).test_step(batch)
        assert [int(sample["index"]) for sample in found] == [0, 1]
        assert torch.allclose(found[0]["logits"], found[1]["logits"])


@MODELS.register_module(force=True)
class Halves(BaseDataPreprocessor):
    def forward(self, data: Any, training: bool = False) -> Any:
        return {**data, "x": torch.stack(data["x"]) / 2}


def test_a_configuration_with_a_preprocessor(tmp_path: Path) -> None:
    half = dict(type="Halves")
    inside = dict(type="Mean", module=dict(type="Listed", data_preprocessor=half))
    own = dict(type="Mean", module=dict(type="Listed"), data_preprocessor=half)
    beside = dict(type="Mean", module=dict(type="Listed"))
    whole = evaluated(tmp_path, beside, randomness=dict(seed=1))
    found = [evaluated(tmp_path, cfg, randomness=dict(seed=1)) for cfg in (inside, own)]
    found.append(evaluated(tmp_path, beside, data_preprocessor=half, randomness=dict(seed=1)))
    found.append(evaluated(tmp_path, lambda: Mean(Listed()), data_preprocessor=half, randomness=dict(seed=1)))
    assert found[0]["indices"] == whole["indices"]
    assert all(one == found[0] for one in found)
    assert found[0] != whole


# With what was trained


def training(folder: Path, **changes: Any) -> Any:
    loader = dict(batch_size=4, dataset=Samples(8), collate_fn="default_collate")
    return make_runner(folder, model=Listed, train_dataloader=loader, train_cfg=dict(max_epochs=1), **changes)


def test_weights_of_a_trained_model(tmp_path: Path) -> None:
    """Names in a checkpoint have no prefix, whoever reads it."""
    runner = training(tmp_path / "run", default_hooks=dict(checkpoint=dict(interval=1)))
    trained = runner.train()
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    wanted = expected(trained)
    for source in (tmp_path / "run" / "epoch_1", tmp_path / "weights.pth"):
        check(evaluated(tmp_path / "test", dict(type=Mean, module=dict(type=Listed)), load_from=str(source)), wanted)


def test_the_hook_that_wraps_what_was_trained(tmp_path: Path) -> None:
    hook = dict(type="PrepareTTAHook", tta_cfg=dict(type="Mean"))
    runner = training(tmp_path, custom_hooks=[hook], **augmented())
    trained = runner.train()
    for _ in range(2):
        check(runner.test(), expected(trained))
        assert runner.stepper.merging is None
    assert runner.strategy.module is trained
    wrong = [
        (dict(type="Meen"), r"custom_hooks\[0\].tta_cfg.type: \"Meen\" is no known model"),
        (dict(type=Listed), r"custom_hooks\[0\].tta_cfg.type: Listed is not derived from BaseTTAModel"),
        (
            dict(type="Mean", data_preprocessor=dict(type="Halves")),
            r"custom_hooks\[0\].tta_cfg.data_preprocessor: has no meaning",
        ),
        (dict(type="Mean", module=1), r"custom_hooks\[0\].tta_cfg.module: is filled in by flextrain"),
    ]
    for cfg, says in wrong:
        with pytest.raises(ConfigError, match=f"^{says}"):
            training(tmp_path, custom_hooks=[dict(type="PrepareTTAHook", tta_cfg=cfg)])
    with pytest.raises(ConfigError, match="^PrepareTTAHook: the runner's model is a BaseTTAModel already"):
        evaluated(tmp_path, Mean(Listed()), custom_hooks=[hook])


# What cannot be done


class Lonely(Batched):
    def forward(self, index: Any, x: Any, y: Any) -> Any:
        return {"index": index, "logits": self.logits(x), "mean": self.logits(x).mean()}


class Uneven(Batched):
    def forward(self, index: Any, x: Any, y: Any) -> Any:
        return super().forward(index, x, y)["logits"][: 1 + self.calls % 2] if self.count() else None

    calls = 0

    def count(self) -> bool:
        self.calls += 1
        return True


class Weighted(Mean):
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.weights = nn.Parameter(torch.ones(3))


class Flat(Augmented):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "index": index}


class Ragged(Augmented):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "y": [0]}


def data(kind: type) -> dict[str, Any]:
    return dict(test_dataloader=dict(dataset=kind(2), batch_size=2, collate_fn="default_collate"))


@pytest.mark.parametrize(
    "model, changes, says",
    [
        (Mean(Lonely()), {}, "model.module: predicted a dict, whose values need one entry for each sample"),
        (Mean(Uneven()), {}, r"model.module: Uneven predicted \[2, 1, 2\] samples of the augmentations of one batch"),
        (Weighted(Listed()), {}, "model: Weighted has weights beside its module, which no strategy would place"),
        (Mean(Listed()), data(Flat), "test_dataloader: field 'index' of a batch is Tensor, BaseTTAModel needs a list"),
        (
            Mean(Listed()),
            data(Ragged),
            r"test_dataloader: fields of a batch have different numbers of augmentations \(",
        ),
        (dict(type=Mean, module=5), {}, "model.module: 5 is not allowed, give Module or a dict"),
        (
            dict(type=Mean, module=dict(type="Listet")),
            {},
            'model.module.type: "Listet" is no known model, did you mean',
        ),
        (BaseTTAModel(Listed()), {}, r"model: BaseTTAModel.merge_preds\(data_samples_list\) is not defined"),
    ],
    ids=["scalar", "uneven", "weights", "flat", "ragged", "int", "type", "abstract"],
)
def test_what_cannot_be_merged(tmp_path: Path, model: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        evaluated(tmp_path, model, **changes)


def test_it_cannot_be_trained(tmp_path: Path) -> None:
    for model in (dict(type=Mean, module=dict(type=Listed)), Mean(Listed())):
        with pytest.raises(
            ConfigError, match="^model: Mean merges predictions in testing and cannot be trained, train its"
        ):
            make_runner(tmp_path, model=model).train()
    with pytest.raises(ConfigError, match="^resume: has no meaning with Mean, which is only tested, give load_from$"):
        make_runner(tmp_path, model=Mean(Listed()), resume=True)
    with pytest.raises(
        ConfigError, match="^model: Mean merges predictions in testing and cannot be trained, train its"
    ):
        make_runner(tmp_path, model=lambda: Mean(Listed())).train()


# Two processes


def on_two(folder: str, strategy: dict[str, Any], trains: bool) -> dict[str, Any]:
    if not trains:
        return evaluated(folder, lambda: Mean(fill(Listed())), strategy=strategy)
    loader = dict(batch_size=4, dataset=Samples(8), collate_fn="default_collate")
    hook = dict(type="PrepareTTAHook", tta_cfg=dict(type=Mean))
    runner = make_runner(
        folder, model=lambda: fill(Listed()), train_dataloader=loader, train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(SGD, lr=0.0)), custom_hooks=[hook], strategy=strategy, **augmented(),
    )  # fmt: skip
    runner.train()
    metrics = runner.test()
    runner.strategy.leave()
    return metrics


DEEPSPEED = dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=3))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy",
    [
        dict(type="DDPStrategy"),
        dict(type="FSDPStrategy"),
        pytest.param(DEEPSPEED, marks=pytest.mark.deepspeed),
    ],
    ids=["ddp", "fsdp", "zero3"],
)
def test_on_two_processes(tmp_path: Path, workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    """Seven samples in batches of two: a process has one sample less."""
    for trains in (False, True):
        for found in workers2.run(on_two, str(tmp_path / str(trains)), strategy, trains):
            check(found, expected(fill(Listed())))
