"""Tools for testing strategies: worker processes and the conformance kit."""

from __future__ import annotations

from .conformance import CheckResult, ConformanceError, ConformanceReport, check_strategy
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
