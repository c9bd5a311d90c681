"""Updates of parameters: OptimWrappers, parameter groups and schedulers."""

from __future__ import annotations

from .adapters.npu_fused import register_optimizers
from .amp import AmpOptimWrapper
from .apex import ApexOptimWrapper
from .build import build_optim_wrapper
from .constructor import DefaultOptimWrapperConstructor
from .wrapper import OptimWrapper, StepInfo
from .wrapper_dict import OptimWrapperDict

register_optimizers()

__all__ = [
    "AmpOptimWrapper",
    "ApexOptimWrapper",
    "DefaultOptimWrapperConstructor",
    "OptimWrapper",
    "OptimWrapperDict",
    "StepInfo",
    "build_optim_wrapper",
]
