"""Find the tensors that contain NaN or infinity, on their devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
