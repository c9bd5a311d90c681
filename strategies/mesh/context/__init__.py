"""Context parallelism: each process has some positions of every sequence."""

from __future__ import annotations

from .context_parallel import Context

__all__ = ["Context"]
