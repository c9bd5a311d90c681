"""Ledger: keeps books on updates as they run: memory by kind, collectives by axis and link, floating-point operations."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from ..core.base.tensors import dtype_name, parts_of
from ..core.torch_compat.torch_private import TorchDispatchMode, apart, tree_flatten
from ..strategies import offloading
from .plan import MOMENTS, Kind, Moment, Phase, Traffic, Work
from .rehearsing_private import collective_of, finding_shapes_in, in_backward, only_waits, replaced

# Books of one update, and those of an update with more equal micro-batches, reckoned from a few.


EXECUTED = (2, 3, 4)
"""Numbers of micro-batches of the updates from which one with more is reckoned. The first micro-batch finds no gradients and
the last one reduces them; those between are alike."""
REPEATED = 8
"""From so many micro-batches on, an update is reckoned."""

_OF_LOSSES = 1024
"""Bytes that a micro-batch may leave until the update: its loss and other values to log."""

_Numbers = Mapping[Any, Sequence[float]]
_Memory = Mapping[Kind, int]


@dataclass(frozen=True)
class Books:
    """What one update needed.

    Attributes:
        traffic: calls, payload, bytes sent inside and between, by (collective, axis, ranks, phase).
        work: operations, floating-point operations and bytes moved, by (phase, dtype, whether they are products).
        moments: the memory over the update.
        peak: the moment with the most memory.
        between_updates: bytes by kind at its end.
        host: the most bytes of the host's memory that offloaded activations had.
    """

    traffic: _Numbers
    work: _Numbers
    moments: list[Moment]
    peak: Moment
    between_updates: dict[Kind, int]
    host: int = 0

    def as_traffic(self) -> list[Traffic]:
        """The collectives of the update."""
        return [
            Traffic(collective, axis, count, int(calls), int(payload), round(inside), round(between), phase)
            for (collective, axis, count, phase), (calls, payload, inside, between) in self.traffic.items()
        ]

    def as_work(self) -> list[Work]:
        """The computation of the update."""
        found: list[Work] = []
        key: tuple[Phase, str, bool]
        for key, (operations, flops, moved) in self.work.items():
            phase, dtype, is_matrix = key
            kind: Any = "matrix" if is_matrix else "other"
            found.append(Work(phase, dtype, kind, int(operations), int(flops), int(moved)))
        return found


def are_alike(window: Sequence[Any]) -> bool:
    """Whether all micro-batches have the same structure, and tensors of the same shapes and dtypes."""
    first, *others = map(_form, window)
    return first is not None and all(other == first for other in others)


def _form(batch: Any) -> Hashable:
    found: list[Hashable] = []
    if (
        isinstance(batch, dict) and type(batch) is not dict
    ):  # what it knows of itself, such as whether any target counts
        found += [(key, value) for key, value in vars(batch).items() if isinstance(value, (bool, int, str))]
        batch = dict(batch)
    leaves, structure = tree_flatten(batch)
    found.append(str(structure))
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype))
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            found.append((type(leaf), leaf))
        else:
            return None  # nobody knows what a model makes of it
    return tuple(found)


def reckoned(first: Books, few: Sequence[Books], count: int) -> Books | None:
    """Return the books of an update of ``count`` micro-batches; None if it does not follow from those of few.

    Args:
        first: of the first update, with ``EXECUTED[0]`` micro-batches, which creates the optimizer's state. Its peak may be
            higher.
        few: of the updates after it, with ``EXECUTED`` micro-batches. All of them have the inputs of ``count``.
    """
    one, two, three = few
    more = count - EXECUTED[-1]
    traffic = _extended(one.traffic, two.traffic, three.traffic, more)
    work = _extended(one.work, two.work, three.work, more)
    each = _growth(*(books.peak.by_kind for books in few))
    at_the_end = _growth(*(books.between_updates for books in few))
    if traffic is None or work is None or each is None or at_the_end is None or two.host != three.host:
        return None
    # Of equal ones the later: in the first update, nobody has said yet what the new state of the optimizer is.
    peaks = (_later(three.peak, each, more), _later(first.peak, each, count - EXECUTED[0]))
    return Books(
        traffic,
        work,
        [_later(moment, each, more) for moment in three.moments],
        max(peaks, key=lambda peak: peak.total),
        _grown(three.between_updates, at_the_end, more),
        max(first.host, three.host),
    )


def _growth(one: _Memory, two: _Memory, three: _Memory) -> dict[Kind, int] | None:
    """The bytes by which memory grows with each micro-batch; None if it does not grow evenly, or by more than losses."""
    found: dict[Kind, int] = {}
    for kind in {**one, **two, **three}:
        step = three.get(kind, 0) - two.get(kind, 0)
        if step != two.get(kind, 0) - one.get(kind, 0) or abs(step) > _OF_LOSSES:
            return None
        found[kind] = step
    return found


def _extended(one: _Numbers, two: _Numbers, three: _Numbers, more: int) -> _Numbers | None:
    if not one.keys() == two.keys() == three.keys():
        return None
    found: dict[Any, list[float]] = {}
    for key, values in three.items():
        steps = [c - b for b, c in zip(two[key], values, strict=True)]
        before = [b - a for a, b in zip(one[key], two[key], strict=True)]
        if not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-3) for a, b in zip(before, steps, strict=True)):
            return None
        found[key] = [value + more * step for value, step in zip(values, steps, strict=True)]
    return found


def _grown(by_kind: _Memory, each: _Memory, times: int) -> dict[Kind, int]:
    kinds = {**by_kind, **each}
    return {kind: size for kind in kinds if (size := by_kind.get(kind, 0) + times * each.get(kind, 0))}


def _later(moment: Moment, each: _Memory, times: int) -> Moment:
    """A moment after more micro-batches."""
    by_kind = _grown(moment.by_kind, each, times)
    return dataclasses.replace(moment, total=moment.total + times * sum(each.values()), by_kind=by_kind)


# Books of memory: how many bytes are alive, of which kind, and when they were the most.


_UNSETTLED: tuple[Kind, ...] = ("activations", "temporary")
"""Kinds of memory of which nobody has said what it is."""


@dataclass(eq=False)
class _Entry:
    """The memory of one storage."""

    size: int
    kind: Kind


class Memory:
    """The memory of all tensors that were noted, until they are gone.

    Args:
        on_growth: called whenever more memory is alive than ever before.
    """

    def __init__(self, on_growth: Callable[[], object]) -> None:
        self._on_growth = on_growth
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, _Entry] = weakref.WeakKeyDictionary()
        self.by_kind: collections.Counter[Kind] = collections.Counter()
        self.total = 0
        self._highest = 0

    def forget_highest(self) -> None:
        """Look for the highest anew."""
        self._highest = 0

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is counted."""
        return tensor.untyped_storage() in self._known

    def note(self, tensor: Tensor, kind: Kind) -> _Entry:
        """Count a tensor's memory as ``kind``, if it is not known yet."""
        storage = tensor.untyped_storage()
        entry = self._known.get(storage)
        if entry is None:
            entry = self._known[storage] = _Entry(0, kind)
            weakref.finalize(storage, self._set, entry, 0, None).atexit = False
        if entry.size != storage.nbytes():
            self._set(entry, storage.nbytes())
        return entry

    def mark(self, kind: Kind, values: Iterable[Any], *, settles: bool = True) -> None:
        """Say what tensors are, or have become; not of those that are something already, unless ``settles``."""
        for value in values:
            for tensor in parts_of(value):
                entry = self.note(tensor, kind)
                if entry.kind != kind and (settles or entry.kind in _UNSETTLED):
                    self._set(entry, entry.size, kind)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's new size."""
        if (entry := self._known.get(storage)) is not None:
            self._set(entry, storage.nbytes())

    def in_use(self) -> dict[Kind, int]:
        """Return the bytes that are alive, by kind."""
        return {kind: size for kind, size in self.by_kind.items() if size}

    def _set(self, entry: _Entry, size: int, kind: Kind | None = None) -> None:
        self.by_kind[entry.kind] -= entry.size
        self.total += size - entry.size
        entry.size, entry.kind = size, kind or entry.kind
        self.by_kind[entry.kind] += size
        if self.total > self._highest:
            self._highest = self.total
            self._on_growth()


