"""What the job files of this folder start: a training that may be stopped, killed and started again at any time.

    python examples/clusters/train.py --work-dir work_dirs/clusters

Nothing in it knows the launcher, the number of processes or machines, or whether it is started for the first time. The model is
a network for scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(images), labels)}


def arguments(iters: int, interval: int) -> dict[str, Any]:
    """The arguments of the runner, but its work directory."""
    from sklearn.datasets import load_digits

    # SIGTERM and SIGUSR1 end all processes after the same update, saved. In Slurm the end of the job's time does so too, and the
    # job is handed in again.
    preemption = dict(max_time="slurm", requeue=True) if "SLURM_JOB_ID" in os.environ else True

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    return dict(
        model=Net,
        train_dataloader=DataLoader(data, batch_size=32, shuffle=True),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        train_cfg=dict(by_epoch=False, max_iters=iters),
        default_hooks=dict(checkpoint=dict(by_epoch=False, interval=interval, max_keep_ckpts=2)),
        env_cfg=dict(preemption=preemption),
        randomness=dict(seed=0),
        resume=True,  # from the newest checkpoint in the work directory, if there is one
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", required=True, help="a folder that all machines see; the same at every start")
    parser.add_argument("--iters", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=200, help="iterations between two checkpoints")
    args = parser.parse_args()
    FlexibleRunner(**arguments(args.iters, args.interval), work_dir=args.work_dir).train()


if __name__ == "__main__":
    main()
