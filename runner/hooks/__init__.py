"""Hooks: code that the runner calls at fixed points of a run."""

from __future__ import annotations

from typing import Any

from .checkpoint import CheckpointHook
from .early_stopping import EarlyStoppingHook, PruningHook
from .ema import EMAHook, TeacherHook
from .hook import POINTS, Hook, HookDispatcher, Priority, get_priority
from .logger import LoggerHook
from .nonfinite import NonFiniteHook
from .profiler import ProfilerHook
from .runtime_info import IterTimerHook, RuntimeInfoHook
from .small_hooks import (
    CheckReplicasHook,
    DistSamplerSeedHook,
    EmptyCacheHook,
    ParamSchedulerHook,
    PrepareTTAHook,
    SyncBuffersHook,
)

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
