"""Pipeline parallelism: stages of layers that follow each other, each on another process."""

from __future__ import annotations

from .pipeline_parallel import Pipeline

__all__ = ["Pipeline"]
