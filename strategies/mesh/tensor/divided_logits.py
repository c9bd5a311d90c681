"""Logits of a model of transformers that stay divided by the vocabulary for the model's own loss."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .distribute import as_local, as_replicated


class DividedLogits:
    """The matrix that makes logits, of which each process has some rows; its model's own plan gathers what it returns.

    Where the model is called with labels, it returns a DTensor: the loss sees a shard of the vocabulary, and whatever else
    reads logits what is on one device. Without labels logits are all that is asked for, and gathered.

    Args:
        model: the model whose forward computes the loss.
        head: the matrix.
        mesh: of one dimension.
    """

    def __init__(self, model: nn.Module, head: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh, self._has_loss = mesh, False
        self._signature = inspect.signature(model.forward)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)
        head.register_forward_pre_hook(self._spread)
        head.register_forward_hook(self._gather)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # It stays for a backward that computes the matrix again.
        self._has_loss = self._signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return as_local(output, but_shards=True)

    def _spread(self, module: nn.Module, args: Any) -> Any:
        return as_replicated(self._mesh, args)

    def _gather(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._has_loss else as_local(output)
