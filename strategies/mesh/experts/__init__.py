"""Expert parallelism: each process has some of the experts of every mixture, and tokens travel to them."""

from __future__ import annotations

from .expert_parallel import ExpertParallel

__all__ = ["ExpertParallel"]
