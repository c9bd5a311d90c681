"""Updates of parameters: OptimWrappers, parameter groups and schedulers."""

from __future__ import annotations

from ..core.base.registry import OPTIMIZERS
from .adapters import register_optimizers
from .amp import AmpOptimWrapper, ApexOptimWrapper
from .param_groups import DefaultOptimWrapperConstructor
from .wrapper import OptimWrapper, StepInfo
from .wrapper_dict import OptimWrapperDict, build_optim_wrapper

register_optimizers()

# MMEngine's names
OPTIMIZERS.refuse(
    {
        **dict.fromkeys(("HybridAdam", "CPUAdam"), "it belongs to ColossalAI, choose AdamW"),
        "ZeroRedundancyOptimizer": 'choose strategy="zero1", which shards the state of any optimizer',
    }
)

__all__ = [
    "AmpOptimWrapper",
    "ApexOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "OptimWrapper",
    "OptimWrapperDict",
    "StepInfo",
    "build_optim_wrapper",
]
