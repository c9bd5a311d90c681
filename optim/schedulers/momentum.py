"""Momentum schedulers (SGD's momentum, or Adam's first beta): ``ConstantMomentum(optimizer, ...)`` and so on.

Behaviour and arguments are documented at the ``...ParamScheduler`` of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.registry import PARAM_SCHEDULERS
from .base import MomentumScheduler
from .plateau import ReduceOnPlateauParamScheduler
from .schedules import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    PolyParamScheduler,
    StepParamScheduler,
)


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ConstantMomentum(MomentumScheduler, ConstantParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class LinearMomentum(MomentumScheduler, LinearParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class StepMomentum(MomentumScheduler, StepParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class MultiStepMomentum(MomentumScheduler, MultiStepParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ExponentialMomentum(MomentumScheduler, ExponentialParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class PolyMomentum(MomentumScheduler, PolyParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class CosineAnnealingMomentum(MomentumScheduler, CosineAnnealingParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class CosineRestartMomentum(MomentumScheduler, CosineRestartParamScheduler): ...


@PARAM_SCHEDULERS.register_module()
@dataclass(eq=False)
class ReduceOnPlateauMomentum(MomentumScheduler, ReduceOnPlateauParamScheduler): ...
