"""Hooks: code that the runner calls at fixed points of a run."""

from __future__ import annotations

from typing import Any

from .check_replicas import CheckReplicasHook
from .checkpoint import CheckpointHook
from .dispatch import HookDispatcher
from .early_stopping import EarlyStoppingHook
from .ema import EMAHook
from .empty_cache import EmptyCacheHook
from .hook import Hook
from .iter_timer import IterTimerHook
from .logger import LoggerHook
from .nonfinite import NonFiniteHook
from .param_scheduler import ParamSchedulerHook
from .points import POINTS
from .prepare_tta import PrepareTTAHook
from .priority import Priority, get_priority
from .profiler import ProfilerHook
from .pruning import PruningHook
from .runtime_info import RuntimeInfoHook
from .sampler_seed import DistSamplerSeedHook
from .sync_buffers import SyncBuffersHook
from .teacher import TeacherHook

DEFAULT_HOOKS: dict[str, dict[str, Any]] = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "nonfinite": {"type": "NonFiniteHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}
"""The hooks of every run; ``default_hooks`` replaces an entry by name, or removes it with None."""

__all__ = [
    "DEFAULT_HOOKS",
    "POINTS",
    "CheckReplicasHook",
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "HookDispatcher",
    "IterTimerHook",
    "LoggerHook",
    "NonFiniteHook",
    "ParamSchedulerHook",
    "PrepareTTAHook",
    "Priority",
    "ProfilerHook",
    "PruningHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
    "TeacherHook",
    "get_priority",
]
