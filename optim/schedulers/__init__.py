"""Parameter schedulers for learning rate, momentum and any other number in the parameter groups."""

from __future__ import annotations

from .base import INF as INF
from .base import ParamScheduler as ParamScheduler
from .from_config import build_param_schedulers as build_param_schedulers
from .from_config import check_param_schedulers as check_param_schedulers
from .schedules import ConstantLR as ConstantLR
from .schedules import ConstantMomentum as ConstantMomentum
from .schedules import ConstantParamScheduler as ConstantParamScheduler
from .schedules import CosineAnnealingLR as CosineAnnealingLR
from .schedules import CosineAnnealingMomentum as CosineAnnealingMomentum
from .schedules import CosineAnnealingParamScheduler as CosineAnnealingParamScheduler
from .schedules import CosineRestartLR as CosineRestartLR
from .schedules import CosineRestartMomentum as CosineRestartMomentum
from .schedules import CosineRestartParamScheduler as CosineRestartParamScheduler
from .schedules import ExponentialLR as ExponentialLR
from .schedules import ExponentialMomentum as ExponentialMomentum
from .schedules import ExponentialParamScheduler as ExponentialParamScheduler
from .schedules import LinearLR as LinearLR
from .schedules import LinearMomentum as LinearMomentum
from .schedules import LinearParamScheduler as LinearParamScheduler
from .schedules import MultiStepLR as MultiStepLR
from .schedules import MultiStepMomentum as MultiStepMomentum
from .schedules import MultiStepParamScheduler as MultiStepParamScheduler
from .schedules import OneCycleLR as OneCycleLR
from .schedules import OneCycleParamScheduler as OneCycleParamScheduler
from .schedules import PolyLR as PolyLR
from .schedules import PolyMomentum as PolyMomentum
from .schedules import PolyParamScheduler as PolyParamScheduler
from .schedules import ReduceOnPlateauLR as ReduceOnPlateauLR
from .schedules import ReduceOnPlateauMomentum as ReduceOnPlateauMomentum
from .schedules import ReduceOnPlateauParamScheduler as ReduceOnPlateauParamScheduler
from .schedules import StepLR as StepLR
from .schedules import StepMomentum as StepMomentum
from .schedules import StepParamScheduler as StepParamScheduler
from .torch_adapter import TorchScheduler as TorchScheduler
from .torch_adapter import torch_scheduler as torch_scheduler
