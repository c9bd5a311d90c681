"""Record which learning rate and weight decay MMEngine gives to every parameter into data/mmengine_paramwise.json.

Run by hand, where mmengine is installed: ``python tests/optim/record_mmengine_paramwise.py``. The test builds the same
models and reads the same cases from here, without mmengine.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

DATA = Path(__file__).parent / "data" / "mmengine_paramwise.json"
SGD = dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = dict(type="AdamW", lr=0.001, weight_decay=0.05, betas=(0.9, 0.95))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False))


class Zoo(nn.Module):
    """A parameter of every kind that a rule knows, at several depths; two that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.ones(4))
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=4))
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.SyncBatchNorm(4)])
        self.blocks = nn.ModuleDict({name: Block() for name in ("0", "1", "10")})
        self.temporal = nn.Conv1d(4, 4, 3, groups=4)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 2)
        self.norms[0].weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Tied(nn.Module):
    """A submodule under two parents, and a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(4, 4), "shared": nn.Linear(4, 4)})
        self.decoder = nn.ModuleDict({"shared": self.encoder["shared"], "head": nn.Linear(4, 4)})
        self.decoder["head"].weight = self.encoder["embed"].weight


MODELS = {"zoo": Zoo, "tied": Tied}

CASES: dict[str, dict[str, Any]] = {
    "nothing": dict(optimizer=SGD),
    "norm": dict(optimizer=SGD, paramwise_cfg=dict(norm_decay_mult=0.0)),
    "bias": dict(optimizer=SGD, paramwise_cfg=dict(bias_lr_mult=2.0, bias_decay_mult=0.0)),
    "bias lr without decay": dict(optimizer=dict(type="SGD", lr=0.1), paramwise_cfg=dict(bias_lr_mult=2.0)),
    "dwconv": dict(optimizer=SGD, paramwise_cfg=dict(dwconv_decay_mult=0.1)),
    "flat": dict(optimizer=ADAMW, paramwise_cfg=dict(flat_decay_mult=0.0)),
    "bias before dwconv before flat": dict(
        optimizer=ADAMW, paramwise_cfg=dict(bias_decay_mult=0.2, dwconv_decay_mult=0.3, flat_decay_mult=0.4)
    ),
    "all": dict(
        optimizer=ADAMW,
        paramwise_cfg=dict(
            norm_decay_mult=0.1, bias_lr_mult=3.0, bias_decay_mult=0.2, dwconv_decay_mult=0.3, flat_decay_mult=0.4
        ),
    ),
    "custom": dict(
        optimizer=ADAMW, paramwise_cfg=dict(custom_keys={"blocks": dict(lr_mult=0.1), "head": dict(decay_mult=0.0)})
    ),
    "the longest key counts": dict(
        optimizer=ADAMW,
        paramwise_cfg=dict(
            custom_keys={
                "blocks": dict(lr_mult=0.5),
                "blocks.1": dict(lr_mult=0.1),  # and blocks.10
                "blocks.10": dict(decay_mult=0.5),
                "blocks.0.norm": dict(lr_mult=2.0, decay_mult=0.0),
                "norm": dict(decay_mult=0.1),
            }
        ),
    ),
    "of keys as long the first in the alphabet counts": dict(
        optimizer=ADAMW,
        paramwise_cfg=dict(custom_keys={"mlp.2": dict(lr_mult=0.5), "mlp.0": dict(lr_mult=0.7), "block": dict(lr_mult=0.1)}),
    ),
    "custom keys leave out the other rules": dict(
        optimizer=ADAMW,
        paramwise_cfg=dict(
            custom_keys={"stem": dict(lr_mult=0.1), "attn": dict(decay_mult=1.0)},
            norm_decay_mult=0.0,
            bias_lr_mult=2.0,
            bias_decay_mult=0.0,
            dwconv_decay_mult=0.0,
        ),
    ),
    "keys that begin with a dot": dict(
        optimizer=ADAMW,
        paramwise_cfg=dict(custom_keys={".cls_token": dict(decay_mult=0.0), ".norm": dict(lr_mult=0.5), ".bias": dict(lr_mult=3.0)}),
    ),
    "further arguments of the optimizer": dict(
        optimizer=ADAMW,
        paramwise_cfg=dict(
            custom_keys={"head": dict(lr_mult=0.1, betas=(0.5, 0.6), eps=1e-6), "embed": dict(lr=0.5), "attn": dict(weight_decay=0.25)}
        ),
    ),
    "momentum by key": dict(optimizer=SGD, paramwise_cfg=dict(custom_keys={"stem": dict(momentum=0.5, decay_mult=0.5)})),
    "tied": dict(
        model="tied",
        optimizer=ADAMW,
        paramwise_cfg=dict(
            bypass_duplicate=True, custom_keys={"encoder.embed": dict(lr_mult=0.1), "decoder": dict(lr_mult=10.0)}
        ),
    ),
    "tied, by rules": dict(
        model="tied", optimizer=SGD, paramwise_cfg=dict(bypass_duplicate=True, bias_lr_mult=2.0, bias_decay_mult=0.0)
    ),
}  # fmt: skip


KEYS = {"SGD": ("lr", "weight_decay", "momentum"), "AdamW": ("lr", "weight_decay", "betas", "eps")}


def settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """The values of KEYS for every trainable parameter, under each of its names."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    keys = KEYS[type(optimizer).__name__]
    found = {
        name: [groups[id(parameter)][key] for key in keys]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def main() -> None:
    from mmengine.optim import DefaultOptimWrapperConstructor

    logging.disable()
    recorded = {}
    for name, case in CASES.items():
        model = MODELS[case.get("model", "zoo")]()
        constructor = DefaultOptimWrapperConstructor(dict(optimizer=dict(case["optimizer"])), case.get("paramwise_cfg"))
        recorded[name] = settings(model, constructor(model).optimizer)
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in recorded.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
