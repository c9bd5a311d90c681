"""Facts about tensors: the dtypes that checkpoints hold, fingerprints of their bits, whether they are finite, and their size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import CheckpointError, ConfigError

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
QUANTISERS = ("bitsandbytes", "torchao")
"""Packages whose tensors are no rows of numbers that could be divided."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without torch's prefix, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def parts_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory that a tensor consists of; those inside of it, if it is a wrapper such as a DTensor."""
    if not isinstance(value, Tensor) or value.is_meta:
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        yield value
        return
    for name in flatten()[0]:
        yield from parts_of(getattr(value, name))


def is_quantised(value: Tensor) -> bool:
    """Whether a tensor is quantised in a way that cannot be written to a checkpoint."""
    return type(value).__module__.partition(".")[0] in QUANTISERS and hasattr(value, "__tensor_flatten__")


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


def stored_row(tensor: Tensor) -> Tensor:
    """The elements in one dimension with stride 1, as they are stored; ``view`` and ``reshape`` keep any stride of a single one."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))


# Fingerprints of tensors: hashes of their bits, in which a single flipped bit always shows.


K = TypeVar("K")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1024
_BLOCK, SHARES = 64 * 2**10, 4
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64)  # as int64


def replica_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This process's shard of a replicated tensor, and its coordinates on the other axes; None if it is no replica."""
    if isinstance(tensor, DTensor):
        if not any(placement.is_replicate() for placement in tensor.placements):
            return None
        coordinates = tensor.device_mesh.get_coordinate()
        placements = zip(coordinates or (), tensor.placements, strict=True) if coordinates else ()
        return cast(DTensor, tensor.detach()).to_local(), tuple(
            c for c, placement in placements if not placement.is_replicate()
        )
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor.detach(), ()
    return None


def fingerprints(tensors: Mapping[K, Tensor], share: int | None = None) -> dict[K, int]:
    """A hash of the bits of each tensor, by key; one small copy brings those of a device to the host.

    Hashes of a device and of the CPU are different.

    Args:
        tensors: key to tensor, whole or a shard.
        share: see ``of_bytes``.
    """
    found = {key: of_bytes(tensor, share) for key, tensor in tensors.items() if tensor.device.type == "cpu"}
    by_device: dict[torch.device, dict[K, Tensor]] = {}
    for key, tensor in tensors.items():
        if key not in found:
            by_device.setdefault(tensor.device, {})[key] = of_bits(tensor)
    for sums in by_device.values():
        numbers = torch.stack(list(sums.values())).cpu().tolist()
        found |= {key: number % 2**64 for key, number in zip(sums, numbers, strict=True)}
    return found


def of_bytes(tensor: Tensor, share: int | None = None) -> int:
    """A hash of the bits of a tensor on the CPU.

    Args:
        tensor: any dtype.
        share: hash only every fourth block of a large tensor, beginning with this block, 0 to 3; None: all blocks.
    """
    flat = stored_row(tensor)
    if not flat.numel():
        return 0
    data = flat.view(torch.uint8).numpy().data
    if share is None or len(data) <= SHARES * _BLOCK:
        return xxhash.xxh3_64_intdigest(data)
    digest = xxhash.xxh3_64()
    for begin in range(share * _BLOCK, len(data), SHARES * _BLOCK):
        digest.update(data[begin : begin + _BLOCK])
    return digest.intdigest()


def of_name(name: str) -> int:
    """A hash of a name, the same on all processes."""
    return xxhash.xxh3_64_intdigest(name.encode())


def of_leaves(value: Any, deepest: int = 8) -> list[int]:
    """Hashes of the tensors, arrays, strings and numbers in a value, 63 bits each, the same on all processes.

    Args:
        value: containers, and objects with attributes, one in the other; what is none of these counts by its type.
        deepest: how far they are looked into.
    """
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    if isinstance(value, Tensor):
        facts = f"{value.dtype} {list(value.shape)}"
        if type(value) is Tensor and value.layout is torch.strided and not is_quantised(value):
            facts += f" {next(iter(fingerprints({'': value}).values()))}"
    elif isinstance(value, np.ndarray):
        facts = f"{value.dtype} {value.shape} {xxhash.xxh3_64_intdigest(np.ascontiguousarray(value).data)}"
    elif isinstance(value, (str, bytes, int, float, complex, np.generic)):
        facts = f"{type(value).__name__} {value!r}"
    else:
        parts: Any = ()
        if deepest and isinstance(value, Mapping):
            parts = [part for item in value.items() for part in item]
        elif deepest and isinstance(value, (list, tuple)):
            parts = value
        elif deepest and not callable(value):
            parts = getattr(value, "__dict__", {}).values()
        return [of_name(type(value).__name__) >> 1, *(leaf for part in parts for leaf in of_leaves(part, deepest - 1))]
    return [of_name(facts) >> 1]


