"""The smallest model in MMEngine's guides, with the options of those about memory and speed."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from flextrain import BaseModel
from flextrain import FlexibleRunner as Runner


class ToyModel(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, img, label, mode):
        feat = self.linear(img)
        loss1 = (feat - label).pow(2)
        loss2 = (feat - label).abs()
        return dict(loss1=loss1, loss2=loss2)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--load-from")
    parser.add_argument("--fsdp-as-model-wrapper", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    train_dataset = [(torch.ones(1, 1), torch.ones(1, 1))] * 48
    optim_wrapper = dict(
        type="AmpOptimWrapper" if args.amp else "OptimWrapper",
        optimizer=dict(type="SGD", lr=0.01),
        accumulative_counts=args.accumulate,
    )
    cfg = {}
    if args.compile:
        cfg.update(compile=dict(backend="eager"))
    if args.fsdp_as_model_wrapper:
        cfg.update(model_wrapper_cfg=dict(type="MMFullyShardedDataParallel", cpu_offload=True))
    runner = Runner(
        model=ToyModel(),
        work_dir="tmp_dir",
        train_dataloader=DataLoader(train_dataset, batch_size=args.batch_size),
        train_cfg=dict(by_epoch=True, max_epochs=args.epochs),
        optim_wrapper=optim_wrapper,
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1)),
        load_from=args.load_from,
        resume=args.resume,
        cfg=cfg,
    )
    runner.train()


if __name__ == "__main__":
    main()