# Over which axis and which links a collective goes, and how many bytes a process sends for it.


@dataclass(frozen=True)
class Network:
    """The processes of a job, by machine and by axis of the mesh.

    Attributes:
        world_size, nodes: see Job.
        axes: number of processes by axis, outermost first, whose product is ``world_size``; empty without a mesh.
        overlays: sizes of axes that divide the innermost processes anew, such as "ep".
    """

    world_size: int
    nodes: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    overlays: Mapping[str, int] = field(default_factory=dict)

    def axis_of(self, ranks: Sequence[int], collective: str) -> str:
        """Return the axes along which these processes differ."""
        if not self.axes:
            return "data" if len(ranks) > 1 else ""
        for name, size in self.overlays.items():
            # Its neighbours are nearest; the same processes may differ along another axis, which sends other messages.
            first = ranks[0] - ranks[0] % size
            if collective == "all_to_all" and list(ranks) == [*range(first, first + size)]:
                return name
        indices = [self._indices(rank) for rank in ranks]
        names = [name for i, name in enumerate(self.axes) if len({each[i] for each in indices}) > 1]
        return " x ".join(names)

    def _indices(self, rank: int) -> list[int]:
        found = []
        for size in reversed([*self.axes.values()]):
            found.append(rank % size)
            rank //= size
        return found[::-1]

    def node_of(self, rank: int) -> int:
        """The machine of a process."""
        return rank * self.nodes // self.world_size

    def sent(self, collective: str, ranks: Sequence[int], payload: int) -> tuple[float, float]:
        """Return the bytes that a process sends inside of its node and to other nodes, in the mean over the processes.

        Args:
            payload: bytes of the whole tensor, see Traffic.
        """
        count, nodes = len(ranks), [self.node_of(rank) for rank in ranks]
        whole = payload * (count - 1) / count * (2 if collective == "all_reduce" else 1)
        if collective == "all_to_all":
            pairs = count * (count - 1)
            same = sum(size * (size - 1) for size in (nodes.count(node) for node in set(nodes)))
            inside = whole * same / pairs
        else:  # a ring, each process sends to the next one
            crossing = sum(nodes[i] != nodes[i - 1] for i in range(count))
            inside = whole * (count - crossing) / count
        return inside, whole - inside

    def sent_to(self, sender: int, receiver: int, payload: int) -> tuple[float, float]:
        """Return the bytes of a message inside of a node and between nodes, one of which is 0."""
        return (float(payload), 0.0) if self.node_of(sender) == self.node_of(receiver) else (0.0, float(payload))


