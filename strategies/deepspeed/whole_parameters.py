"""Optimizers that look at whole parameters in DeepSpeed's engine, which has ranges of them in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.base.errors import StrategyError
from ...core.checkpoint.chunks import FlatShard, Ranges
from ...core.comm import collectives as dist
from ...optim.adapters import OptimizerAdapter
from ...optim.owner_adapters import settings_now
from ...optim.owners import held_as
from ...optim.wrapper import OptimWrapper
from . import engine_internals
from .config import WHERE, ZeroOptimization
from .engine_internals import Fragment


def looks_at_whole(wrapper: OptimWrapper) -> bool:
    """Return whether the built optimizer of a wrapper looks at whole parameters in some of its groups."""
    return any(wrapper.adapter.looks_at_whole(group) for group in wrapper.param_groups)


def check_offloading(wrapper: OptimWrapper, zero: ZeroOptimization) -> None:
    """Raise StrategyError if state is where owners cannot compute with it."""
    offload, kind = zero.offload_optimizer, type(wrapper.optimizer).__name__
    if offload is None or not looks_at_whole(wrapper):
        return
    where = f"{WHERE}.zero_optimization.{offload.key}"
    if offload.on_files:
        raise StrategyError(
            f'{where}.device: "nvme" is not possible with {kind}, whose owners need parameters in memory; give device="cpu"'
        )
    if offload.ratio not in (None, 1):
        raise StrategyError(f"{where}.ratio: {offload.ratio} is not possible with {kind}, leave it out")


class SeenWhole:
    """Lets an optimizer in the engine of stage 1, 2 or 3 see whole parameters, where it looks at such.

    The engine steps one flat tensor after the other, with gradients that are reduced, clipped and without loss scale. Here the optimizer
    gets the parameters in a flat tensor instead, each as a FlatShard that says what every process has of it. So their owners find
    each other as those of DTensors do, and state belongs to a parameter. Tensors of groups in which it does not look at
    whole parameters stay flat.

    Args:
        engine: DeepSpeed's.
        adapter: of the torch optimizer in it.
        model: the user's model.
        fragments: this process's shards of trainable parameters.
        device: on which processes work together.
        unused: returns the names of parameters that no process has used in this update.

    Attributes:
        fragments: the same, of which those that are seen as parameters have these as ``flat``.
    """

    def __init__(
        self,
        engine: Any,
        adapter: OptimizerAdapter,
        model: nn.Module,
        fragments: Sequence[Fragment],
        device: torch.device,
        unused: Callable[[], Collection[str]],
    ) -> None:
        self._adapter, self._unused = adapter, unused
        self._flats = engine_internals.flat_tensors(engine)
        self._groups = {id(each.flat): each.group for each in fragments}
        self._begin_anew: dict[int, Callable[[], None]] = {}
        held = dist.all_gather_object([(each.start, each.start + each.numel) for each in fragments])
        self.fragments = list(fragments)
        self._seen: dict[int, list[tuple[Fragment, FlatShard]]] = {}
        for number, fragment in enumerate(fragments):
            if adapter.looks_at_whole(adapter.optimizer.param_groups[fragment.group]):
                own = fragment.cut(fragment.flat)
                assert isinstance(own, FlatShard)
                ranges = Ranges(tuple(each[number] for each in held), device)
                shard = FlatShard(own.to_local(), own.shape, own.start, ranges)
                self._seen.setdefault(id(fragment.flat), []).append((fragment, shard))
                self.fragments[number] = replace(fragment, flat=shard, offset=None)
        engine.optimizer._optimizer_step = self._step
        for flat in self._flats:  # owners are known from now on, also to checkpoints
            with self._having(flat):
                adapter.check(model)

    def _step(self, number: int) -> None:
        flat = self._flats[number]
        unused, gradient, seen = self._unused(), flat.grad, self._seen.get(id(flat), ())
        assert gradient is not None
        for fragment, shard in seen:
            assert fragment.offset is not None
            own = gradient.narrow(0, fragment.offset, fragment.numel)
            shard.grad = None if fragment.name in unused else held_as(shard, own)
        with self._having(flat), self._adapter.stepping():
            self._adapter.optimizer.step()
        for _, shard in seen:
            shard.grad = None

    @contextmanager
    def _having(self, flat: Tensor) -> Iterator[None]:
        """Context in which the optimizer has the group of a flat tensor, with what it sees of that."""
        number = self._groups[id(flat)]
        group = self._adapter.optimizer.param_groups[number]
        parameters = group["params"]
        if flat is next(each for each in self._flats if self._groups[id(each)] == number):
            self._begin_anew[number] = settings_now(group)
        else:  # what a group counts, it counts once in an update
            with torch.no_grad():
                self._begin_anew[number]()
        group["params"] = [shard for _, shard in self._seen.get(id(flat), ())] or [flat]
        try:
            with self._adapter.only(group):
                yield
        finally:
            group["params"] = parameters
