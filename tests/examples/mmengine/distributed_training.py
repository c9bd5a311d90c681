"""The same classifier with any launcher, MMEngine's Runner by its old name, and a profile of the first epoch."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from flextrain import BaseMetric, BaseModel
from flextrain import FlexibleRunner as Runner


class MMClassifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, imgs, labels, mode):
        scores = self.net(imgs)
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, labels)}
        return scores, labels


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        scores, labels = data_samples
        self.results.append({"size": len(labels), "right": (scores.argmax(dim=1) == labels).sum().cpu()})

    def compute_metrics(self, results):
        return dict(accuracy=100 * sum(r["right"] for r in results) / sum(r["size"] for r in results))


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    return parser.parse_args()


def main():
    args = parse_args()
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train_dataloader = dict(
        batch_size=args.batch_size,
        dataset=TensorDataset(images[:1280], labels[:1280]),
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )
    val_dataloader = dict(
        batch_size=args.batch_size,
        dataset=TensorDataset(images[1280:], labels[1280:]),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )
    runner = Runner(
        model=MMClassifier(),
        work_dir="./work_dir",
        train_dataloader=train_dataloader,
        optim_wrapper=dict(optimizer=dict(type=SGD, lr=0.1, momentum=0.9)),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_dataloader=val_dataloader,
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        launcher=args.launcher,
        randomness=dict(seed=0),
        custom_hooks=[dict(type="ProfilerHook", on_trace_ready=dict(type="tb_trace"))],
    )
    runner.train()


if __name__ == "__main__":
    main()
