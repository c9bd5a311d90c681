"""Strategies: interchangeable ways to train a model on one or many devices, behind one interface."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..core.base.registry import OPTIM_WRAPPERS, STRATEGIES
from .base import Strategy
from .build import build_strategy
from .config import Needs, StrategyConfig
from .launchers import detect_launch, launch

if TYPE_CHECKING:
    from .ddp import DDPStrategy
    from .deepspeed import DeepSpeedOptimWrapper, DeepSpeedStrategy
    from .fsdp import FSDPStrategy
    from .mesh import MeshStrategy
    from .npu import NPUStrategy
    from .single_device import SingleDeviceStrategy

# MMEngine's names
STRATEGIES.refuse({"ColossalAIStrategy": "choose FSDPStrategy, or DeepSpeedStrategy for ZeRO"})
OPTIM_WRAPPERS.refuse({"ColossalAIOptimWrapper": "it belongs to ColossalAI, choose OptimWrapper or AmpOptimWrapper"})

_HOMES = {  # imported at their first use: a run needs one strategy
    "DDPStrategy": "ddp",
    "DeepSpeedOptimWrapper": "deepspeed",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "MeshStrategy": "mesh",
    "NPUStrategy": "npu",
    "SingleDeviceStrategy": "single_device",
}

__all__ = [
    "DDPStrategy",
    "DeepSpeedOptimWrapper",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "NPUStrategy",
    "Needs",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyConfig",
    "build_strategy",
    "detect_launch",
    "launch",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
