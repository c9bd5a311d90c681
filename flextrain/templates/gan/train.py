"""Train a GAN on points of a ring: two optimizers, and a model that says which is updated when."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from flextrain import BaseModel, FlexibleRunner, OptimWrapperDict

NOISE_SIZE = 8


def ring(count: int, seed: int) -> TensorDataset:
    """Points of shape (2,) around the circle of radius 1."""
    generator = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * torch.rand(count, generator=generator)
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator))


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


class GAN(BaseModel):
    """Defines `train_step`, and so decides when each optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(NOISE_SIZE, 2)
        self.discriminator = mlp(2, 1)

    def sample(self, count: int) -> Tensor:
        device = next(self.generator.parameters()).device
        points: Tensor = self.generator(torch.randn(count, NOISE_SIZE, device=device))
        return points

    def judge(self, points: Tensor, is_real: bool) -> Tensor:
        logits = self.discriminator(points)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        (real,) = self.data_preprocessor(data, True)

        optim = optim_wrapper["discriminator"]
        with optim.optim_context(self.discriminator):
            fake = self.sample(len(real)).detach()
            loss_d = self.judge(real, is_real=True) + self.judge(fake, is_real=False)
        optim.update_params(loss_d)

        optim = optim_wrapper["generator"]
        # Otherwise the discriminator would start its next update with gradients of the generator's loss.
        self.discriminator.requires_grad_(False)
        with optim.optim_context(self.generator):
            points = self.sample(len(real))
            loss_g = self.judge(points, is_real=True)
        optim.update_params(loss_g)
        self.discriminator.requires_grad_(True)

        # Tensors stay on the device until a log line is due; `distance` falls as the points come nearer to the ring.
        distance = (points.detach().norm(dim=1) - 1).abs().mean()
        return {"loss": loss_d + loss_g, "loss_d": loss_d, "loss_g": loss_g, "distance": distance}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--work-dir", default="work_dirs/gan")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    arguments = parser.parse_args()
    adam = dict(type="Adam", lr=1e-3, betas=(0.5, 0.999))
    runner = FlexibleRunner(
        model=GAN,
        work_dir=arguments.work_dir,
        train_dataloader=dict(batch_size=128, dataset=ring(4096, seed=0), collate_fn="default_collate"),
        optim_wrapper=dict(generator=dict(optimizer=adam), discriminator=dict(optimizer=adam)),
        train_cfg=dict(max_epochs=arguments.epochs),
        default_hooks=dict(checkpoint=dict(interval=10, max_keep_ckpts=1, overwrite=True)),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )
    runner.train()


if __name__ == "__main__":
    main()
