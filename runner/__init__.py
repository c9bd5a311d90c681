"""When things happen: the runner, its loops, hooks and reports."""

from __future__ import annotations

from .data import build_dataloader, pseudo_collate
from .evaluation import BaseMetric, Evaluator
from .loops import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from .runner import FlexibleRunner
from .samplers import DefaultSampler, InfiniteSampler

__all__ = [
    "BaseMetric",
    "DefaultSampler",
    "EpochBasedTrainLoop",
    "Evaluator",
    "FlexibleRunner",
    "InfiniteSampler",
    "IterBasedTrainLoop",
    "TestLoop",
    "ValLoop",
    "build_dataloader",
    "pseudo_collate",
]
