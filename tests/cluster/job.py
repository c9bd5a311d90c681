"""A small training whose losses depend on nothing but the number of processes; started by real launchers.

Every process appends ``{"iter": ..., "loss": ..., "start": ...}`` for each update to ``losses.<rank>.jsonl`` in the work
directory; ``start`` counts the starts of the job. The last line of the output is the launch, or how the process ended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from flextrain import FlexibleRunner, Hook
from flextrain.strategies import detect_launch


class Points(Dataset[tuple[Tensor, Tensor]]):
    """1024 samples, each made from its index."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.tensor(index % 4)


class Classifier(nn.Module):
    """Two linear layers and a dropout, so that the random generators count too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(x), y)}


class WriteLosses(Hook):
    """Write each update's loss, and take a given time for it."""

    def __init__(self, folder: Path, start: int, step_s: float) -> None:
        self.folder, self.start, self.step_s = folder, start, step_s

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        line = {"iter": runner.iter + 1, "loss": float(outputs["loss"]), "start": self.start}
        with open(self.folder / f"losses.{runner.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(self.step_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.0, help="seconds that an update takes besides")
    parser.add_argument("--interval", type=int, default=1000, help="updates between two checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--env-cfg", type=json.loads, default=None)
    parser.add_argument("--launch-only", action="store_true", help="print the launch and end")
    options = parser.parse_args()
    if options.launch_only:
        launch = detect_launch()
        said = (
            f"rank {launch.rank} of {launch.world_size}, local {launch.local_rank}, {launch.init_method}, {launch.job}"
        )
        os.write(1, f"{said}\n".encode())  # at once, or another process's line may come before the end of this one
        return
    options.work_dir.mkdir(parents=True, exist_ok=True)
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    runner = FlexibleRunner(
        model=Classifier,
        work_dir=options.work_dir,
        strategy=dict(type=options.strategy, device="cpu", timeout_s=options.timeout),
        train_dataloader=DataLoader(Points(), batch_size=4, shuffle=True),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-2)),
        train_cfg=dict(by_epoch=False, max_iters=options.iters),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=options.interval, max_keep_ckpts=2)),
        custom_hooks=[WriteLosses(options.work_dir, int(restarts), options.step)],
        randomness=dict(seed=0),
        env_cfg=options.env_cfg,
        resume=True,
    )
    runner.train()
    print(f"rank {runner.rank} of {runner.world_size}: done at {runner.iter}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        print(f"ended by {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
