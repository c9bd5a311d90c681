"""Transfers: sends activations and their gradients between the processes of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.comm.collectives import group_with_this_process
from ....core.errors import StrategyError
from ....core.rehearsing import rehearsing
from ..layout import Layout
from ..tensor.replaced_functions import computes_on_dtensors
from .orders import Message, Route

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip
_HEADER = 16  # numbers: dtype, whether it was a DTensor, number of dimensions, the shape


@dataclass(frozen=True)
class Form:
    """What a process has to know of a tensor to receive it.

    Attributes:
        spread: it was a DTensor, replicated over the tensor-parallel processes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spread: bool

    @classmethod
    def of(cls, tensor: Tensor, spread: bool) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, spread)

    def encoded(self, device: torch.device) -> Tensor:
        """Return the form as numbers."""
        numbers = [_DTYPES.index(self.dtype), int(self.spread), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64, device=device)

    @classmethod
    def decoded(cls, header: Tensor) -> Form:
        """Return the form that ``encoded`` gave."""
        dtype, spread, dimensions, *shape = header.tolist()
        return cls(tuple(shape[:dimensions]), _DTYPES[dtype], bool(spread))


class Transfers:
    """Point-to-point messages along the pipeline axis, in an order that both ends know.

    Every direction has a process group of its own: messages of one back-end queue are received in the order in which they
    were sent, whatever the processes compute between.

    Args:
        layout: the mesh; a collective.
        axis: the name of the pipeline axis.
        device: of the tensors.
    """

    def __init__(self, layout: Layout, axis: str, device: torch.device) -> None:
        self.device = device
        mesh = layout.over(axis)
        self._ranks = dist.get_process_group_ranks(mesh.get_group())
        self._all = mesh.get_group()
        self.index, self.size = layout.index[axis], layout.sizes[axis]
        self._groups = {
            (kind, down): group_with_this_process(layout.lines(axis))
            for kind in ("act", "grad")
            for down in (False, True)
        }
        self._forms: dict[tuple[int, Hashable], Form] = {}  # by boundary (its later stage) and kind of batch
        self._local: dict[Message, Tensor] = {}
        self._sending: dict[Message, list[tuple[Any, Tensor]]] = {}
        self._route = Route((), {}, {})
        self._expected: dict[tuple[str, int], deque[Message]] = {}
        self._arriving: dict[Message, tuple[Any, Tensor]] = {}
        self._keys: Sequence[Hashable] = ()
        self._told: set[Any] = set()  # (boundary, process) that know a form

    def begin(self, route: Route, keys: Sequence[Hashable]) -> None:
        """Expect the messages of a window.

        Args:
            route: all of them.
            keys: for every micro-batch, what the shapes at the boundaries depend on.
        """
        self.finish()
        self._route, self._keys = route, keys
        self._expected = {line: deque(messages) for line, messages in route.expected.items()}

    def send(self, message: Message, tensor: Tensor, spread: bool = False) -> None:
        """Send a tensor to the process of a stage; the memory must not change until it has arrived, or ``finish``.

        Raises:
            StrategyError: the shape differs from that of an earlier batch of the same kind.
        """
        kind, stage, i = message
        target = self._route.process_of[stage]
        form = Form.of(tensor, spread)
        boundary = (stage if kind == "act" else stage + 1, self._keys[i])
        known = self._forms.setdefault(boundary, form)
        if known.shape != form.shape or known.dtype != form.dtype:
            raise StrategyError(
                f"model: layers gave {tuple(form.shape)} ({form.dtype}) between stages {boundary[0] - 1} and {boundary[0]}, and "
                f"{known.shape} ({known.dtype}) for an earlier batch of the same shapes; a pipeline needs the same"
            )
        if target == self.index:
            self._local[message] = tensor
            return
        group = self._group(kind, self.index, target)
        if kind == "act" and (boundary, target) not in self._told:
            self._told.add((boundary, target))
            self._start(message, form.encoded(self.device), target, group)
        self._start(message, tensor.contiguous(), target, group)

    def receive(self, message: Message, like: Callable[[], Tensor] | None = None) -> tuple[Tensor, Form]:
        """Return a tensor and its form.

        Args:
            like: returns a tensor of its shape and dtype, for a rehearsal, in which nobody says which they are.
        """
        kind, stage, i = message
        boundary = (stage if kind == "act" else stage + 1, self._keys[i])
        if message in self._local:
            return self._local.pop(message), self._forms[boundary]
        source = self._route.process_of[stage - 1 if kind == "act" else stage + 1]
        waiting = self._expected[kind, source]
        while message not in self._arriving:
            self._post(waiting.popleft(), source, like)
        work, tensor = self._arriving.pop(message)
        work.wait()
        for arrived in self._route.arrived.get(message, ()):
            self._release(arrived)
        return tensor, self._forms[boundary]

    def _release(self, message: Message) -> None:
        """Let go of what was sent and has arrived; Gloo does not say so of itself, and a window may be long."""
        for work, _ in self._sending.pop(message, ()):
            work.wait()

    def _post(self, message: Message, source: int, like: Callable[[], Tensor] | None = None) -> None:
        kind, stage, i = message
        boundary = (stage if kind == "act" else stage + 1, self._keys[i])
        group = self._group(kind, source, self.index)
        if boundary not in self._forms:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
            dist.recv(header, self._ranks[source], group=group)
            if like is not None and rehearsing():
                self._forms[boundary] = Form.of(like(), computes_on_dtensors())
            else:
                self._forms[boundary] = Form.decoded(header)
        form = self._forms[boundary]
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        self._arriving[message] = dist.irecv(tensor, self._ranks[source], group=group), tensor

    def expect(self, message: Message) -> None:
        """Begin to receive a message that is needed soon, if its shape is known."""
        kind, stage, i = message
        boundary = (stage if kind == "act" else stage + 1, self._keys[i])
        source = self._route.process_of[stage - 1 if kind == "act" else stage + 1]
        if source == self.index or message in self._arriving or boundary not in self._forms:
            return
        waiting = self._expected[kind, source]
        if waiting and waiting[0] == message:
            self._post(waiting.popleft(), source)

    def finish(self) -> None:
        """Wait until everything has been sent, and drop what is left of an interrupted window."""
        for message in [*self._sending]:
            self._release(message)
        self._local, self._arriving = {}, {}

    def share(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor with that of a process of the axis."""
        dist.broadcast(tensor, self._ranks[source], group=self._all)

    def share_object(self, value: Any, source: int) -> Any:
        """Return the value of a process of the axis."""
        if rehearsing():
            return value
        box = [value]
        dist.broadcast_object_list(box, self._ranks[source], group=self._all)
        return box[0]

    def _start(self, message: Message, tensor: Tensor, target: int, group: Any) -> None:
        self._sending = {
            message: works
            for message, works in self._sending.items()
            if not all(work.is_completed() for work, _ in works)
        }
        work = dist.isend(tensor, self._ranks[target], group=group)
        self._sending.setdefault(message, []).append((work, tensor))

    def _group(self, kind: str, source: int, target: int) -> Any:
        return self._groups[kind, source < target]
