"""Torch's attention kernels with the logarithms of their sums, by which attention to several blocks of keys is combined.

A kernel's backward takes the output and the sums over all keys, and then gives the gradients of one block of them. The operators are declared
alike in torch 2.8, 2.10 (native_functions.yaml) and 2.15 (``torch.ops.aten.NAME.default._schema``). Only the CPU's were called with values, in 2.15; those of
CUDA with tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from .torch_private import has_values

_ATEN = torch.ops.aten
_ALIGNED = 32
"""Positions to whose multiple the efficient kernel pads its sums; its backward reads them in steps of that. 2.15."""

Random = tuple[Tensor, ...]
"""What a forward has drawn dropout from, which backward takes; without dropout it says nothing."""
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Operators:
    """A kernel's operators by their names, and how they are called.

    Args:
        name, backward_name: of the operators in ``torch.ops.aten``.
        forward: (operator, query, key, value, is_causal, scale) to output, sums and random numbers.
        backward: (operator, gradient, query, key, value, output, sums, random numbers, is_causal, scale) to gradients.
    """

    name: str
    backward_name: str
    forward: Callable[..., tuple[Tensor, Tensor, Random]]
    backward: Callable[..., Gradients]


def _flash(call: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Random]:
    out, sums, _, _, _, _, seed, offset, _ = call(q, k, v, 0.0, causal, scale=scale)
    return out, sums, (seed, offset)


def _flash_backward(
    call: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, random: Random, causal: bool, scale: float
) -> Gradients:  # fmt: skip
    # Torch copies an output whose memory it cannot take, and takes sums for contiguous.
    lengths, sums = (q.shape[2], k.shape[2]), sums.contiguous()
    found: Gradients = call(grad, q, k, v, out, sums, None, None, *lengths, 0.0, causal, *random, scale=scale)
    return found


def _cudnn(call: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Random]:
    out, sums, _, _, _, _, seed, offset, _ = call(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, sums.reshape(out.shape[:-1]), (seed, offset)  # sums are (samples, heads, positions, 1)


def _cudnn_backward(
    call: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, random: Random, causal: bool, scale: float
) -> Gradients:  # fmt: skip
    lengths, out, whole = (q.shape[2], k.shape[2]), out.contiguous(), sums.contiguous()[..., None]
    found: Gradients = call(grad, q, k, v, out, whole, *random, None, None, None, *lengths, 0.0, causal, scale=scale)
    return found


def _efficient(call: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Random]:
    out, sums, seed, offset = call(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, sums[..., : q.shape[2]], (seed, offset)


def _efficient_backward(
    call: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, random: Random, causal: bool, scale: float
) -> Gradients:  # fmt: skip
    # Of half precision, torch's kernel takes the heads of a position for neighbours in the output's memory, and does not ask.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    padded = functional.pad(sums.contiguous(), (0, -sums.shape[-1] % _ALIGNED), value=torch.inf)
    needed = [True, True, True, False]
    return call(grad, q, k, v, None, out, padded, *random, 0.0, needed, causal, scale=scale)[:3]  # type: ignore[no-any-return]


def _on_cpu(call: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Random]:
    return *call(q, k, v, 0.0, causal, scale=scale), ()


def _on_cpu_backward(
    call: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, _: Random, causal: bool, scale: float
) -> Gradients:  # fmt: skip
    return call(grad, q, k, v, out, sums, 0.0, causal, scale=scale)  # type: ignore[no-any-return]


_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT, _CUDNN = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"
_KERNELS: Mapping[int, Sequence[_Operators]] = {
    SDPBackend.FLASH_ATTENTION.value: (
        _Operators(_FLASH, f"{_FLASH}_backward", _flash, _flash_backward),
        _Operators(f"{_FLASH}_for_cpu", f"{_FLASH}_for_cpu_backward", _on_cpu, _on_cpu_backward),
    ),
    SDPBackend.EFFICIENT_ATTENTION.value: (_Operators(_EFFICIENT, f"{_EFFICIENT}_backward", _efficient, _efficient_backward),),
    SDPBackend.CUDNN_ATTENTION.value: (_Operators(_CUDNN, f"{_CUDNN}_backward", _cudnn, _cudnn_backward),),
}  # fmt: skip
"""By what ``_fused_sdp_choice`` gives; of several the first that the device has."""


class AttentionKernel:
    """Attention of queries to a block of keys by one of torch's kernels.

    Tensors are (samples, heads, positions, width), of one dtype and width. The number of heads of keys and values divides that of
    queries. If ``is_causal``, there are as many queries as keys.

    Args:
        operators: the kernel's.
        repeats: it takes as many heads of keys as of queries.
    """

    def __init__(self, operators: _Operators, repeats: bool) -> None:
        self._operators, self._repeats = operators, repeats

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Random]:
        """Return the output, the logarithms of the sums of exponentials (samples, heads, positions), and random numbers."""
        call = getattr(_ATEN, self._operators.name).default
        return self._operators.forward(call, query, *self._repeated(query, key, value), is_causal, scale)

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, random: Random,
        is_causal: bool, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return the gradients of the queries, keys and values; ``out`` and ``sums`` are those of all blocks."""
        call = getattr(_ATEN, self._operators.backward_name).default
        keys, values = self._repeated(query, key, value)
        of_query, *others = self._operators.backward(
            call, gradient, query, keys, values, out, sums, random, is_causal, scale
        )
        if self._repeats:
            others = [found.reshape(found.shape[0], key.shape[1], -1, *found.shape[2:]).sum(2) for found in others]
        return of_query, others[0], others[1]

    def _repeated(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return _repeated(query, key, value) if self._repeats else (key, value)


def attention_kernel(query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel | None:
    """Return the kernel that torch chooses for these tensors; None: the device, dtype or shape has none.

    ``torch.nn.attention.sdpa_kernel`` is respected.

    Raises:
        RuntimeError: torch's, if that leaves nothing, computing by hand neither.
    """
    if query.shape[1] == key.shape[1]:
        choice, repeats = _choice(query, key, value, None, 0.0, False), False
    elif (of_groups := _of_groups(query, key, value, None, 0.0, False)) is not None:
        choice, repeats = of_groups, False
    else:
        choice, repeats = _choice(query, *_repeated(query, key, value), None, 0.0, False), True
    for operators in _KERNELS.get(choice, ()):
        if _has(operators.name, query.device):
            return AttentionKernel(operators, repeats)
    return None


def takes_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> bool:
    """Whether torch has a kernel for fewer heads of keys than of queries; otherwise scores would be in memory, and repeating is better."""
    return _of_groups(query, key, value, mask, dropout, causal) is not None


def _of_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> int | None:
    """Torch's own choice for fewer heads of keys than of queries, if it is a kernel."""
    try:
        choice = _choice(query, key, value, mask, dropout, causal)
    except RuntimeError:  # computing by hand is forbidden
        return None
    return choice if choice in _KERNELS else None


def _choice(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> int:
    """Torch's own choice, an SDPBackend; by hand where the device has no function for it. 2.8, 2.15."""
    by_hand, grouped = SDPBackend.MATH.value, query.shape[1] != key.shape[1]
    if not has_values(query):
        # Torch chooses by hand for these. When planning, what a machine with the device would choose.
        if query.device.type == "cpu" or (query.itemsize == 2 and mask is None):
            return int(SDPBackend.FLASH_ATTENTION.value)
        return int(by_hand if grouped or query.itemsize > 4 else SDPBackend.EFFICIENT_ATTENTION.value)
    if not _has("_fused_sdp_choice", query.device):
        return by_hand
    return int(torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped))


def _has(name: str, device: torch.device) -> bool:
    """Whether an operator has a function of its own for a device. 2.15."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    each = query.shape[1] // key.shape[1]
    return key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
