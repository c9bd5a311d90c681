"""Around FSDP's micro-batches: errors that end one in the middle, and the layout of gradients after one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle


class NotingErrors:
    """Context around a micro-batch.

    Attributes:
        has_seen: an error has left it, so that FSDP may have stopped in the middle.
        is_final: FSDP cannot go on after it.
    """

    has_seen = is_final = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.has_seen = True


def settle_gradients(parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Give gradients of parameters that FSDP does not shard the layout of their parameters, as it does for all others.

    They may be pending sums over processes, whose summands cannot be clipped. Returned are the handles of the hooks that do it.
    """

    def settle(parameter: Tensor) -> None:
        gradient, own = cast(DTensor, parameter.grad), cast(DTensor, parameter)
        if gradient.placements != own.placements:
            parameter.grad = gradient.redistribute(placements=own.placements)

    return [
        parameter.register_post_accumulate_grad_hook(settle)  # type: ignore[no-untyped-call]
        for parameter in parameters
        if isinstance(parameter, DTensor) and parameter.requires_grad
    ]
