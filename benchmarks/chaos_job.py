"""The training job that chaos.py disturbs; it knows nothing of the faults.

    flextrain run --nproc-per-node 2 benchmarks/chaos_job.py STRATEGY WORK_DIR RECORD_DIR ITERATIONS INTERVAL SECONDS STALL_S

It leaves its processes' ids in RECORD_DIR/pids, and a line per start and per finished update in RECORD_DIR/updates. While the
file RECORD_DIR/slow exists, every fsync takes half a second longer.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from flextrain import FlexibleRunner, Hook

STRATEGIES = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy"),
    "zero2": dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=2)),
}
SLOW_S = 0.5


class Points(Dataset[dict[str, Tensor]]):
    """Samples made of their index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum() > 0}


class Net(nn.Module):
    """A classifier with dropout, whose weights tell which random numbers were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.layers(x), y.long())}


class Recorder(Hook):
    """Records the processes and the finished updates, and makes an update take long enough to be hit."""

    priority = "HIGHEST"

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def before_train(self, runner: Any) -> None:
        pids = self.folder / "pids"
        pids.mkdir(exist_ok=True)
        mine = pids / f".{runner.rank}"
        mine.write_text(str(os.getpid()))
        mine.replace(pids / str(runner.rank))
        if runner.rank == 0:
            self._append(f"start {runner.iter}")

    def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        if runner.rank == 0:
            self._append(f"done {runner.iter + 1}")

    def _append(self, line: str) -> None:
        with (self.folder / "updates").open("a") as file:
            file.write(f"{line}\n")


def slow_when_asked(flag: Path) -> None:
    """Make fsync slow while the file ``flag`` exists."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        if flag.exists():
            time.sleep(SLOW_S)
        fsync(descriptor)

    os.fsync = slow


def main() -> None:
    """Train."""
    strategy, work_dir, record = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    iterations, interval = map(int, sys.argv[4:6])
    seconds, stall_s = map(float, sys.argv[6:8])
    slow_when_asked(record / "slow")
    torch.set_num_threads(1)
    env_cfg: dict[str, Any] = dict(watchdog=dict(stall_s=stall_s)) if stall_s else {}
    runner = FlexibleRunner(
        model=Net,
        work_dir=work_dir,
        strategy=STRATEGIES[strategy],
        train_dataloader=dict(dataset=Points(), batch_size=8, collate_fn="default_collate"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=iterations, by_epoch=False),
        train_cfg=dict(by_epoch=False, max_iters=iterations),
        default_hooks=dict(
            checkpoint=dict(by_epoch=False, interval=interval, max_keep_ckpts=2, on_error="continue"),
            logger=dict(interval=10),
        ),
        custom_hooks=[Recorder(record, seconds)],
        randomness=dict(seed=0),
        env_cfg=env_cfg,
    )
    runner.train()


if __name__ == "__main__":
    main()
