"""batch_size="auto": the largest that fits on every process; training is that with this number in the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import ConfigError, FlexibleRunner
from flextrain.testing import WorkerError, WorkerGroup
from flextrain.testing.sessions import whole_model

from .training import Samples, refuses


class Net(nn.Module):
    """Has memory for so many samples; the second process may have less."""

    def __init__(self, limits: tuple[int, ...]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.limits = limits

    def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        limit = self.limits[int(os.environ.get("RANK", 0)) % len(self.limits)]
        if self.training and len(x) > limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {len(x)}")
        return {"loss": (self.net(x).squeeze(1) - y).square().mean()}


def train(work_dir: str, size: Any, limits: tuple[int, ...] = (11,), strategy: Any = None, **changes: Any) -> Any:
    loader = dict(
        dataset=Samples(64, noisy=True), batch_size=size, collate_fn=dict(type="default_collate"), drop_last=True
    )
    model = changes.pop("built", None) or dict(type=Net, limits=limits)
    runner = FlexibleRunner(
        **{
            "model": model,
            "work_dir": work_dir,
            "strategy": strategy,
            "train_dataloader": loader | changes.pop("data", {}),
            "optim_wrapper": dict(optimizer=dict(type="AdamW", lr=0.01), accumulative_counts=2),
            "param_scheduler": "cosine",
            "train_cfg": dict(max_epochs=2),
            "randomness": dict(seed=5),
            "visualizer": [],
            **changes,
        }
    )
    with runner:
        runner.train()
        text = "".join(path.read_text() for path in Path(work_dir).glob("*/*.log"))
        state = {key: value.clone() for key, value in whole_model(runner.strategy).items()}
        return runner.train_dataloader.batch_size, state, torch.rand(3), text


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize("limit, size, line", [
    (11, 11, "11 of each process, 12 do not fit into memory"),
    (2, 2, "2 of each process, 3 do not fit into memory"),
    (10**6, 64, "64 of each process, all samples that a process has"),
])  # fmt: skip
def test_training_is_that_with_the_number(tmp_path: Path, limit: int, size: int, line: str) -> None:
    found = train(str(tmp_path / "auto"), "auto", (limit,))
    given = train(str(tmp_path / "given"), size, (limit,))
    assert found[0] == size
    assert line in found[3]
    same(found[1], given[1])
    assert torch.equal(found[2], given[2]), "the random states are too"


@pytest.mark.parametrize("by_function", [False, True])
def test_a_built_model_is_not_touched_by_trials(tmp_path: Path, by_function: bool) -> None:
    torch.manual_seed(1)
    model = Net((11,))
    untouched = {key: value.clone() for key, value in model.state_dict().items()}
    found = train(str(tmp_path / "auto"), "auto", built=(lambda: model) if by_function else model)
    again = Net((11,))
    again.load_state_dict(untouched)
    same(found[1], train(str(tmp_path / "given"), 11, built=again)[1])


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_agree_on_the_smallest(tmp_path: Path, workers2: WorkerGroup, strategy: str) -> None:
    limits = (11, 5) if strategy == "ddp" else (7, 7)  # sharded ones are in step with each other
    found = workers2.run(train, str(tmp_path / "auto"), "auto", limits, strategy)
    given = workers2.run(train, str(tmp_path / "given"), min(limits), limits, strategy)
    for (size, state, draws, _), (_, expected, others, _) in zip(found, given, strict=True):
        assert size == min(limits)
        same(state, expected)
        assert torch.equal(draws, others)


@pytest.mark.distributed
def test_data_of_its_own_are_all_of_a_process(tmp_path: Path, workers2: WorkerGroup) -> None:
    for size, *_, text in workers2.run(train_on_own, str(tmp_path), (24, 14)):
        assert size == 14
        assert "14 of each process, all samples that a process has" in text


def train_on_own(folder: str, lengths: tuple[int, ...]) -> Any:
    own = Samples(lengths[int(os.environ["RANK"])], noisy=True)
    return train(folder, "auto", (10**6,), "ddp", data=dict(dataset=own, shard=False), train_cfg=dict(max_epochs=1))


def test_a_resumed_run_has_the_number_of_its_checkpoint(tmp_path: Path, workers2: WorkerGroup) -> None:
    train(str(tmp_path), "auto", (11,))
    size, *_, text = train(str(tmp_path), "auto", (6,), resume=True, train_cfg=dict(max_epochs=2))
    assert size == 11
    assert "train_dataloader.batch_size: 11, as in " in text
    for size, *_ in workers2.run(train, str(tmp_path), "auto", (12,), "ddp", resume=True, train_cfg=dict(max_epochs=3)):
        assert size == 11
    path = next(tmp_path.glob("epoch_2"))
    loader = dict(dataset=Samples(64), batch_size="auto", collate_fn=dict(type="default_collate"))
    parts = dict(
        train_dataloader=loader, train_cfg=dict(max_epochs=2), optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01))
    )
    with FlexibleRunner(model=dict(type=Net, limits=(2,)), work_dir=tmp_path / "other", **parts) as runner:
        runner.resume(path)
        assert runner.train_dataloader.batch_size == 11


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(limits=(0,)), "train_dataloader.batch_size: not even one sample fits into memory"),
        (dict(size="Auto"), 'train_dataloader.batch_size: "Auto"'),
        (dict(optim_wrapper=lambda: None), "optim_wrapper"),
        (
            dict(val_dataloader=dict(dataset=[1], batch_size="auto"), val_cfg={}, val_evaluator="Perplexity"),
            "val_dataloader.batch_size",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        train(str(tmp_path), **{"size": "auto", **changes})


@pytest.mark.full
@pytest.mark.distributed
def test_an_engine_with_process_groups_of_its_own_is_refused(tmp_path: Path, workers1: WorkerGroup) -> None:
    message = 'train_dataloader.batch_size: "auto" cannot be tried beside the run, DeepSpeed .*; give a number'
    with pytest.raises(WorkerError, match=message):
        workers1.run(train, str(tmp_path), "auto", strategy="zero1")


def test_another_error_is_raised(tmp_path: Path) -> None:
    class Fails(Net):
        def forward(self, index: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            raise RuntimeError("another one")

    with pytest.raises(RuntimeError, match="another one"):
        train(str(tmp_path), "auto", built=Fails((3,)))
