"""WholeWeights: the part of a strategy that gives a model with whole weights, however it has spread them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.byte_sizes import bytes_of, size_text
from ...core.comm.joint_errors import gather_differing, raising_together
from ...core.errors import ConfigError, StrategyError
from ...core.rehearsing import rehearsing
from ..state import CanonicalState
from .blueprint import Blueprint
from .by_layer import LayerByLayer, Layers
from .copied_tensors import Writes, empty, fill
from .shared_buffers import bytes_to_share, replaced_buffers, shared_buffers
from .sources import Sources, held


class WholeWeights(CanonicalState):
    """The part of a strategy that gives a model with whole weights for a while: to generate text, to look at, to compute with.

    It works from ``module`` and ``model_state``, so a strategy has it by giving its canonical state.

    Args:
        options: the fields of this class's ``Config``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._blueprint: Blueprint | None = None
        self._is_whole = False  # full_weights is open

    @contextmanager
    def full_weights(
        self, *, ranks: Collection[int] | None = None, memory_limit: int | str | None = None, by_layer: bool = False
    ) -> Iterator[Any]:
        """Return a context with the user's model in which every parameter and buffer is whole and plain; a collective.

        It computes as on one device, under ``autocast()``: no call of it waits for another process, so processes may call it
        unequally often. Weights are those of now, averages if these are swapped in. Where every process has all of the model
        anyway, it is ``module`` itself, which takes no memory for parameters. Otherwise it is a copy of the model as it was before setup, and
        the sharded model stays untouched. Hooks that were registered since setup are not in the copy.

        Weights are to be read only: an error at the end of the context names a parameter that was written to. Floating-point
        buffers are those of evaluation (see ``share_buffers``), although those of ``module`` stay as they are: of data
        shards whose running statistics differ, the first shard's. Other buffers are the process's own, or, where it has
        none, those of the first process that has them. What is written to buffers of a copy is lost. Flags (training,
        requires_grad) of ``module`` are restored, also after an error.

        Args:
            ranks: the processes that ask; None: all. The others take part in gathering, keep nothing and get None.
            memory_limit: most bytes that this may take on a process, as a number or "2GiB", beside what the strategy has
                anyway; checked before anything is gathered. None: no limit.
            by_layer: gather each of the repeated layers when it is called, and free it afterwards. Processes may still
                call the model unequally often, but must not wait for each other inside in any other way.

        Returns:
            A context; entering it gives the model, or None on a process that does not ask.

        Raises:
            ConfigError: a rank that does not exist, a wrong size, or arguments that differ between processes.
            StrategyError: more memory is needed, weights were written to, or a context is open already.
        """
        module = self.module
        if self._is_whole:
            raise StrategyError("full_weights: is open already, use the model that it has given")
        self.meet("full_weights()")
        asking, limit = self._agreed(ranks, memory_limit, by_layer)
        flags = Flags(module)
        self._is_whole = True
        try:
            sources, late = self._sources()
            if limit is not None:
                self._check_shared(limit)
            if sources.are_here and self._computes_alone():
                writes = Writes(dict(module.named_parameters()))
                with replaced_buffers(module, self._shared_buffers()):
                    yield module if self.rank in asking else None
                writes.check()
            else:
                with self._copied(sources, late, asking, limit, by_layer) as model:
                    yield model
        finally:
            self._is_whole = False
            flags.restore()

    def _computes_alone(self) -> bool:
        """Return whether ``module`` can be called on one process without the others, if all of its tensors are whole."""
        return True

    def _prepare_whole(self, model: nn.Module) -> torch.dtype | None:
        """Make a copy of the model, on the meta device, compute in the precision of evaluation.

        Returns:
            The dtype for its floating-point parameters; None: that of the live ones.
        """
        return None

    def _note_blueprint(self, model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> None:
        if not rehearsing():
            self._blueprint = Blueprint(model, shape_of)

    def _agreed(
        self, ranks: Collection[int] | None, memory_limit: int | str | None, by_layer: bool
    ) -> tuple[list[int], int | None]:
        """Return the processes that ask and the limit in bytes, which are the same on all; a wrong one raises on all."""
        problem, asking, limit = None, [], None
        try:
            asking = self._asking(ranks)
            limit = None if memory_limit is None else bytes_of(memory_limit, "full_weights.memory_limit")
        except ConfigError as error:
            problem = str(error)
        arguments = [problem, asking, limit, bool(by_layer)]
        everyones = gather_differing(arguments)
        if found := problem or next((other[0] for other in everyones if other[0]), None):
            raise ConfigError(found)
        if any(other != arguments for other in everyones):
            raise ConfigError("full_weights: its arguments differ between processes, give equal ones")
        return asking, limit

    def _asking(self, ranks: object) -> list[int]:
        if ranks is None:
            return list(range(self.world_size))
        allowed = f"give numbers from 0 to {self.world_size - 1}"
        if not isinstance(ranks, Collection) or isinstance(ranks, (str, bytes)):
            raise ConfigError(f"full_weights.ranks: {ranks!r} is not allowed, {allowed} in a list")
        for rank in ranks:
            if isinstance(rank, bool) or not (isinstance(rank, int) and 0 <= rank < self.world_size):
                raise ConfigError(f"full_weights.ranks: {rank!r} is not allowed, {allowed}")
        return sorted(set(ranks))

    def _check_shared(self, limit: int) -> None:
        needed = max(gather_differing(bytes_to_share(self.module) if self.topology.data.count > 1 else 0))
        if needed > limit:
            raise StrategyError(
                f"full_weights.memory_limit: {size_text(limit)} is not enough, {size_text(needed)} are needed for a moment to share "
                "buffers; give more"
            )

    def _shared_buffers(self) -> dict[Tensor, Tensor]:
        """Return what evaluation would have in place of buffers of this process, by these; a collective."""
        return shared_buffers(self.module, self.share_buffers) if self.topology.data.count > 1 else {}

    def _sources(self) -> tuple[Sources, dict[str, bool]]:
        """Return who has what, and the buffers that were added since set-up, each with True if it is persistent."""
        if self._blueprint is None:
            raise StrategyError(f"{type(self).__name__}: has no model whose weights full_weights could gather")
        shapes, live = self._blueprint.shapes, dict(self.module.named_buffers())
        if late := self._added_buffers(live.keys() - shapes.keys()):
            shapes = {**shapes, **{name: live[name].shape if name in live else torch.Size() for name in late}}
        with raising_together():  # a process may hold other tensors than the next
            parameters = dict(self.named_parameters())
            if added := sorted(parameters.keys() - shapes.keys()):
                raise StrategyError(
                    f"full_weights: model.{added[0]} was added after set-up; make the model so before the runner is made"
                )
            live |= parameters
            own = held(shapes, live, self.model_state, parameters)
        return Sources(shapes, self._blueprint.buffers.union(late), own, live, self.rank), late

    def _added_buffers(self, names: Collection[str]) -> dict[str, bool]:
        """Return the buffers of all processes that were added since set-up, each with True if it is persistent; a collective."""
        persistent = self._buffers() if names else {}
        own = [(name, name in persistent) for name in sorted(names)]
        return {name: is_saved for each in gather_differing(own) for name, is_saved in each}

    @contextmanager
    def _copied(
        self, sources: Sources, late: dict[str, bool], asking: list[int], limit: int | None, by_layer: bool
    ) -> Iterator[Any]:
        """Context with a copy of the model, on the processes that ask."""
        assert self._blueprint is not None
        model, tensors = self._blueprint.build(late, self._blueprint.shapes.keys() - sources.by_name.keys())
        parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        if (dtype := self._prepare_whole(model)) is not None:
            sources.want(parameters, dtype)
        layers = Layers(model, tensors)
        if limit is not None:
            _check_limit(limit, by_layer, asking, sources, layers)
        sources.replace(self._shared_buffers())
        writes = Writes(parameters)

        def make(name: str, keep: bool) -> Tensor | None:
            return sources.make(name, keep, self.device)

        asks = self.rank in asking
        session = (
            LayerByLayer(model, layers, tensors, make, writes, float(self.config.timeout_s), self.world_size)
            if by_layer
            else None
        )
        try:
            for name in layers.rest if by_layer else tensors:
                if (value := make(name, asks)) is not None:
                    fill(tensors[name], value)
            writes.note(parameters)
            try:
                yield model if asks else None
            finally:
                if session is not None:
                    session.finish()
            writes.check()
        finally:
            empty(model, tensors)


def _check_limit(limit: int, by_layer: bool, asking: list[int], sources: Sources, layers: Layers) -> None:
    names = [*sources.by_name]
    whole = layered = 0
    for rank in asking:
        whole = max(whole, sources.bytes_of(names, rank))
        largest = max((sources.bytes_of(own, rank) for own in layers.names), default=0)
        layered = max(layered, sources.bytes_of(layers.rest, rank) + largest)
    passing = sources.passing_bytes(names)
    whole, layered = whole + passing, layered + passing
    if (layered if by_layer else whole) <= limit:
        return
    if by_layer or layered >= whole:
        raise StrategyError(
            f"full_weights.memory_limit: {size_text(limit)} is not enough, {size_text(layered if by_layer else whole)} are needed"
            f"{' layer by layer' if by_layer else ''}; give more, or fewer ranks"
        )
    hint = "by_layer=True" if layered <= limit else "more"
    raise StrategyError(
        f"full_weights.memory_limit: {size_text(limit)} is not enough, the whole weights need {size_text(whole)}, and "
        f"{size_text(layered)} layer by layer; give {hint}"
    )


class Flags:
    """The flags of a model's modules and parameters, to restore them."""

    def __init__(self, module: nn.Module) -> None:
        self._training = [(part, part.training) for part in module.modules()]
        self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]

    def restore(self) -> None:
        """Set the flags as they were."""
        for part, training in self._training:
            part.training = training
        for parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
