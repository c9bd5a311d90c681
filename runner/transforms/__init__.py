"""Transforms: changes of a model between its construction and its distribution over devices."""

from .freeze import Freeze
from .lora import LoRA
from .torchao import Float8Training, Quantize

__all__ = ["Float8Training", "Freeze", "LoRA", "Quantize"]
