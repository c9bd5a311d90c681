"""Normalisation layers: one list, and all that go by it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.modules import batchnorm, instancenorm, normalization

from flextrain.core.base.errors import StrategyError
from flextrain.core.device.precision import BATCH_NORM, is_norm, running_statistics
from flextrain.optim import build_optim_wrapper
from flextrain.strategies import DDPStrategy

LAYERS = [
    nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.GroupNorm(2, 4),
    nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm3d(4, affine=True),
    nn.LayerNorm(4), nn.RMSNorm(4),
]  # fmt: skip


def test_every_normalisation_that_torch_has() -> None:
    for module in (batchnorm, instancenorm, normalization):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, nn.Module) and name in module.__all__ and name != "CrossMapLRN2d":  # without parameters
                assert is_norm(kind.__new__(kind)), name
    assert not is_norm(nn.Linear(1, 1))


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_have_a_weight_decay_of_their_own(layer: nn.Module) -> None:
    optimizer = dict(type="SGD", lr=0.1, weight_decay=0.5)
    wrapper = build_optim_wrapper(dict(optimizer=optimizer, paramwise_cfg=dict(norm_decay_mult=0.0)))
    wrapper.build(nn.Sequential(layer, nn.Linear(4, 4)))
    assert [group["weight_decay"] for group in wrapper.param_groups] == [0.0, 0.5]


class LlamaRMSNorm(nn.Module):
    """As Transformers has it: none of torch's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class NormedLinear(nn.Linear):
    """Not a normalisation: its weight has two dimensions."""


class NormThenScale(nn.Module):
    """Not one either: the normalisation is inside, and has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = LlamaRMSNorm(), nn.Linear(4, 4)


def test_those_of_somebodys_own_too() -> None:
    optimizer = dict(type="SGD", lr=0.1, weight_decay=0.5)
    paramwise = dict(norm_decay_mult=0.0, bias_lr_mult=2.0)
    wrapper = build_optim_wrapper(dict(optimizer=optimizer, paramwise_cfg=paramwise))
    model = nn.ModuleDict(dict(own=LlamaRMSNorm(), linear=NormedLinear(4, 4), both=NormThenScale()))
    wrapper.build(model)
    decays = {id(p): group["weight_decay"] for group in wrapper.param_groups for p in group["params"]}
    undecayed = [name for name, parameter in model.named_parameters() if decays[id(parameter)] == 0]
    assert undecayed == ["own.weight", "both.norm.weight"]


def test_statistics() -> None:
    kept = [layer for layer in LAYERS if running_statistics(layer)]
    assert all(isinstance(layer, BATCH_NORM) for layer in kept)
    assert len(kept) == 4
    assert running_statistics(nn.InstanceNorm1d(4, track_running_stats=True))
    assert not running_statistics(nn.BatchNorm1d(4, track_running_stats=False))


class Frozen(BATCH_NORM):
    """A batch normalisation of somebody's own, which torch converts too."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def test_sync_bn_looks_for_what_torch_converts() -> None:
    assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(Frozen(4)), nn.SyncBatchNorm)
    with pytest.raises(StrategyError, match=r"^strategy.sync_bn: torch has it for accelerators only"):
        DDPStrategy(device="cpu", sync_bn="torch").setup(nn.Sequential(Frozen(4)))