def check_nodes(world_size: int, nodes: int) -> str | None:
    """Say why so many processes cannot be on so many machines; None if they can."""
    if nodes < 1 or world_size < 1:
        return "give 1 or more"
    if world_size % nodes:
        lower = math.gcd(world_size, nodes)
        return f"{nodes} nodes do not share {world_size} processes evenly; {lower} do"
    return None


# Floating-point operations of torch's operations: those that torch counts, and the products with stacks of experts'
# matrices.


def flops_of(operation: Any) -> Callable[..., int] | None:
    """Return what counts the operations of a call, from its arguments and ``out_val``; None: they are not counted.

    Torch 2.15 has no formula for grouped products, with which mixtures of experts compute.
    """
    found: Callable[..., int] | None = flop_registry.get(operation.overloadpacket)
    return found or _GROUPED.get(operation.name().partition(".")[0])


def _grouped(one: Any, other: Any, *_: Any, **options: Any) -> int:
    """A product of rows in groups, each with the matrix of its group; every row counts, also if it is of no group."""
    if one.ndim == 3 and other.ndim == 2:  # columns in groups
        return 2 * int(one.shape[1] * one.shape[2] * other.shape[1])
    return 2 * int(one.numel() * other.shape[-1])


def _grouped_backward(one: Any, other: Any, *rest: Any, **options: Any) -> int:
    return 2 * _grouped(one, other)  # the gradients of both


_GROUPED: dict[str, Callable[..., int]] = {
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
}


