"""LayerByLayer: whole weights of one layer at a time, gathered when a process calls it, whoever calls what and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.comm.collectives import side_group
from ..blocks import repeated_blocks
from .copied_tensors import Writes, empty, fill

_DONE = -1


class Layers:
    """The repeated layers of a model, and which parameters are in one of them only.

    Args:
        model: the copy of the model.
        tensors: its parameters and buffers, by name.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.modules = repeated_blocks(model)
        self.names: list[list[str]] = []
        self.rest: list[str] = []
        """Names of the parameters outside of the layers, or in several of them, and of all buffers: forward may write to these,
        as to a cache of former tokens."""
        of_layer = [{id(part) for part in layer.modules()} for layer in self.modules]
        users: dict[int, set[int]] = {id(tensor): set() for tensor in tensors.values()}
        for module in model.modules():
            layer = next((i for i, parts in enumerate(of_layer) if id(module) in parts), _DONE)
            for tensor in module.parameters(recurse=False):
                users[id(tensor)].add(layer)
        only = {name: users[id(tensor)] for name, tensor in tensors.items()}
        self.names = [[name for name, layers in only.items() if layers == {i}] for i in range(len(self.modules))]
        inside = {name for names in self.names for name in names}
        self.rest = [name for name in tensors if name not in inside]


class LayerByLayer:
    """Gathers a layer before its forward and frees it afterwards, while every process computes what it likes.

    A layer's tensors come from all processes, so all of them take part in every gathering. A process that calls a layer says
    which, and takes part in gathering what others say until its own was gathered; one that has finished takes part until
    all have. So processes may call the model unequally often, and in any order. Inside, no process may wait for another in
    any other way.

    Args:
        model: the copy of the model; its ``rest`` is filled.
        tensors: its parameters and buffers, by name.
        make: returns the whole tensor of this name, or None if its second argument is False; a collective.
        writes: told of what is gathered and freed.
        limit_s: seconds that a process waits for the others.
        world_size: the number of processes.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        tensors: Mapping[str, Tensor],
        make: Callable[[str, bool], Tensor | None],
        writes: Writes,
        limit_s: float,
        world_size: int,
    ) -> None:
        self._layers, self._tensors, self._make, self._writes = layers, tensors, make, writes
        self._group, self._count = side_group(limit_s, "full_weights"), world_size
        for i, layer in enumerate(layers.modules):
            layer.register_forward_pre_hook(partial(self._enter, i))
            layer.register_forward_hook(partial(self._leave, i), always_call=True)

    def _enter(self, index: int, module: nn.Module, args: Any) -> None:
        self._writes.look(self._layers.names[index])
        while index not in self._gather(index):
            pass

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        names = self._layers.names[index]
        self._writes.look(names)
        empty(module, {name: self._tensors[name] for name in names})
        self._writes.note(names)

    def finish(self) -> None:
        """Take part until no process calls a layer any more."""
        while self._gather(_DONE):
            pass

    def _gather(self, wanted: int) -> set[int]:
        """Gather each layer that a process wants, and keep the one that this process wants; return their numbers."""
        own = torch.tensor([wanted], device="cpu")
        asked = [torch.empty_like(own) for _ in range(self._count)]
        if self._count > 1:
            dist.all_gather(asked, own, group=self._group)
        else:
            asked = [own]
        numbers = {int(number) for number in asked} - {_DONE}
        for number in sorted(numbers):
            for name in self._layers.names[number]:
                value = self._make(name, number == wanted)
                if value is not None:
                    fill(self._tensors[name], value)
            if number == wanted:
                self._writes.note(self._layers.names[number])
        return numbers
