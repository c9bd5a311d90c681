"""The dtypes that checkpoints can hold, and their names in the files."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import CheckpointError

# The names of safetensors. It has only C64 of the complex dtypes, and older versions of it not even that; see PAIRS.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex32: "C32",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PAIRS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex dtypes to the dtype of the real and imaginary parts, as which a checkpoint's files have them."""


def check_tensor(key: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a checkpoint cannot hold the tensor; ``key`` is its name in the message."""
    if tensor.dtype not in DTYPE_NAMES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPE_NAMES)
        raise CheckpointError(f"{key}: tensors of {tensor.dtype} cannot be saved, convert it to one of {known}")
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(
            f"{key}: tensors of layout {kind} cannot be saved, give a dense one, as to_dense() makes it"
        )


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor without torch's marks of lazy conjugation and negation, under which its memory has other values."""
    return tensor.resolve_conj().resolve_neg()
