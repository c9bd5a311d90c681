"""The project's classes; custom_imports in configs/_base_/runtime.py imports them, so that they are registered."""

from . import datasets, metrics, models

__all__ = ["datasets", "metrics", "models"]
