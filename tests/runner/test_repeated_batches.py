"""Batches that a process with fewer data repeats to stay in step: nobody sees them, and nothing is generated for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import BaseMetric, FlexibleRunner, Hook
from flextrain.testing import WorkerGroup

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("quick")]


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def generate(self, ids: Tensor) -> Tensor:
        return ids * self.scale[0].detach()


class Answers(nn.Module):
    """Generates to predict; ``predicted`` are the inputs of all calls."""

    predicted: list[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.speaker = Speaker()

    def forward(self, ids: Tensor, mode: str = "loss") -> Any:
        type(self).predicted.append(ids.tolist())
        return list(self.speaker.generate(ids))


class Sees(Hook):
    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        assert batch_idx == len(self.batches)
        self.batches.append(data_batch["ids"].tolist())


class Counts(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [int(one) for one in data_samples]

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        return {"seen": sorted(results)}


def evaluates(folder: str, strategy: dict[str, Any], full_weights: bool | None, count: int) -> Any:
    Answers.predicted = []
    hook = Sees()
    file = Path(folder) / "predictions.pt"
    runner = FlexibleRunner(
        model=Answers,
        work_dir=folder,
        strategy=strategy,
        val_dataloader=dict(batch_size=1, dataset=[{"ids": i} for i in range(count)], collate_fn="default_collate"),
        val_cfg=dict() if full_weights is None else dict(full_weights=full_weights),
        val_evaluator=[dict(type=Counts), dict(type="DumpResults", out_file_path=str(file))],
        custom_hooks=[hook],
    )
    found = runner.val()
    number = runner.val_loop.num_batches
    runner.close()
    return found["seen"], [int(one) for one in torch.load(file)], Answers.predicted, hook.batches, number


DDP, FSDP = dict(type="DDPStrategy"), dict(type="FSDPStrategy")


@pytest.mark.parametrize("count", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("strategy", "full_weights", "repeats"), [(DDP, False, True), (DDP, None, False), (FSDP, None, False)], ids=str
)
def test_nobody_sees_a_repeated_batch(
    workers2: WorkerGroup,
    tmp_path: Path,
    strategy: dict[str, Any],
    full_weights: bool | None,
    repeats: bool,
    count: int,
) -> None:
    found = workers2.run(evaluates, str(tmp_path), strategy, full_weights, count)
    everything = list(range(count))
    assert [seen for seen, *_ in found] == [everything] * 2
    assert found[0][1] == everything  # the file
    own = [everything[0::2], everything[1::2]]
    for rank, (_, _, predicted, batches, number) in enumerate(found):
        assert [i for batch in batches for i in batch] == own[rank]
        assert number == len(own[rank])
        assert len(predicted) == (len(own[0]) if repeats else len(own[rank]))
