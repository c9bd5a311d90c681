"""WholeModel: a strategy's model with whole weights, however it has spread them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, singledispatch
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.base.errors import ConfigError, StrategyError, counted
from ...core.base.tensors import bytes_of, dtype_name, has_memory, size_text
from ...core.checkpoint.chunks import FlatShard, full_tensor
from ...core.comm.agreement import gather_differing, raising_together
from ...core.comm.collectives import as_sent, can_be_averaged, floating_buffers, side_group
from ...core.torch_compat.torch_private import replace_tensor, take_buffers, version_of
from ..base import Strategy, meet
from ..recomputation import repeated_blocks
from .model_state import share_buffers

# Sources: where the whole of each parameter and buffer is, over all processes, and how it comes to those that ask.


_WHOLE, _ROWS, _SHARD, _NOTHING = "whole", "rows", "shard", "nothing"
_GATHERING = {_ROWS: 1, _SHARD: 3}
"""How many times its size gathering a tensor takes for a moment, beside the tensor itself. Rows of all processes are one
after the other in memory as they come. Other shards are made contiguous, sent, and put together; what was sent for the
tensor before may not be free yet."""


class Source(NamedTuple):
    """What one process has of a tensor.

    Attributes:
        kind: all of it, some of its rows, another shard of it, or nothing.
        kept: dtype in which the process has it; "" if it has nothing.
        wanted: dtype in which it computes.
        shape: the whole shape; of a buffer it may have changed since set-up.
    """

    kind: str
    kept: str = ""
    wanted: str = ""
    shape: Sequence[int] = ()


class Sources:
    """Every tensor of a model: who has it whole, who has a shard of it, and who has nothing; making it is a collective.

    Args:
        shapes: the whole shapes of the parameters and buffers at set-up, by name; the same on every process.
        buffers: the names of buffers among them.
        own: what this process has, see ``held``.
        live: the tensors that this process computes with, by the same names.
        rank: of this process.

    Raises:
        StrategyError: the model has lost a parameter since set-up.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        buffers: Collection[str],
        own: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        rank: int,
    ) -> None:
        self._own, self._live, self._rank, self._buffers = own, own, rank, buffers
        mine = []
        for name, shape in shapes.items():
            if (found := own.get(name)) is None:
                mine.append(Source(_NOTHING))
                continue
            whole = found.shape if name in buffers else shape
            mine.append(Source(_kind_of(found), dtype_name(found.dtype), dtype_name(live[name].dtype), list(whole)))
        everyones = gather_differing(mine)
        by_name = {name: [Source(*one[i]) for one in everyones] for i, name in enumerate(shapes)}
        self.by_name = {name: every for name, every in by_name.items() if any(one.kind != _NOTHING for one in every)}
        """What each process has, by rank; without buffers that have become None since set-up."""
        if lost := next((name for name in shapes if name not in self.by_name and name not in buffers), None):
            raise StrategyError(f"full_weights: no process has model.{lost} any more, it was there at set-up")

    def replace(self, by: Mapping[Tensor, Tensor]) -> None:
        """Give out other tensors in place of live ones, of the same shapes."""
        self._own = {name: by.get(tensor, tensor) for name, tensor in self._live.items()}

    def want(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Give the floating-point tensors of these names this dtype, in place of the one that they are computed with."""
        for name in names:
            self.by_name[name] = [
                each._replace(wanted=dtype_name(dtype)) if each.kept and _dtype(each.kept).is_floating_point else each
                for each in self.by_name[name]
            ]

    @property
    def are_here(self) -> bool:
        """Whether every process has all tensors whole, as it computes with them."""
        return all(
            source.kind == _WHOLE and source.kept == source.wanted
            for sources in self.by_name.values()
            for source in sources
        )

    def bytes_of(self, names: Iterable[str], rank: int) -> int:
        """Return the memory that the whole tensors take on a process, beside what it has already."""
        return sum(self._size(name) for name in names if self._is_made(name, rank))

    def passing_bytes(self, names: Iterable[str]) -> int:
        """Return the memory that making one of the tensors takes for a moment, beside the tensor itself."""
        return max((self._passing(name) for name in names), default=0)

    def make(self, name: str, keep: bool, device: torch.device) -> Tensor | None:
        """Return the whole tensor, or None on a process that does not ``keep`` it; a collective.

        A parameter that this process has already is not copied: it shares memory with the live one.
        """
        sources, found = self.by_name[name], self._own.get(name)
        source = sources[self._rank]
        is_everywhere = all(each.kind != _NOTHING for each in sources)
        if source.kind == _WHOLE and is_everywhere and not keep:
            return None
        holder = self._holder(name)
        shape, dtype = tuple(sources[holder].shape), _dtype(sources[holder].wanted)
        value: Tensor | None = None
        with torch.no_grad():
            if found is not None:
                value = _gathered(found, device).reshape(shape) if source.kind in _GATHERING else found.detach()
                value = value.to(device, dtype)
                if keep and name in self._buffers and _share_memory(value, self._live[name]):
                    value = value.clone()  # forward writes to buffers
            if not is_everywhere:
                # A process that has it leaves its own as it is: a replica of the holder's may be another.
                sends = value if self._rank == holder else None
                passed = torch.empty(shape, dtype=dtype, device=device) if sends is None else sends.contiguous()
                if passed.numel():
                    dist.broadcast(as_sent(passed.view(-1)), holder)
                value = passed if value is None else value
        return value if keep else None

    def _holder(self, name: str) -> int:
        """Return the rank that gives the tensor to those that have nothing of it: of a buffer the one that saves it."""
        return next(rank for rank, each in enumerate(self.by_name[name]) if each.kind != _NOTHING)

    def _is_made(self, name: str, rank: int) -> bool:
        source = self.by_name[name][rank]
        return source.kind != _WHOLE or source.kept != source.wanted or name in self._buffers

    def _size(self, name: str) -> int:
        source = self.by_name[name][self._holder(name)]
        return math.prod(source.shape) * _dtype(source.wanted).itemsize

    def _passing(self, name: str) -> int:
        """What a gathered tensor is put together from, and the tensor as it is kept if that is another dtype."""
        sources = [source for source in self.by_name[name] if source.kind != _NOTHING]
        size = math.prod(sources[0].shape) * max(_dtype(source.kept).itemsize for source in sources)
        is_cast = any(source.kept != source.wanted for source in sources)
        is_received = 1 < len(sources) < len(self.by_name[name])  # and dropped, where it is already
        return (max(_GATHERING.get(source.kind, 0) for source in sources) + is_cast + is_received) * size


def held(
    shapes: Mapping[str, torch.Size],
    live: Mapping[str, Tensor],
    state: Callable[[], Mapping[str, Tensor]],
    parameters: Collection[str],
) -> dict[str, Tensor]:
    """Return what this process has of each tensor: the live one if it tells what the whole is, else that of the state.

    Args:
        shapes: the whole shapes, by name.
        live: the tensors that this process computes with.
        state: returns ``model_state()``, for those that are neither whole nor DTensors.
        parameters: names of the parameters; the shapes of buffers may change.

    Raises:
        StrategyError: neither tells.
    """
    found: dict[str, Tensor] = {}
    kept: Mapping[str, Tensor] | None = None
    for name, shape in shapes.items():
        tensor = live.get(name)
        if tensor is None:
            continue
        is_whole = not _is_shard(tensor) and tensor.shape == shape and (has_memory(tensor) or not shape.numel())
        if isinstance(tensor, DTensor) or name not in parameters or is_whole:
            found[name] = tensor
            continue
        kept = state() if kept is None else kept
        if name not in kept or kept[name].shape.numel() != shape.numel():
            raise StrategyError(
                f"full_weights: model.{name} has shape {tuple(tensor.shape)} here, {tuple(shape)} at set-up, and the "
                "strategy's model_state() does not say how it is sharded"
            )
        found[name] = kept[name]
    return found


def _kind_of(tensor: Tensor) -> str:
    if not _is_shard(tensor):
        return _WHOLE
    sharding = [one for one in tensor.placements if not one.is_replicate()] if isinstance(tensor, DTensor) else []
    is_rows = not sharding or (len(sharding) == 1 and sharding[0].is_shard(0))
    return _ROWS if is_rows else _SHARD


def _is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, (DTensor, FlatShard))


def _gathered(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole of a shard, on the device, also of one that is kept in the host's memory."""
    here = tensor.detach() if tensor.device.type == device.type else tensor.detach().to(device)
    return full_tensor(here) if isinstance(here, DTensor) else cast(FlatShard, here).full_tensor()


def _share_memory(value: Tensor, live: Tensor) -> bool:
    own = live.to_local() if isinstance(live, DTensor) else live
    return value.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


# Filling a copy of a model with whole tensors, emptying it again, and noticing what was written to them.


def fill(placeholder: Tensor, value: Tensor) -> None:
    """Give a tensor of the copy its value, wherever the copy has it: in several modules, or in lists of tensors."""
    # Either way a tensor of its own on the same memory: who has sent or received the value may still refer to that one.
    made = nn.Parameter(value, requires_grad=False) if isinstance(placeholder, nn.Parameter) else value.detach()
    torch.utils.swap_tensors(placeholder, made)  # type: ignore[no-untyped-call]


def empty(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Free the tensors, also if the user has kept the model."""
    for tensor in tensors.values():
        nothing = torch.empty_like(tensor, device="meta")
        blank = nn.Parameter(nothing, requires_grad=False) if isinstance(tensor, nn.Parameter) else nothing
        try:
            torch.utils.swap_tensors(tensor, blank)  # type: ignore[no-untyped-call]
        except RuntimeError:  # something has a weak reference to it, such as a recurrent layer
            replace_tensor(model, tensor, blank)


class Writes:
    """Notices parameters that are written to: what is gathered is a copy, whose values would be lost."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._versions: dict[str, int] = {}
        self._written: dict[str, None] = {}
        self.note(parameters)

    def note(self, names: Iterable[str]) -> None:
        """Take the values that parameters have now for those that they are to have."""
        self._versions.update({name: version_of(self._parameters[name]) for name in names})

    def look(self, names: Iterable[str]) -> None:
        """Look which of the parameters were written to since they were noted."""
        self._written |= {name: None for name in names if version_of(self._parameters[name]) != self._versions[name]}

    def check(self) -> None:
        """Raise StrategyError if a parameter was written to."""
        self.look(self._parameters)
        if written := [*self._written]:
            more = f" and {counted(len(written) - 1, 'other parameter')}" if len(written) > 1 else ""
            raise StrategyError(
                f"full_weights: model.{written[0]}{more} was written to inside; shards of it do not have the change, what "
                "is whole on a process may: load the weights again, and change them before setup"
            )


# LayerByLayer: whole weights of one layer at a time, gathered when a process calls it, whoever calls what and how
# often.


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


# Buffers apart: what evaluation would use in place of this process's buffers, and a model that keeps its own
# meanwhile.


def bytes_to_share(module: nn.Module) -> int:
    """Return the memory that ``shared_buffers`` takes for a moment."""
    return sum(one.nbytes for one in floating_buffers(module))


def shared_buffers(module: nn.Module, share: Callable[[], None]) -> dict[Tensor, Tensor]:
    """Return what ``share`` would write into each live buffer, where that is something else; a collective.

    Args:
        module: its buffers stay as they are.
        share: writes to floating-point buffers of the module, ``share_buffers`` of a strategy.
    """
    copies = {live: live.detach().clone() for live in module.buffers() if can_be_averaged(live)}
    with replaced_buffers(module, copies):
        share()
    return {live: copy for live, copy in copies.items() if not torch.equal(_local(copy), _local(live))}


@contextmanager
def replaced_buffers(module: nn.Module, by: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Context in which the module has other tensors in place of some of its buffers."""
    held = [
        (part, key, buffer)
        for part in (module.modules() if by else ())
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        if buffer in by
    ]
    _put((part, key, by[buffer]) for part, key, buffer in held)
    try:
        yield
    finally:
        _put(held)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Context in which the module has copies of its buffers, so that what is written to them, or added, does not stay."""
    give_back = take_buffers(module)
    try:
        with replaced_buffers(module, {live: live.detach().clone() for live in module.buffers()}):
            yield
    finally:
        give_back()


def _put(held: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    for part, key, buffer in held:
        setattr(part, key, buffer)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@singledispatch
def computes_alone(strategy: Strategy) -> bool:
    """Return whether ``module`` can be called on one process without the others, if all of its tensors are whole."""
    return True


@singledispatch
def prepare_whole(strategy: Strategy, model: nn.Module) -> torch.dtype | None:
    """Make a copy of the model, on the meta device, compute in the precision of evaluation.

    Returns:
        The dtype for its floating-point parameters; None: that of the live ones.
    """
    return None


def full_weights(
    strategy: Strategy,
    *,
    ranks: Collection[int] | None = None,
    memory_limit: int | str | None = None,
    by_layer: bool = False,
) -> AbstractContextManager[Any]:
    """See ``WholeModel.open``."""
    return WholeModel(strategy).open(ranks=ranks, memory_limit=memory_limit, by_layer=by_layer)


class WholeModel:
    """A strategy's model with whole weights for a while: to generate text, to look at, to compute with.

    It works from ``module`` and ``model_state``, so every strategy that gives its canonical state has it.

    Args:
        strategy: has been set up.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self._noted = strategy, strategy.noted

    @contextmanager
    def open(
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
        strategy, noted = self.strategy, self._noted
        module = strategy.module
        if noted.is_whole:
            raise StrategyError("full_weights: is open already, use the model that it has given")
        meet(strategy, "full_weights()")
        asking, limit = self._agreed(ranks, memory_limit, by_layer)
        flags = Flags(module)
        noted.is_whole = True
        try:
            sources, late = self._sources()
            if limit is not None:
                self._check_shared(limit)
            if sources.are_here and computes_alone(strategy):
                writes = Writes(dict(module.named_parameters()))
                with replaced_buffers(module, self._shared_buffers()):
                    yield module if self.strategy.topology.rank in asking else None
                writes.check()
            else:
                with self._copied(sources, late, asking, limit, by_layer) as model:
                    yield model
        finally:
            noted.is_whole = False
            flags.restore()

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
            return list(range(self.strategy.topology.world_size))
        allowed = f"give numbers from 0 to {self.strategy.topology.world_size - 1}"
        if not isinstance(ranks, Collection) or isinstance(ranks, (str, bytes)):
            raise ConfigError(f"full_weights.ranks: {ranks!r} is not allowed, {allowed} in a list")
        for rank in ranks:
            if isinstance(rank, bool) or not (isinstance(rank, int) and 0 <= rank < self.strategy.topology.world_size):
                raise ConfigError(f"full_weights.ranks: {rank!r} is not allowed, {allowed}")
        return sorted(set(ranks))

    def _check_shared(self, limit: int) -> None:
        needed = max(
            gather_differing(bytes_to_share(self.strategy.module) if self.strategy.topology.data.count > 1 else 0)
        )
        if needed > limit:
            raise StrategyError(
                f"full_weights.memory_limit: {size_text(limit)} is not enough, {size_text(needed)} are needed for a moment to share "
                "buffers; give more"
            )

    def _shared_buffers(self) -> dict[Tensor, Tensor]:
        """Return what evaluation would have in place of buffers of this process, by these; a collective."""
        return (
            shared_buffers(self.strategy.module, lambda: share_buffers(self.strategy))
            if self.strategy.topology.data.count > 1
            else {}
        )

    def _sources(self) -> tuple[Sources, dict[str, bool]]:
        """Return who has what, and the buffers that were added since set-up, each with True if it is persistent."""
        if self._noted.blueprint is None:
            raise StrategyError(f"{type(self.strategy).__name__}: has no model whose weights full_weights could gather")
        shapes, live = self._noted.blueprint.shapes, dict(self.strategy.module.named_buffers())
        if late := self._added_buffers(live.keys() - shapes.keys()):
            shapes = {**shapes, **{name: live[name].shape if name in live else torch.Size() for name in late}}
        with raising_together():  # a process may hold other tensors than the next
            parameters = dict(self.strategy.parameters())
            if added := sorted(parameters.keys() - shapes.keys()):
                raise StrategyError(
                    f"full_weights: model.{added[0]} was added after set-up; make the model so before the runner is made"
                )
            live |= parameters
            own = held(shapes, live, self.strategy.model_state, parameters)
        return Sources(shapes, self._noted.blueprint.buffers.union(late), own, live, self.strategy.topology.rank), late

    def _added_buffers(self, names: Collection[str]) -> dict[str, bool]:
        """Return the buffers of all processes that were added since set-up, each with True if it is persistent; a collective."""
        persistent = self.strategy.buffers() if names else {}
        own = [(name, name in persistent) for name in sorted(names)]
        return {name: is_saved for each in gather_differing(own) for name, is_saved in each}

    @contextmanager
    def _copied(
        self, sources: Sources, late: dict[str, bool], asking: list[int], limit: int | None, by_layer: bool
    ) -> Iterator[Any]:
        """Context with a copy of the model, on the processes that ask."""
        assert self._noted.blueprint is not None
        model, tensors = self._noted.blueprint.build(late, self._noted.blueprint.shapes.keys() - sources.by_name.keys())
        parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        if (dtype := prepare_whole(self.strategy, model)) is not None:
            sources.want(parameters, dtype)
        layers = Layers(model, tensors)
        if limit is not None:
            _check_limit(limit, by_layer, asking, sources, layers)
        sources.replace(self._shared_buffers())
        writes = Writes(parameters)

        def make(name: str, keep: bool) -> Tensor | None:
            return sources.make(name, keep, self.strategy.device)

        asks = self.strategy.topology.rank in asking
        session = (
            LayerByLayer(
                model,
                layers,
                tensors,
                make,
                writes,
                float(self.strategy.config.timeout_s),
                self.strategy.topology.world_size,
            )
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


__all__ = ["WholeModel", "computes_alone", "full_weights", "prepare_whole"]
