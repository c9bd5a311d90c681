"""Train a small GAN with two optimizers on handwritten digits. Pictures of its progress are saved in the work directory.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_classifier import dataloader, digits

from flextrain import BaseModel, FlexibleRunner, Hook, OptimWrapperDict

NOISE_SIZE = 32


def mlp(num_inputs: int, num_outputs: int, activation: nn.Module) -> nn.Module:
    hidden = 256
    return nn.Sequential(
        nn.Linear(num_inputs, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, num_outputs),
        activation,
    )


class GAN(BaseModel):
    """A model that defines `train_step`, and so decides when each optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(NOISE_SIZE, 64, nn.Sigmoid())
        self.discriminator = mlp(64, 1, nn.Identity())

    def sample(self, count: int) -> Tensor:
        device = next(self.generator.parameters()).device
        return self.generator(torch.randn(count, NOISE_SIZE, device=device))

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        images, _ = self.data_preprocessor(data, True)
        real = images.flatten(1)

        optim = optim_wrapper["discriminator"]
        with optim.optim_context(self.discriminator):
            fake = self.sample(len(real)).detach()
            loss_d = self.judge(real, is_real=True) + self.judge(fake, is_real=False)
        optim.update_params(loss_d)

        optim = optim_wrapper["generator"]
        # Otherwise the discriminator would start its next update with gradients from the generator's loss.
        self.discriminator.requires_grad_(False)
        with optim.optim_context(self.generator):
            loss_g = self.judge(self.sample(len(real)), is_real=True)
        optim.update_params(loss_g)
        self.discriminator.requires_grad_(True)

        return {"loss": loss_d + loss_g, "loss_d": loss_d, "loss_g": loss_g}

    def judge(self, images: Tensor, is_real: bool) -> Tensor:
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


class SampleHook(Hook):
    """Saves a picture of 8 x 8 generated digits every few epochs."""

    def __init__(self, interval: int = 10) -> None:
        self.interval = interval

    def after_train_epoch(self, runner: FlexibleRunner) -> None:
        if runner.rank != 0 or not self.every_n_epochs(runner, self.interval):
            return
        from matplotlib import pyplot as plt

        with torch.no_grad():
            samples = runner.strategy.module.sample(64).cpu()
        # Eight rows of eight images, each of 8 x 8 pixels with a margin of one.
        tiles = F.pad(samples.view(8, 8, 8, 8), (1, 1, 1, 1))
        sheet = tiles.transpose(1, 2).reshape(80, 80).repeat_interleave(4, 0).repeat_interleave(4, 1)
        plt.imsave(Path(runner.work_dir) / f"samples_{runner.epoch + 1}.png", sheet.numpy(), cmap="gray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--work-dir", default="work_dirs/gan")
    arguments = parser.parse_args()
    train_set, _ = digits()
    adam = dict(type="Adam", lr=1e-3, betas=(0.5, 0.999))
    FlexibleRunner(
        model=GAN(),
        work_dir=arguments.work_dir,
        train_dataloader=dataloader(train_set, batch_size=64, num_workers=0, shuffle=True),
        optim_wrapper=dict(generator=dict(optimizer=adam), discriminator=dict(optimizer=adam)),
        train_cfg=dict(by_epoch=True, max_epochs=arguments.epochs),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=20, max_keep_ckpts=1, overwrite=True)),
        custom_hooks=[dict(type=SampleHook, interval=max(1, arguments.epochs // 5))],
        randomness=dict(seed=0),
    ).train()


if __name__ == "__main__":
    main()
