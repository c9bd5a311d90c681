"""Find forwards that write to parameters: FSDP has gathered them for the time of forward, and the write would be lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...core.errors import StrategyError
from ...core.rehearsing import rehearsing

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def watch_first_forward(unit: nn.Module, names: dict[int, str]) -> None:
    """Compare a unit's gathered parameters before and after its first forward in training, and raise if one has changed.

    Moving averages of another network and ``Embedding(max_norm=...)`` are such. Comparing once costs no memory, and
    waits once for the device.

    Args:
        unit: a module that FSDP gathers, after ``fully_shard``.
        names: of the modules of the model, by id.
    """
    if rehearsing():  # there are no values to compare
        return
    # Now, because a stage of a pipeline that is under way lets nobody go through its parameters.
    keys = [(module, key) for module in _own_modules(unit) for key, _ in module.named_parameters(recurse=False)]
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def begin(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            sums.update(_sums(keys, names))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not sums:
            return
        for handle in handles:
            handle.remove()
        found = _sums(keys, names)
        # A tied one that another unit gathers is another tensor by now.
        same = [name for name, (parameter, _) in sums.items() if found[name][0] is parameter]
        changed = torch.stack([(found[name][1] != sums[name][1]).any() for name in same]).tolist() if same else []
        for name, is_changed in zip(same, changed, strict=True):
            if is_changed:
                raise StrategyError(
                    f"model.{name}: forward writes to it, which would be lost, since FSDP has gathered its parameters for forward "
                    "only; write to it after the update, in a hook, or make it a buffer"
                )

    # After FSDP has gathered, and before it frees.
    handles = [unit.register_forward_pre_hook(begin), unit.register_forward_hook(end, prepend=True)]


@torch.no_grad()
def _sums(keys: Sequence[tuple[nn.Module, str]], names: dict[int, str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The parameters as they are gathered now, and the sums of their bits, by name."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for module, key in keys:
        parameter = getattr(module, key)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.ndim and local.numel() and local.dtype.itemsize in _WORDS:
            name = f"{names.get(id(module), '')}.{key}".lstrip(".")
            words = local.detach().contiguous().view(-1).view(_WORDS[local.dtype.itemsize])
            # Also of every second word, and of every third: the same values in another order have the same sum.
            found[name] = (parameter, torch.stack([words[::step].sum() for step in (1, 2, 3)]))
    return found


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
