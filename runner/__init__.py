"""The runner, with its loops, data, hooks, metrics and reporting."""

from __future__ import annotations

from .data.collate import pseudo_collate
from .data.dataloaders import build_dataloader
from .data.samplers import DefaultSampler, InfiniteSampler
from .loops.base import BaseLoop
from .loops.evaluate import TestLoop, ValLoop
from .loops.train import EpochBasedTrainLoop, IterBasedTrainLoop
from .metrics.base import BaseMetric
from .metrics.dump_results import DumpResults
from .metrics.evaluator import Evaluator
from .runner import FlexibleRunner

__all__ = [
    "BaseLoop",
    "BaseMetric",
    "DefaultSampler",
    "DumpResults",
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
