"""When things happen: the runner, its loops, hooks and reports."""

from __future__ import annotations

from .data import build_dataloader, pseudo_collate
from .eval_loops import TestLoop, ValLoop
from .evaluation import BaseMetric, Evaluator
from .loops import EpochBasedTrainLoop, IterBasedTrainLoop
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
