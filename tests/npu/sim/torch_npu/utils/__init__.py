"""torch_npu.utils: with TORCH_NPU_SOURCE, what Ascend's optimizers take from it."""

from __future__ import annotations

from pathlib import Path

from .. import _source

if _source:
    __path__.append(str(Path(_source) / "utils"))
    from .combine_tensors import get_part_combined_tensor, is_combined_tensor_valid, npu_combine_tensors  # noqa: F401
