"""A small ResNet on handwritten digits; a flag chooses the strategy."""

import argparse
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import Dataset
from torchvision.models.resnet import BasicBlock

from flextrain import BaseMetric, BaseModel, FlexibleRunner


class Digits(Dataset):
    def __init__(self, train):
        images, labels = load_digits(return_X_y=True)
        chosen = slice(640) if train else slice(1600, None)
        grey = (images[chosen].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
        self.images, self.labels = np.repeat(grey, 3, axis=1), labels[chosen]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class MMResNet(BaseModel):
    def __init__(self):
        super().__init__()
        norm = partial(nn.GroupNorm, 8)  # statistics per sample: every strategy computes the same
        shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, stride=2), norm(32))
        self.resnet = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            BasicBlock(16, 16, norm_layer=norm),
            BasicBlock(16, 32, stride=2, downsample=shortcut, norm_layer=norm),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def forward(self, imgs, labels, mode):
        scores = self.resnet(imgs)
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, labels)}
        return scores, labels


class Accuracy(BaseMetric):
    # One result per batch, as most metrics written for MMEngine have it.
    def process(self, data_batch, data_samples):
        scores, labels = data_samples
        self.results.append({"size": len(labels), "right": (scores.argmax(dim=1) == labels).sum().cpu()})

    def compute_metrics(self, results):
        return dict(accuracy=100 * sum(r["right"] for r in results) / sum(r["size"] for r in results))


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--use-fsdp", action="store_true")
    parser.add_argument("--use-deepspeed", action="store_true")
    parser.add_argument("--use-colossalai", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    train_dataloader = dict(
        batch_size=args.batch_size,
        dataset=Digits(train=True),
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )
    val_dataloader = dict(
        batch_size=64,
        dataset=Digits(train=False),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )
    strategy = None
    optim_wrapper = dict(type="AmpOptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))
    if args.use_deepspeed:
        strategy = dict(
            type="DeepSpeedStrategy",
            fp16=dict(
                enabled=torch.cuda.is_available(),
                fp16_master_weights_and_grads=False,
                loss_scale=0,
                loss_scale_window=500,
                hysteresis=2,
                min_loss_scale=1,
                initial_scale_power=15,
            ),
            bf16=dict(enabled=not torch.cuda.is_available()),
            inputs_to_half=[0],
            zero_optimization=dict(
                stage=3,
                allgather_partitions=True,
                reduce_scatter=True,
                allgather_bucket_size=50000000,
                reduce_bucket_size=50000000,
                overlap_comm=True,
                contiguous_gradients=True,
                cpu_offload=False,
            ),
        )
        optim_wrapper = dict(type="DeepSpeedOptimWrapper", optimizer=dict(type="AdamW", lr=1e-3))
    elif args.use_fsdp:
        policy = partial(size_based_auto_wrap_policy, min_num_params=1e3)
        strategy = dict(type="FSDPStrategy", model_wrapper=dict(auto_wrap_policy=policy))
    elif args.use_colossalai:
        strategy = dict(type="ColossalAIStrategy")
        optim_wrapper = dict(optimizer=dict(type="HybridAdam", lr=1e-3))

    runner = FlexibleRunner(
        model=MMResNet(),
        work_dir="./work_dirs",
        strategy=strategy,
        train_dataloader=train_dataloader,
        optim_wrapper=optim_wrapper,
        param_scheduler=dict(type="LinearLR"),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_dataloader=val_dataloader,
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        randomness=dict(seed=0),
    )
    runner.train()


if __name__ == "__main__":
    main()
