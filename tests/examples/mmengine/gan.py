"""A GAN on handwritten digits: built optimizers in an OptimWrapperDict, and a train_step of its own."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from flextrain import BaseModel, ImgDataPreprocessor, OptimWrapper, OptimWrapperDict
from flextrain import FlexibleRunner as Runner

NOISE_SIZE, SIDE = 16, 8


class Digits(Dataset):
    def __init__(self):
        self.images = load_digits(return_X_y=True)[0].reshape(-1, 1, SIDE, SIDE)[:640] * (255 / 16)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return dict(inputs=torch.from_numpy(self.images[index]).to(torch.uint8))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(NOISE_SIZE, 64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(64, 128),
            nn.BatchNorm1d(128, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, SIDE * SIDE),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.model(z).view(-1, 1, SIDE, SIDE)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(SIDE * SIDE, 64), nn.LeakyReLU(0.2, inplace=True), nn.Linear(64, 1), nn.Sigmoid()
        )

    def forward(self, img):
        return self.model(img.flatten(1))


class GAN(BaseModel):
    def __init__(self, generator, discriminator, data_preprocessor):
        super().__init__(data_preprocessor=data_preprocessor)
        self.generator, self.discriminator = generator, discriminator

    def train_step(self, data, optim_wrapper):
        images = self.data_preprocessor(data, True)["inputs"]
        with optim_wrapper["discriminator"].optim_context(self.discriminator):
            log_vars = self.train_discriminator(images, optim_wrapper["discriminator"])
        set_requires_grad(self.discriminator, False)
        with optim_wrapper["generator"].optim_context(self.generator):
            log_vars.update(self.train_generator(images, optim_wrapper["generator"]))
        set_requires_grad(self.discriminator, True)
        return log_vars

    def forward(self, batch_inputs, data_samples=None, mode=None):
        return self.generator(batch_inputs)

    def train_discriminator(self, real, optimizer_wrapper):
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), NOISE_SIZE).type_as(real))
        of_fake, of_real = self.discriminator(fake), self.discriminator(real)
        losses = dict(
            loss_disc_fake=F.binary_cross_entropy(of_fake, torch.zeros_like(of_fake)),
            loss_disc_real=F.binary_cross_entropy(of_real, torch.ones_like(of_real)),
        )
        loss, log_vars = self.parse_losses(losses)
        optimizer_wrapper.update_params(loss)
        return log_vars

    def train_generator(self, real, optimizer_wrapper):
        of_fake = self.discriminator(self.generator(torch.randn(len(real), NOISE_SIZE).type_as(real)))
        loss, log_vars = self.parse_losses(dict(loss_gen=F.binary_cross_entropy(of_fake, torch.ones_like(of_fake))))
        optimizer_wrapper.update_params(loss)
        return log_vars


def set_requires_grad(net, requires_grad):
    for parameter in net.parameters():
        parameter.requires_grad = requires_grad


def main():
    train_dataloader = dict(
        batch_size=64,
        num_workers=0,
        sampler=dict(type="DefaultSampler", shuffle=True),
        dataset=Digits(),
    )
    train_dataloader = Runner.build_dataloader(train_dataloader)
    generator, discriminator = Generator(), Discriminator()
    data_preprocessor = ImgDataPreprocessor(mean=[127.5], std=[127.5])
    opt_g = OptimWrapper(torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    opt_d = OptimWrapper(torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    runner = Runner(
        GAN(generator, discriminator, data_preprocessor),
        work_dir="runs/gan/",
        train_dataloader=train_dataloader,
        train_cfg=dict(by_epoch=True, max_epochs=4),
        optim_wrapper=OptimWrapperDict(generator=opt_g, discriminator=opt_d),
        randomness=dict(seed=0),
    )
    runner.train()


if __name__ == "__main__":
    main()
