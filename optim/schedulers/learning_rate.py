"""Learning-rate schedulers: ``ConstantLR(optimizer, ...)`` and so on.

Behaviour and arguments are documented at the ``...ParamScheduler`` of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.registry import PARAM_SCHEDULERS
from .base import LRScheduler
from .plateau import ReduceOnPlateauParamScheduler
from .schedules import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    OneCycleParamScheduler,
    PolyParamScheduler,
    StepParamScheduler,
)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ConstantLR(LRScheduler, ConstantParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class LinearLR(LRScheduler, LinearParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class StepLR(LRScheduler, StepParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class MultiStepLR(LRScheduler, MultiStepParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ExponentialLR(LRScheduler, ExponentialParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class PolyLR(LRScheduler, PolyParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class CosineAnnealingLR(LRScheduler, CosineAnnealingParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class CosineRestartLR(LRScheduler, CosineRestartParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class OneCycleLR(LRScheduler, OneCycleParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ReduceOnPlateauLR(LRScheduler, ReduceOnPlateauParamScheduler): ...
