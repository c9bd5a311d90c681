"""Script for `flextrain plan`: ``zoo.py MODEL [ac] [accumulate] [adapters]`` trains a tiny model of one of the families that are compared."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from flextrain import FlexibleRunner

VOCABULARY, LENGTH, CLASSES = 256, 64, 10


class Perceptron(nn.Module):
    """Its 1,000 rows do not divide by most numbers of processes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1000), nn.GELU(), nn.Linear(1000, 256)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class NormedSGD(torch.optim.SGD):
    """Divides by the norm of a whole parameter, which a shard does not know."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / (1 + parameter.norm()))


class Images(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return {"loss": functional.cross_entropy(self.net(x), y)}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    options = dict(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, use_cache=False)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, **options))


def mixtral():
    """Every token goes to every expert, so that the processes' shares do not depend on values."""
    from transformers import MixtralConfig, MixtralForCausalLM

    options = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    experts = dict(num_local_experts=4, num_experts_per_tok=4)
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, **options, **experts)
    )


def resnet():
    from torchvision.models import resnet18

    return Images(resnet18(num_classes=CLASSES))


def vit():
    from torchvision.models import VisionTransformer

    return Images(
        VisionTransformer(
            image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=256, num_classes=CLASSES
        )
    )


MODELS = {"mlp": Perceptron, "llama": llama, "mixtral": mixtral, "resnet": resnet, "vit": vit}
BLOCKS = {
    "mlp": "Sequential",
    "llama": "LlamaDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "resnet": "BasicBlock",
    "vit": "EncoderBlock",
}


def as_list(samples):
    """A batch for positional arguments, as default_collate makes it of tuples."""
    return [torch.stack([sample["x"] for sample in samples])]


class Samples(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        if self.name == "mlp":
            return {"x": torch.randn(256, generator=generator)}
        if self.name in ("resnet", "vit"):
            return {"x": torch.randn(3, 32, 32, generator=generator), "y": index % CLASSES}
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def main(name, *options):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    strategy = dict(type="FSDPStrategy", wrap=[BLOCKS[name]])
    if "ac" in options:
        strategy["activation_checkpointing"] = dict(classes=[BLOCKS[name]])
    adapters = [dict(type="LoRA", r=4, target_modules=r"blocks\.\d\.[02]")] if "adapters" in options else []
    FlexibleRunner(
        model=MODELS[name](),
        transforms=adapters,
        train_dataloader=dict(dataset=Samples(name), batch_size=8, collate_fn="default_collate"),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        strategy=strategy,
        optim_wrapper=dict(
            optimizer=dict(type="AdamW", lr=1e-3),
            clip_grad=dict(max_norm=1.0),
            accumulative_counts=2 if "accumulate" in options else 1,
        ),
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
