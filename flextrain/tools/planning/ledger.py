"""Ledger: keeps books on updates as they run: memory by kind, collectives by axis and link, floating-point operations."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...core.rehearsing import aside, is_aside, listeners
from ...core.rehearsing_private import collective_of, finding_shapes_in, in_backward, only_waits
from ...core.torch_private import TorchDispatchMode, tree_flatten
from .books import Books
from .flops import flops_of
from .kinds import Memory, parts_of
from .links import Network
from .plan import MOMENTS, Kind, Moment, Phase

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

    # Operations

    def __enter__(self) -> Ledger:
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self.memory.resized(storage)
            return storage

        listeners.append(listen := cast(Callable[[str, Iterable[Tensor]], object], self.memory.mark))
        self._stack.callback(listeners.remove, listen)
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
        self._stack.enter_context(finding_shapes_in(aside))
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
        if is_aside():
            return func(*args, **kwargs)
        known = _known(func)
        self._operation = known.name
        result = args[0] if only_waits(func, args) else func(*args, **kwargs)
        phase = self._phase()
        leaves: list[Tensor] = []
        _add_tensors(result, leaves)
        kind_of_new: Kind = "activations" if phase in ("forward", "recompute") else "temporary"
        for leaf in leaves:
            for part in parts_of(leaf):
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
        return Books(traffic, work, self.moments(), self._highest, self.memory.in_use())

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


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
