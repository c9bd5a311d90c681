"""Tools for testing strategies: worker processes and the conformance kit."""

from __future__ import annotations

from .conformance import check_strategy
from .report import CheckResult, ConformanceError, ConformanceReport
from .workers import WorkerError, WorkerGroup, run_distributed

__all__ = [
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "WorkerError",
    "WorkerGroup",
    "check_strategy",
    "run_distributed",
]
