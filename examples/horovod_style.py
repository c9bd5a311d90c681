"""A script for Horovod, converted: each line of Horovod's stands above what has taken its place.

    python examples/horovod_style.py
    mpirun -n 2 python examples/horovod_style.py --batch-size 32
    horovodrun --mpi -np 2 python examples/horovod_style.py --batch-size 32
    torchrun --nproc-per-node 2 examples/horovod_style.py --batch-size 32

Horovod's last release does not compile against torch 2.1 or later. DDPStrategy, which several processes have unless you name
another strategy, does what Horovod did: processes of one script, started by mpirun, that average their gradients during backward.
The model is a network for scikit-learn's handwritten digits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flextrain import BaseMetric, FlexibleRunner, Hook

NUM_TRAIN_DIGITS = 22 * 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(images)
        return {"loss": F.cross_entropy(logits, labels), "right": (logits.argmax(1) == labels).float()}


class Accuracy(BaseMetric):
    """The mean over all samples of all processes; those that were repeated to fill the last batch do not count.

    Horovod: ``accuracy = hvd.allreduce(torch.tensor(right / seen), name="accuracy")``
    """

    def process(self, data_batch: Any, data_samples: dict[str, Tensor]) -> None:
        self.results += data_samples["right"].tolist()

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"accuracy": 100 * sum(results) / len(results)}


class WeightNorm(Hook):
    """What a script computes with collectives of its own is a hook, with torch.distributed.

    Horovod: ``largest = hvd.allreduce(norm, op=hvd.Max)``, ``if hvd.rank() == 0: print(...)``
    """

    def after_train_epoch(self, runner: FlexibleRunner) -> None:
        norm = torch.stack([parameter.detach().norm() for parameter in runner.model.parameters()]).norm()
        if runner.world_size > 1:  # hvd.size()
            torch.distributed.all_reduce(norm, torch.distributed.ReduceOp.MAX)
        runner.logger.info(f"The weights' norm is {norm.item():.4f} at most")  # rank 0's alone is shown


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation sets of scikit-learn's digits: 64 pixels from 0 to 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:NUM_TRAIN_DIGITS], order[NUM_TRAIN_DIGITS:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=1e-3, help="for 64 samples per update")
    parser.add_argument("--work-dir", default="work_dirs/horovod_style")
    args = parser.parse_args()

    train, val = digits()
    runner = FlexibleRunner(  # hvd.init(), and torch.cuda.set_device(hvd.local_rank())
        # model.cuda(), and hvd.broadcast_parameters(model.state_dict(), root_rank=0): all take rank 0's weights
        model=Net,
        work_dir=args.work_dir,
        # DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank()), and sampler.set_epoch(epoch)
        train_dataloader=DataLoader(train, batch_size=args.batch_size, shuffle=True),
        val_dataloader=DataLoader(val, batch_size=args.batch_size),
        optim_wrapper=dict(
            # hvd.DistributedOptimizer(AdamW(...), named_parameters=model.named_parameters()): gradients are averaged during
            # backward; hvd.broadcast_optimizer_state(optimizer, root_rank=0): a resumed run has it from the checkpoint
            optimizer=dict(type="AdamW", lr=args.lr),
            accumulative_counts=1,  # backward_passes_per_step
            clip_grad=dict(max_norm=5.0),  # optimizer.synchronize(), clip_grad_norm_(...), optimizer.skip_synchronize()
        ),
        auto_scale_lr=dict(base_batch_size=64),  # lr=args.lr * hvd.size()
        train_cfg=dict(max_epochs=args.epochs),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        custom_hooks=[WeightNorm()],
        # if hvd.rank() == 0: torch.save(...); every process writes its share
        default_hooks=dict(checkpoint=dict(save_best="accuracy", max_keep_ckpts=2)),
        randomness=dict(seed=0),
        # hvd.broadcast(resume_from_epoch, root_rank=0), hvd.elastic.run: on any number of processes, in mid-epoch too
        resume=True,
    )
    runner.train()


if __name__ == "__main__":
    main()
