"""torch_npu's fused optimizers where torch_npu is not: their names, and what is said about them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flextrain import OPTIMIZERS, ConfigError, OptimWrapper, StrategyError
from flextrain.optim.adapters import EQUIVALENTS, NEAREST, FusedAdapter
from flextrain.optim.wrapper import adapter_for
from flextrain.strategies import SingleDeviceStrategy

NAMES = sorted({**EQUIVALENTS, **NEAREST})
without_torch_npu = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed"
)


def test_the_nine_are_known() -> None:
    assert len(NAMES) == 9
    assert set(NAMES) <= set(OPTIMIZERS)


@without_torch_npu
@pytest.mark.parametrize("name", NAMES)
def test_without_torch_npu_the_optimizer_to_use_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimWrapper(dict(type=name, lr=0.1))
    advice = (
        f'"{EQUIVALENTS[name]}", which computes the same'
        if name in EQUIVALENTS
        else f'"{NEAREST[name]}", which comes nearest'
    )
    assert str(caught.value) == (
        f'optimizer "{name}": is torch_npu\'s, which is not installed; choose {advice}, or install torch_npu'
    )


@without_torch_npu
def test_a_torch_npu_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        OptimWrapper(dict(type="NpuFusedSGD", lr=0.1))
    assert str(caught.value) == (
        'optimizer "NpuFusedSGD": torch_npu is installed and cannot be imported (libhccl.so: cannot open shared object file); '
        'choose "SGD", which computes the same, or see `flextrain doctor`'
    )
    assert "torch_npu" not in sys.modules


class NpuFusedOptimizerBase(torch.optim.SGD):
    """By its name one of theirs; on the CPU it never gets as far as to do anything."""


class NpuFusedLamb(NpuFusedOptimizerBase):
    pass


def test_one_that_was_built_by_hand_is_found_by_its_class() -> None:
    model = nn.Linear(2, 2)
    optimizer = NpuFusedLamb(model.parameters(), lr=0.1)
    assert isinstance(adapter_for(optimizer, "optim_wrapper"), FusedAdapter)
    assert not isinstance(adapter_for(torch.optim.SGD(model.parameters(), lr=0.1), "optim_wrapper"), FusedAdapter)
    with pytest.raises(StrategyError) as caught:
        SingleDeviceStrategy(device="cpu").setup(model, OptimWrapper(optimizer))
    assert str(caught.value) == (
        'optim_wrapper.optimizer: NpuFusedLamb works on npu only and weight is on cpu; choose "AdamW", which comes nearest'
    )


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_twins_exist(name: str) -> None:
    assert issubclass(getattr(torch.optim, EQUIVALENTS[name]), torch.optim.Optimizer)