def of_bits(tensor: Tensor) -> Tensor:
    """A hash of the bits of a tensor and their positions, 0-dim int64 on its device; it takes two passes.

    It is a weighted sum of the sums of the rows and columns of the bits as integers. Each row has an even weight and each
    column an odd one, so every element has an odd one: whatever changes in a single element changes the sum.
    """
    flat = stored_row(tensor)
    bits = flat.view(_BITS[min(tensor.itemsize, 8)])  # a complex128 has twice the bits of the largest integer
    whole = bits.numel() // _ROW * _ROW
    table, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    # The rest is a row of its own, the first one, whose weight is zero.
    columns[: rest.numel()] += rest.long()
    ends = torch.arange(1, max(len(rows), _ROW) + 1, dtype=torch.int64, device=bits.device)
    return (rows * (2 * ends[: len(rows)] * _ODD[0])).sum() + (columns * ((2 * ends[:_ROW] + 1) * _ODD[1])).sum()


def of_chunk(chunk: Tensor, offsets: Sequence[int]) -> Tensor:
    """A hash of the bits of a chunk and their positions in the whole tensor, 0-dim int64 on its device.

    The hashes of the chunks of a tensor add up to the hash of the whole, whatever its chunks are. As in ``of_bits`` it is a
    weighted sum, with odd weights along the first dimension and even ones along the others.

    Args:
        chunk: any dtype.
        offsets: where it begins in the whole tensor, by dimension.
    """
    stored = as_stored(chunk.detach())
    if stored.is_complex():
        stored, offsets = torch.view_as_real(stored), (*offsets, 0)
    bits = stored.view(_BITS[stored.itemsize])
    if not bits.dim():
        return bits.long() * _ODD[0]
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for dim, begin in enumerate(offsets):
        others = [other for other in range(bits.dim()) if other != dim]
        sums = bits.sum(others, dtype=torch.int64) if others else bits.long()
        ends = torch.arange(begin, begin + len(sums), dtype=torch.int64, device=bits.device)
        factor = (of_name(f"dimension {dim}") | 1) - 2**63
        total += (sums * ((2 * ends + (dim == 0)) * factor)).sum()
    return total


# Find the tensors that contain NaN or infinity, on their devices.


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose local shard has NaN or infinity; if none has, one number per device is read."""
    parts = {n: _part(tensor) for n, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()}
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for name, part in parts.items():
        if part.numel():
            sums.setdefault(part.device, {})[name] = _sum(part)
    found = []
    for totals in sums.values():
        if bool(torch.stack(list(totals.values())).isfinite().all()):
            continue
        found += [name for name, total in totals.items() if not bool(total.isfinite()) and _holds_any(parts[name])]
    return [name for name in tensors if name in set(found)]


def _part(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    return own.float() if own.itemsize == 1 else own  # 8-bit floats support few operations


def _sum(part: Tensor) -> Tensor:
    """A sum that is NaN or infinite if any element is, or, rarely, by overflow; one pass, without extra memory."""
    wide = torch.float32 if part.device.type == "mps" else torch.float64
    return part.sum(dtype=torch.float32 if part.itemsize < 4 else None).to(wide)


def _holds_any(part: Tensor) -> bool:
    low, high = torch.aminmax(part)
    return not bool(torch.isfinite(low) & torch.isfinite(high))


# Sizes in bytes, as people write them and as messages show them.


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_of(given: int | float | str, where: str) -> int:
    """The number of bytes in 2000000, "2GiB" or "500 MB".

    Args:
        where: the option, for messages.

    Raises:
        ConfigError: it is no size, or less than one byte.
    """
    match = (
        None if isinstance(given, bool) else re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", str(given).upper())
    )
    size = int(float(match[1]) * _UNITS.get(match[2] or "B", 0)) if match else 0
    if size < 1:
        raise ConfigError(f'{where}: "{given}" is not allowed, give bytes, or a number with a unit, such as "2GiB"')
    return size


def size_text(size: int) -> str:
    """A size in the largest unit of which there is at least one: "1.5 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size} bytes"
