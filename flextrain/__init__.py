"""flextrain: one runner for PyTorch training, with the distribution strategy as one argument.

The public names are listed here. Each is imported at its first use, so that `import flextrain` loads neither torch nor any
optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .core.base.registering_modules import REGISTERING_MODULES
from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .core.base.errors import CheckpointError as CheckpointError
    from .core.base.errors import ConfigError as ConfigError
    from .core.base.errors import CorruptionError as CorruptionError
    from .core.base.errors import DivergenceError as DivergenceError
    from .core.base.errors import FlexTrainError as FlexTrainError
    from .core.base.errors import LaunchError as LaunchError
    from .core.base.errors import NonFiniteError as NonFiniteError
    from .core.base.errors import StrategyError as StrategyError
    from .core.base.errors import TrialPruned as TrialPruned
    from .core.base.events import append_event as append_event
    from .core.base.events import heartbeat as heartbeat
    from .core.base.events import read_events as read_events
    from .core.base.registry import DATA_SAMPLERS as DATA_SAMPLERS
    from .core.base.registry import DATASETS as DATASETS
    from .core.base.registry import EVALUATOR as EVALUATOR
    from .core.base.registry import FUNCTIONS as FUNCTIONS
    from .core.base.registry import HOOKS as HOOKS
    from .core.base.registry import LOOPS as LOOPS
    from .core.base.registry import METRICS as METRICS
    from .core.base.registry import MODELS as MODELS
    from .core.base.registry import OPTIM_WRAPPER_CONSTRUCTORS as OPTIM_WRAPPER_CONSTRUCTORS
    from .core.base.registry import OPTIM_WRAPPERS as OPTIM_WRAPPERS
    from .core.base.registry import OPTIMIZERS as OPTIMIZERS
    from .core.base.registry import PARAM_SCHEDULERS as PARAM_SCHEDULERS
    from .core.base.registry import REPORTERS as REPORTERS
    from .core.base.registry import STRATEGIES as STRATEGIES
    from .core.base.registry import TRANSFORMS as TRANSFORMS
    from .core.base.registry import VISUALIZERS as VISUALIZERS
    from .core.base.registry import Registry as Registry
    from .core.checkpoint.export.live_weights import LiveWeights as LiveWeights
    from .core.comm.topology import DataShard as DataShard
    from .core.comm.topology import Topology as Topology
    from .core.comm.topology import gather_with_gradient as gather_with_gradient
    from .core.config_files import Config as Config
    from .core.config_files import ConfigDict as ConfigDict
    from .core.config_files import DictAction as DictAction
    from .core.config_files import read_base as read_base
    from .core.device.device import DeviceSpec as DeviceSpec
    from .core.device.device import register_device as register_device
    from .core.model.base_model import BaseDataPreprocessor as BaseDataPreprocessor
    from .core.model.base_model import BaseModel as BaseModel
    from .core.model.base_model import BaseTTAModel as BaseTTAModel
    from .core.model.base_model import ImgDataPreprocessor as ImgDataPreprocessor
    from .core.model.base_model import stack_batch as stack_batch
    from .optim.amp import AmpOptimWrapper as AmpOptimWrapper
    from .optim.amp import ApexOptimWrapper as ApexOptimWrapper
    from .optim.param_groups import DefaultOptimWrapperConstructor as DefaultOptimWrapperConstructor
    from .optim.wrapper import OptimWrapper as OptimWrapper
    from .optim.wrapper_dict import OptimWrapperDict as OptimWrapperDict
    from .runner.engine import Engine as Engine
    from .runner.engine import TrainingCopy as TrainingCopy
    from .runner.hooks.hook import Hook as Hook
    from .runner.loops.base import BaseLoop as BaseLoop
    from .runner.metrics.base import BaseMetric as BaseMetric
    from .runner.metrics.evaluator import Evaluator as Evaluator
    from .runner.reporting.history import HistoryBuffer as HistoryBuffer
    from .runner.reporting.message_hub import MessageHub as MessageHub
    from .runner.reporting.visualizer import Visualizer as Visualizer
    from .runner.resume.choose_checkpoint import ResumeFrom as ResumeFrom
    from .runner.runner import FlexibleRunner as FlexibleRunner
    from .strategies.base import Strategy as Strategy
    from .strategies.ddp import DDPStrategy as DDPStrategy
    from .strategies.deepspeed import DeepSpeedOptimWrapper as DeepSpeedOptimWrapper
    from .strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from .strategies.fsdp import FSDPStrategy as FSDPStrategy
    from .strategies.launchers import launch as launch
    from .strategies.mesh import Axis as Axis
    from .strategies.mesh import MeshStrategy as MeshStrategy
    from .strategies.npu import NPUStrategy as NPUStrategy
    from .strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy

_STRATEGIES = {  # by module: the classes, and the short names they declare
    "single_device": ("SingleDeviceStrategy", "single"),
    "ddp": ("DDPStrategy", "ddp"),
    "fsdp": ("FSDPStrategy", "fsdp"),
    "deepspeed": ("DeepSpeedStrategy", "zero0", "zero1", "zero2", "zero3"),
    "mesh": ("MeshStrategy", "mesh"),
    "npu": ("NPUStrategy", "npu"),
}
_DEEPSPEED_OPTIMIZERS = (
    *("DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion"),
    *("MuonWithAuxAdam", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
)
_REGISTERING: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {"core.model.base_model": ()},
    "optimizer": {"optim": (), "optim.muon": ("Muon",), "strategies.deepspeed": _DEEPSPEED_OPTIMIZERS},
    "optimizer wrapper": {"optim": (), "strategies": (), "strategies.deepspeed": ("DeepSpeedOptimWrapper",)},
    "optimizer wrapper constructor": {"optim": ()},
    "parameter scheduler": {"optim.schedulers": ()},
    "strategy": {"strategies": (), **{f"strategies.{module}": names for module, names in _STRATEGIES.items()}},
    "function": {"runner.data.collate": ()},
    "dataset": {"runner.data.dataset_wrappers": (), "data": ()},
    "sampler": {"runner.data.samplers": ()},
    "metric": {f"runner.metrics.{name}": () for name in ("torchmetrics", "dump_results", "perplexity")},
    "evaluator": {"runner.metrics.evaluator": ()},
    "hook": {
        "runner.hooks": (),
        "runner.hooks.expert_bias": ("ExpertBiasHook",),
        "runner.hooks.loss_spike": ("LossSpikeHook",),
        "runner.hooks.silent_corruption": ("ReplayHook",),
        "token_rate": (),
        "plan.planned_memory": ("plan",),
    },
    "loop": {"runner.loops.train": (), "runner.loops.evaluate": ()},
    "reporter": {"runner.reporting": ()},
    "transform": {
        "runner.transforms.chunked_loss": ("ChunkedLoss",),
        "runner.transforms.freeze": ("Freeze",),
        "runner.transforms.lora": ("LoRA",),
        "runner.transforms.torchao": ("Float8Training", "Quantize"),
    },
    "visualizer": {"runner.reporting": ()},
}
REGISTERING_MODULES.update(
    {kind: {f"{__name__}.{module}": names for module, names in found.items()} for kind, found in _REGISTERING.items()}
)

# tests/test_packaging.py compares this table with the imports above.
_HOMES = {
    "runner.runner": ["FlexibleRunner"],
    "runner.resume.choose_checkpoint": ["ResumeFrom"],
    "runner.engine": ["Engine", "TrainingCopy"],
    "core.model.base_model": [
        "BaseTTAModel",
        "BaseModel",
        "BaseDataPreprocessor",
        "ImgDataPreprocessor",
        "stack_batch",
    ],
    "runner.loops.base": ["BaseLoop"],
    "runner.metrics.base": ["BaseMetric"],
    "runner.metrics.evaluator": ["Evaluator"],
    "runner.hooks.hook": ["Hook"],
    "runner.reporting.message_hub": ["MessageHub"],
    "runner.reporting.history": ["HistoryBuffer"],
    "runner.reporting.visualizer": ["Visualizer"],
    "strategies.base": ["Strategy"],
    "core.comm.topology": ["gather_with_gradient", "DataShard", "Topology"],
    "strategies.single_device": ["SingleDeviceStrategy"],
    "strategies.ddp": ["DDPStrategy"],
    "strategies.deepspeed": ["DeepSpeedStrategy", "DeepSpeedOptimWrapper"],
    "strategies.fsdp": ["FSDPStrategy"],
    "strategies.mesh": ["Axis", "MeshStrategy"],
    "strategies.launchers": ["launch"],
    "strategies.npu": ["NPUStrategy"],
    "optim.wrapper": ["OptimWrapper"],
    "optim.amp": ["AmpOptimWrapper", "ApexOptimWrapper"],
    "optim.wrapper_dict": ["OptimWrapperDict"],
    "optim.param_groups": ["DefaultOptimWrapperConstructor"],
    "core.base.registry": [
        "Registry",
        "MODELS",
        "DATASETS",
        "DATA_SAMPLERS",
        "FUNCTIONS",
        "OPTIMIZERS",
        "OPTIM_WRAPPERS",
        "OPTIM_WRAPPER_CONSTRUCTORS",
        "PARAM_SCHEDULERS",
        "HOOKS",
        "LOOPS",
        "METRICS",
        "EVALUATOR",
        "REPORTERS",
        "STRATEGIES",
        "TRANSFORMS",
        "VISUALIZERS",
    ],
    "core.config_files": ["Config", "ConfigDict", "DictAction", "read_base"],
    "core.checkpoint.export.live_weights": ["LiveWeights"],
    "core.device.device": ["DeviceSpec", "register_device"],
    "core.base.events": ["append_event", "heartbeat", "read_events"],
    "core.base.errors": [
        "FlexTrainError",
        "ConfigError",
        "CorruptionError",
        "DivergenceError",
        "LaunchError",
        "NonFiniteError",
        "StrategyError",
        "CheckpointError",
        "TrialPruned",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__"]
__all__ += list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
