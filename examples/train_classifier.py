"""Train an image classifier in one process or many, with any strategy.

    python examples/train_classifier.py
    torchrun --nproc-per-node 2 examples/train_classifier.py --use-ddp
    torchrun --nproc-per-node 2 examples/train_classifier.py --use-fsdp
    torchrun --nproc-per-node 2 examples/train_classifier.py --use-deepspeed --zero-stage 2
    torchrun --nproc-per-node 2 examples/train_classifier.py --use-ddp --dataset cifar10 --data-root data

By default it trains a small convolutional network on scikit-learn's handwritten digits, which come with that package. With
--dataset cifar10 it trains torchvision's ResNet-50.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from flextrain import STRATEGIES, BaseMetric, BaseModel, FlexibleRunner, __version__

# 22 batches of 64, so that one process and two processes train on the same batches. The rest is for validation.
NUM_TRAIN_DIGITS = 22 * 64
STRATEGY_FLAGS = {
    "use_ddp": "DDPStrategy",
    "use_fsdp": "FSDPStrategy",
    "use_deepspeed": "DeepSpeedStrategy",
    "use_npu": "NPUStrategy",
}


class Classifier(BaseModel):
    """A network from images to logits, with the loss and predictions that the runner needs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        logits = self.net(images)
        if mode == "loss":
            return {"loss": F.cross_entropy(logits, labels)}
        if mode == "predict":
            return logits, labels
        return logits


class Accuracy(BaseMetric):
    """Percentage of samples whose largest logit is that of the label."""

    def process(self, data_batch: Any, data_samples: tuple[Tensor, Tensor]) -> None:
        logits, labels = data_samples
        self.results.extend((logits.argmax(dim=1) == labels).tolist())

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": 100 * sum(results) / len(results)}


def digits() -> tuple[Dataset[Any], Dataset[Any]]:
    """Training and validation sets of scikit-learn's digits: 8 x 8 pixels, one channel, values from 0 to 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:NUM_TRAIN_DIGITS], order[NUM_TRAIN_DIGITS:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def digits_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def cifar10(root: Path) -> tuple[Dataset[Any], Dataset[Any]]:
    """CIFAR-10 in torchvision's format on disk; nothing is downloaded."""
    from torchvision import datasets, transforms

    normalize = transforms.Normalize((0.491, 0.482, 0.447), (0.202, 0.199, 0.201))
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    try:
        train = datasets.CIFAR10(root, True, transforms.Compose([*augment, transforms.ToTensor(), normalize]))
        val = datasets.CIFAR10(root, False, transforms.Compose([transforms.ToTensor(), normalize]))
    except RuntimeError:
        raise SystemExit(
            f"--data-root: no CIFAR-10 in {root}, expected the folder {root / 'cifar-10-batches-py'}; fetch it with "
            f"torchvision.datasets.CIFAR10({str(root)!r}, download=True), or leave out --dataset to train on digits"
        ) from None
    return train, val


def cifar10_net() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(num_classes=10)  # type: ignore[no-any-return]


def dataloader(dataset: Dataset[Any], batch_size: int, num_workers: int, shuffle: bool) -> dict[str, Any]:
    return dict(
        batch_size=batch_size,
        num_workers=num_workers,
        dataset=dataset,
        sampler=dict(type="DefaultSampler", shuffle=shuffle),
        collate_fn=dict(type="default_collate"),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    strategy = parser.add_mutually_exclusive_group()
    for flag, name in STRATEGY_FLAGS.items():
        strategy.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=f"spread the model with {name}")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=3, help="with --use-deepspeed")
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], help="default: detected")
    parser.add_argument("--dataset", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of CIFAR-10")
    parser.add_argument("--work-dir", default="work_dirs/train_classifier")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--fp16", action="store_true", help="compute in float16 with loss scaling, on a GPU")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    # python -m torch.distributed.launch adds this argument; it is not used.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.amp and arguments.fp16:
        parser.error("--fp16: --amp computes in bfloat16, give one of them")
    for flag, name in STRATEGY_FLAGS.items():
        if getattr(arguments, flag) and name not in STRATEGIES:
            parser.error(f"--{flag.replace('_', '-')}: flextrain {__version__} has no {name} yet")
    return arguments


def strategy(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The configuration of the strategy. The rest of the script is the same for all strategies."""
    name = next((name for flag, name in STRATEGY_FLAGS.items() if getattr(arguments, flag)), None)
    if name is None:
        return None
    options: dict[str, Any] = {}
    if arguments.use_fsdp and arguments.dataset == "cifar10":
        options = dict(wrap=["Bottleneck"])
    if arguments.use_deepspeed:
        options = dict(
            zero_optimization=dict(
                stage=arguments.zero_stage,
                allgather_partitions=True,
                reduce_scatter=True,
                allgather_bucket_size=50_000_000,
                reduce_bucket_size=50_000_000,
                overlap_comm=torch.accelerator.is_available(),
                contiguous_gradients=True,
            )
        )
        if arguments.fp16:
            options |= dict(fp16=dict(loss_scale=0, loss_scale_window=500, hysteresis=2, initial_scale_power=15))
    return dict(type=name, **options)


def main() -> None:
    arguments = parse_arguments()
    if arguments.dataset == "digits":
        (train_set, val_set), net = digits(), digits_net
    else:
        (train_set, val_set), net = cifar10(arguments.data_root), cifar10_net
    optimizer = dict(type="AdamW", lr=arguments.lr, weight_decay=0.01)
    precision = dict(type="OptimWrapper")
    if arguments.amp or arguments.fp16:
        precision = dict(type="AmpOptimWrapper", dtype="float16" if arguments.fp16 else "bfloat16")
    schedule = [dict(type="LinearLR", start_factor=0.1, by_epoch=True, end=1, convert_to_iter_based=True)]
    if arguments.epochs > 1:
        cosine = dict(
            type="CosineAnnealingLR", by_epoch=True, begin=1, end=arguments.epochs, convert_to_iter_based=True
        )
        schedule.append(cosine)
    runner = FlexibleRunner(
        model=lambda: Classifier(net()),
        work_dir=arguments.work_dir,
        strategy=strategy(arguments),
        launcher=arguments.launcher,
        train_dataloader=dataloader(train_set, arguments.batch_size, arguments.num_workers, shuffle=True),
        optim_wrapper=dict(
            **precision,
            optimizer=optimizer,
            accumulative_counts=arguments.accumulate,
            clip_grad=dict(max_norm=5.0),
        ),
        param_scheduler=schedule,
        train_cfg=dict(by_epoch=True, max_epochs=arguments.epochs, val_interval=1),
        val_dataloader=dataloader(val_set, arguments.batch_size, arguments.num_workers, shuffle=False),
        val_cfg=dict(),
        val_evaluator=dict(type=Accuracy),
        default_hooks=dict(
            checkpoint=dict(overwrite=True)
        ),  # replace checkpoints of an earlier run, unless this run resumes
        randomness=dict(seed=arguments.seed),
        compile=arguments.compile,
        resume=arguments.resume,
    )
    runner.train()


if __name__ == "__main__":
    main()
