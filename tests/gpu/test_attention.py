"""Ring attention of two pretended processes on the accelerator, by each of its kernels, equals attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flextrain.core.torch_compat.attention_private import attention_kernel

from ..mesh.rings import Names, in_a_ring, on_one_device
from ..mesh.test_attention_kernels import MASKS, tensors

BACKENDS: dict[str, tuple[SDPBackend, torch.dtype]] = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "efficient, half": (SDPBackend.EFFICIENT_ATTENTION, torch.float16),
    "by hand": (SDPBackend.MATH, torch.float32),
}
# Relative to the largest number, which is of the order of 1 to 10.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _missing(options: dict[str, Any]) -> str | None:
    """Why there is no kernel for tensors of a usual width."""
    try:
        found = attention_kernel(*tensors(67, **{**options, "widths": (64, 64)})[:3])
    except RuntimeError as error:
        return str(error)
    return None if found else "torch computes by hand"


@pytest.mark.parametrize("mask", ["causal", "full", "window", "padding", "documents"])
@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (24, 20)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_one_device(
    kind: str, backend: str, widths: tuple[int, int], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flextrain.strategies.mesh.context.masks.SHORTEST", 1)
    chosen, dtype = BACKENDS[backend]
    options: dict[str, Any] = dict(widths=widths, dtype=dtype, device=kind)
    given = tensors(268, **options)  # no multiple of what kernels divide positions by
    on_host = MASKS[mask](268)
    kept = [None if tensor is None else tensor.to(kind) for tensor in (on_host.keys, on_host.documents)]
    allowed = type(on_host)(on_host.rule, *kept)
    with sdpa_kernel([chosen]):
        if chosen != SDPBackend.MATH and (why := _missing(options)):
            pytest.skip(f"{kind} has no {backend} kernel: {why}")
        with Names() as seen:
            found = in_a_ring(*given, allowed)
    assert bool(seen.kernels()) is (chosen != SDPBackend.MATH and mask != "window")
    assert all(backend.partition(",")[0] in name for name in seen.kernels())
    for mine, expected in zip(found, on_one_device(*given, allowed), strict=True):
        assert (mine.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
