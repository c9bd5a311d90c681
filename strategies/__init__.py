"""Strategies: interchangeable ways to train a model on one or many devices, behind one interface."""

from __future__ import annotations

from ..core.base.registry import OPTIM_WRAPPERS, STRATEGIES
from .base import Strategy
from .build import build_strategy
from .config import Needs, StrategyConfig
from .ddp import DDPStrategy
from .deepspeed import DeepSpeedOptimWrapper, DeepSpeedStrategy
from .fsdp import FSDPStrategy
from .launch import launch
from .launchers import detect_launch
from .mesh import MeshStrategy
from .npu import NPUStrategy
from .single_device import SingleDeviceStrategy

# MMEngine's names
STRATEGIES.refuse({"ColossalAIStrategy": "choose FSDPStrategy, or DeepSpeedStrategy for ZeRO"})
OPTIM_WRAPPERS.refuse({"ColossalAIOptimWrapper": "it belongs to ColossalAI, choose OptimWrapper or AmpOptimWrapper"})

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