_COMMUNICATION = ("c10d", "fsdp")
"""Namespaces of operations on memory that communicates: their tensors are gathered parameters and buffers of collectives."""
_DEVICE = torch.ops.prim.device.default
_MODULE = "flextrain module"


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that sees every operation of this thread, on tensors with values or without.

    Memory is counted from when a tensor is first seen until it is freed. What an operation allocates and frees inside is not
    seen, and neither is the allocator's rounding.

    Args:
        rank: of this process.
        network: who is where.
    """

    def __init__(self, rank: int, network: Network) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self.network = rank, network
        self.memory = Memory(self._higher)
        self._host = Memory(self._higher_on_host)
        self._is_on_host = False
        self._most_on_host = 0
        self.peak = self._highest = Moment("setup", "", "", 0, {})
        self._moments: list[Moment] = []
        self._traffic: dict[tuple[str, str, int, Phase], list[float]] = {}
        self._work: dict[tuple[Phase, str, bool], list[int]] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._inside: list[str] = []
        self._behind = ""  # the module whose gradients are computed
        self._operation = ""
        self._updating, self._setting_up = False, True
        self._last: Phase = "forward"
        self._groups: dict[Any, list[int]] = {}
        self._stack = ExitStack()

    # What tensors are

    def watch(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Say what a model's and its optimizers' tensors are, now and whenever they come."""
        self._names.update({part: name for name, part in module.named_modules()})
        self.memory.mark("parameters", module.parameters())
        self.memory.mark("buffers", module.buffers())
        for parameter in module.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda own: self.memory.mark("gradients", [own.grad])
                )
                self._stack.callback(handle.remove)
        for optimizer in optimizers:
            self._note_state(optimizer)
            handle = optimizer.register_step_post_hook(lambda own, args, kwargs: self._note_state(own))
            self._stack.callback(handle.remove)

    def _note_state(self, optimizer: torch.optim.Optimizer) -> None:
        self.memory.mark("optimizer_state", tree_flatten([*optimizer.state.values()])[0])

    # Where it is

    def begin(self) -> None:
        """Begin an update: what was counted before is forgotten, but for the peak of all updates."""
        self.memory.forget_highest()  # setting up may have needed more, with a model that was whole
        self._highest = Moment("forward", "", "", 0, {})
        self._setting_up = self._updating = False
        self._last = "forward"
        self._moments, self._traffic, self._work = [], {}, {}
        self._host.forget_highest()
        self._most_on_host = 0

    def update(self) -> None:
        """Say that gradients are there, and the weights are updated."""
        self._updating = True

    def _phase(self) -> Phase:
        if self._setting_up:
            return "setup"
        if in_backward():
            # Autograd computes gradients of gradients only for who asks; otherwise only recomputation needs a graph.
            self._last = "backward"
            return "recompute" if torch.is_grad_enabled() and self._inside else "backward"
        if self._inside:
            self._last = "forward"
        return "update" if self._updating else self._last

    def _module(self) -> str:
        return self._inside[-1] if self._inside else self._behind if in_backward() else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._updating = False
        self._inside.append(self._names.get(module, self._inside[-1] if self._inside else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._inside.pop()
        for leaf in tree_flatten(output)[0]:
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None and _MODULE not in node.metadata:  # the innermost module comes first
                node.metadata[_MODULE] = name
                node.register_prehook(lambda *_, name=name: setattr(self, "_behind", name))

    def _now(self) -> Moment:
        return Moment(self._phase(), self._module(), self._operation, self.memory.total, self.memory.in_use())

    def _higher(self) -> None:
        if not self._setting_up:
            self._highest = self._now()
            # Of equal updates the later one: the first one has yet to say what its new state is.
            if self._highest.total >= self.peak.total:
                self.peak = self._highest

    def _higher_on_host(self) -> None:
        self._most_on_host = self._host.total

    def _counted_on_host(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def on_host(*args: Any, **kwargs: Any) -> Tensor:
            self._is_on_host = True
            try:
                return make(*args, **kwargs)
            finally:
                self._is_on_host = False

        return on_host

    # Operations

    def __enter__(self) -> Ledger:
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self.memory.resized(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        self._stack.enter_context(finding_shapes_in(apart))
        self._stack.enter_context(replaced(offloading, "on_host", self._counted_on_host(offloading.on_host)))
        self._stack.callback(register_module_forward_pre_hook(self._enter).remove)
        self._stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # torch asks as often as it computes
            return args[0].device
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # it takes itself apart, and its parts come here
        kwargs = kwargs or {}
        known = _known(func)
        self._operation = known.name
        result = args[0] if only_waits(func, args) else func(*args, **kwargs)
        if self._is_on_host:
            self._host.note(result, "activations")
        phase = self._phase()
        leaves: list[Tensor] = []
        _add_tensors(result, leaves)
        kind_of_new: Kind = "activations" if phase in ("forward", "recompute") else "temporary"
        for leaf in leaves:
            for part in parts_of(leaf):
                if not self._host.knows(part):
                    self.memory.note(part, kind_of_new)
        if known.communicates:
            given: list[Tensor] = []
            _add_tensors((args, kwargs), given)
            self.memory.mark("communication", [*given, *leaves], settles=False)
        self._count(known, func, args, kwargs, result, phase, leaves)
        if not self._setting_up and (not self._moments or self._moments[-1].total != self.memory.total):
            self._moments.append(self._now())
        return result

    def _count(
        self, known: _Known, func: Any, args: Any, kwargs: Any, result: Any, phase: Phase, leaves: list[Tensor]
    ) -> None:
        found = collective_of(func, args, kwargs, result)
        if found is not None:
            self._send(*found, phase)
            return
        if known.is_view:
            return
        formula = known.formula
        given: list[Tensor] = []
        _add_tensors((args, kwargs), given)
        # A product is as fast as what is multiplied allows, whatever the dtype of its result.
        dtype: torch.dtype | None = None
        moved = 0
        for leaf in leaves + given if formula is None else given + leaves:
            moved += leaf.numel() * leaf.itemsize
            if dtype is None and leaf.dtype.is_floating_point:
                dtype = leaf.dtype
        if dtype is None:
            return
        name = _name_of(dtype)
        if formula is not None and dtype == torch.float32 and _may_round(func):
            name = "tfloat32"
        work = self._work.setdefault((phase, name, formula is not None), [0, 0, 0])
        work[0] += 1
        work[1] += int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        work[2] += moved

    def _send(self, collective: str, group: Any, payload: int, other: int | None, phase: Phase) -> None:
        if group not in self._groups:
            self._groups[group] = dist.get_process_group_ranks(group)
        ranks = self._groups[group]
        if len(ranks) == 1:
            return
        if other is None:
            inside, between = self.network.sent(collective, ranks, payload)
            axis, count = self.network.axis_of(ranks, collective), len(ranks)
        else:
            pair = (self._rank, ranks[other])
            inside, between = self.network.sent_to(*pair, payload) if collective == "send" else (0.0, 0.0)
            axis, count = self.network.axis_of(pair, collective), 2
        row = self._traffic.setdefault((collective, axis, count, phase), [0, 0, 0.0, 0.0])
        for i, value in enumerate((1, payload, inside, between)):
            row[i] += value

    # Results

    def books(self) -> Books:
        """What was counted since ``begin``."""
        traffic = {key: [*numbers] for key, numbers in self._traffic.items()}
        work = {key: [*numbers] for key, numbers in self._work.items()}
        return Books(traffic, work, self.moments(), self._highest, self.memory.in_use(), self._most_on_host)

    def moments(self) -> list[Moment]:
        """The memory since ``begin``: the highest moments of equally many operations, and of each phase."""
        step = max(1, -(-len(self._moments) // (MOMENTS - 8)))
        spans = [self._moments[start : start + step] for start in range(0, len(self._moments), step)]
        chosen = {id(max(span, key=lambda moment: moment.total)) for span in spans}
        phases = collections.defaultdict(list)
        for moment in self._moments:
            phases[moment.phase].append(moment)
        chosen |= {id(max(found, key=lambda moment: moment.total)) for found in phases.values()}
        return [moment for moment in self._moments if id(moment) in chosen]


class _Known(NamedTuple):
    """What does not change from call to call of an operation."""

    name: str
    communicates: bool
    is_view: bool
    formula: Callable[..., int] | None


@functools.cache
def _known(operation: Any) -> _Known:
    name = operation.name().replace("::", ".").removesuffix(".default")
    return _Known(name, operation.namespace in _COMMUNICATION, operation.is_view, flops_of(operation))


_name_of = functools.cache(dtype_name)


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    """Add the tensors of an operation's arguments or results, in order; torch's own function for trees takes several times as long."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _add_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _add_tensors(each, found)


def _may_round(operation: Any) -> bool:
    """Whether torch allows TF32 for a product in float32 on a device that has it."""
    backends: Any = torch.backends
    is_convolution = "convolution" in operation.overloadpacket.__name__
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # torch before 2.9
        return bool((backends.cudnn if is_convolution else backends.cuda.matmul).allow_tf32)
    return bool((backends.cudnn.conv if is_convolution else backends.cuda.matmul).fp32_precision == "tf32")
