"""Tensor parallelism: each process has a part of every matrix."""

from __future__ import annotations

from .tensor_parallel import TensorParallel

__all__ = ["TensorParallel"]
