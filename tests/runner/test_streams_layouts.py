"""Streams under strategies that shard models: samples and losses are one device's, also after resuming under another one."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flextrain import FlexibleRunner
from flextrain.core.comm import collectives
from flextrain.runner.hooks import Hook
from tests.mesh.models import LENGTH, MODELS, VOCABULARY

from ..conftest import WorkerFactory

PLAN = {"layers.*.q": "colwise", "layers.*.k": "colwise", "layers.*.v": "colwise", "layers.*.out": "rowwise",
        "layers.*.up": "colwise", "layers.*.down": "rowwise"}  # fmt: skip
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, dict(type="SingleDeviceStrategy")),
    "fsdp": (2, 2, dict(type="FSDPStrategy", wrap=["PlainBlock"])),
    "zero2": (2, 2, dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2))),
    "dp2xtp2": (4, 2, dict(type="MeshStrategy", dp_shard=2, tp=2, plan=PLAN)),
    "dp2xpp2": (4, 2, dict(type="MeshStrategy", dp_shard=2, pp=2)),
}
"""Processes, shards of the data, and the strategy."""
SAMPLES = 8


def as_sample(line: list[int]) -> dict[str, Tensor]:
    ids = torch.tensor(line)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two shards of lines, one without any, and one file of tokens."""
    generator = np.random.default_rng(0)
    for name, count in (("a", 13), ("b", 0), ("c", 9)):
        rows = generator.integers(1, VOCABULARY, (count, LENGTH)).tolist()
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    generator.integers(1, VOCABULARY, 700).astype(np.uint16).tofile(tmp_path / "t.bin")
    return tmp_path


class Watch(Hook):
    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.losses: list[Tensor] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.samples.append(data_batch["input_ids"][:, :4].tolist())
        self.losses.append(outputs["loss"])


def run(files: str, folder: str, layout: str, updates: int, workers: int = 0) -> dict[str, Any]:
    """What this process saw: the samples of each update, and the losses as a line of the log has them."""
    _, shards, strategy = LAYOUTS[layout]
    torch.manual_seed(0)
    watch = Watch()
    lines = dict(type="JsonlFiles", paths=f"{files}/*.jsonl", transform=as_sample)
    tokens = dict(type="TokenFiles", paths=f"{files}/t.bin", dtype="uint16")
    packed = dict(type="PackedTokens", source=tokens, length=LENGTH)
    runner = FlexibleRunner(
        model=MODELS["plain"](),
        work_dir=folder,
        strategy=strategy,
        train_dataloader=dict(
            dataset=dict(type="Mixture", sources=[lines, packed], weights=[1, 2]),
            batch_size=SAMPLES // shards,
            sampler=dict(type="InfiniteSampler"),
            collate_fn="default_collate",
            num_workers=workers,
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.2, momentum=0.9)),
        train_cfg=dict(by_epoch=False, max_iters=updates),
        custom_hooks=[watch],
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=3)),
        randomness=dict(seed=0),
        resume=True,
        log_level="WARNING",
    )
    runner.train()
    topology = runner.strategy.topology
    losses = []
    for loss in watch.losses:
        reported = collectives.all_gather_object(float(loss) if topology.reports else None)
        known = [value for value in reported if value is not None]
        losses.append(sum(known) / len(known))
    runner.strategy.leave()
    return {"shard": topology.data.index, "samples": watch.samples, "losses": losses}


def joined(found: list[dict[str, Any]], shards: int) -> tuple[list[Any], list[float]]:
    """The samples of each update in the order of their positions, once processes of one shard are known to have the same."""
    parts: dict[int, Any] = {}
    for each in found:
        assert parts.setdefault(each["shard"], each["samples"]) == each["samples"]
        assert each["losses"] == found[0]["losses"]
    assert sorted(parts) == list(range(shards))
    updates = zip(*(parts[shard] for shard in range(shards)), strict=True)
    return [list(chain(*zip(*update, strict=True))) for update in updates], found[0]["losses"]


PAIRS = [("fsdp", "dp2xtp2"), ("dp2xtp2", "zero2"), ("zero2", "dp2xpp2"), ("dp2xpp2", "one"), ("one", "fsdp")]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("first, second", [pytest.param(*pair, id="-".join(pair)) for pair in PAIRS])
def test_samples_and_losses_of_one_device(
    workers: WorkerFactory, files: Path, tmp_path: Path, first: str, second: str
) -> None:
    """A run that stops after three updates goes on with another strategy, number of processes and number of workers."""
    if "zero2" in (first, second):
        pytest.importorskip("deepspeed")
    whole = joined([run(str(files), str(tmp_path / "whole"), "one", 6)], 1)
    samples, losses = [], []
    for layout, until, loading in ((first, 3, 0), (second, 6, 1)):
        processes, shards, _ = LAYOUTS[layout]
        arguments = str(files), str(tmp_path / "run"), layout, until, loading
        found = [run(*arguments)] if processes == 1 else workers(processes).run(run, *arguments)
        own = joined(found, shards)
        samples, losses = samples + own[0], losses + own[1]
    assert samples == whole[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole[1]), rtol=1e-5, atol=1e-6)
