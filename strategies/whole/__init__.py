"""Whole weights: the model as one device has it, whatever the strategy has made of it."""

from __future__ import annotations

from .whole_weights import WholeWeights

__all__ = ["WholeWeights"]
