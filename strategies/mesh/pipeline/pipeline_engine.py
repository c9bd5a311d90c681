"""PipelineEngine: runs the stages of a process in the order of a schedule."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from ....core.base.errors import StrategyError
from ....core.comm.collectives import as_sent, broadcast_object, group_with_this_process
from ....core.random.generators import kept_random_state
from ....core.torch_compat.backward_private import backward_of_input
from ....core.torch_compat.dtensor_private import settle_root
from ....core.torch_compat.torch_private import has_values
from ...base import EvalStep, TrainStep
from ..axis import Layout
from ..tensor.operations import computes_on_dtensors
from .orders import SCHEDULES, Action, Message, Route, awaited, orders_of, route_of
from .rehearsal import signature_of
from .stages import Leaving, Left, StageRun

# Steps that hand the micro-batches of a window to the pipeline, within the contexts of the other axes.


class CollectedWindow:
    """A TrainStep whose ``run`` collects micro-batches, and runs all of them with the last.

    Args:
        step: that of the training loop.
        size: number of micro-batches.
        run_all: runs the window, and returns its values to log.
    """

    def __init__(
        self, step: TrainStep, size: int, run_all: Callable[[Sequence[Any], TrainStep], dict[str, Tensor]]
    ) -> None:
        self._step, self._size, self._run_all = step, size, run_all
        self._window: list[Any] = []
        self.shares = step.shares

    def begin(self, index: int) -> bool:
        """See TrainStep; the pipeline decides itself when gradients are reduced."""
        return True

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """See TrainStep."""
        self._window.append(batch)
        return self._run_all(self._window, self._step) if len(self._window) == self._size else {}

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """See TrainStep."""
        return parts[-1]

    def prepare(self, batch: Any) -> Any:
        """See TrainStep."""
        return self._step.prepare(batch)

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See TrainStep."""
        return self._step.forward(batch)

    def backward(self, loss: Tensor, index: int) -> None:
        """See TrainStep."""
        self._step.backward(loss, index)


class CollectedBatch:
    """An EvalStep whose ``predict`` sends a batch through the pipeline.

    Args:
        step: that of the evaluation loop.
        run: evaluates a batch.
    """

    def __init__(self, step: EvalStep, run: Callable[[Any, EvalStep], Any]) -> None:
        self._step, self._run, self.mode = step, run, step.mode

    def prepare(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._step.prepare(batch)

    def predict(self, batch: Any) -> Any:
        """See EvalStep."""
        return self._run(batch, self._step)


# Transfers: sends activations and their gradients between the processes of a pipeline.


_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
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


_BLOCKS = 4
"""Thread blocks of a message between stages; NCCL's own choice may be 32, of a GPU's hundred."""


def _on_wire(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as every back end sends it from one process to another."""
    return as_sent(tensor.view(-1))


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
            (kind, down): group_with_this_process(layout.lines(axis), most_blocks=_BLOCKS)
            for kind in ("act", "grad")
            for down in (False, True)
        }
        self._forms: dict[tuple[int, Hashable], Form] = {}  # by boundary (its later stage) and kind of batch
        self._local: dict[Message, Tensor] = {}
        self._sending: dict[Message, list[tuple[Any, Tensor]]] = {}
        self._route = Route((), {}, {}, ())
        self._connected: set[tuple[str, int, int]] = set()
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
        self._connect(route.lines)
        self._route, self._keys = route, keys
        self._expected = {line: deque(messages) for line, messages in route.expected.items()}

    def _connect(self, lines: Sequence[tuple[str, int, int]]) -> None:
        """Send a first message over each line, in the same order on all processes.

        NCCL makes the communicator of two processes at their first message, and both wait for each other on the host. A process
        that posts a receive ahead of time would wait there for one that needs what it has yet to compute.
        """
        for line in lines:
            if line in self._connected:
                continue
            kind, source, target = line
            word, group = torch.zeros(1, device=self.device), self._group(kind, source, target)
            if self.index == source:
                dist.send(word, self._ranks[target], group=group)
            elif self.index == target:
                dist.recv(word, self._ranks[source], group=group)
            self._connected.add(line)

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
        self._start(message, _on_wire(tensor.contiguous().resolve_conj().resolve_neg()), target, group)

    def receive(self, message: Message, like: Callable[[], Tensor] | None = None) -> tuple[Tensor, Form]:
        """Return a tensor and its form.

        Args:
            like: returns a tensor of its shape and dtype; asked where what is received has no values, and so does not say it.
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
            if like is not None and not has_values(header):
                self._forms[boundary] = Form.of(like(), computes_on_dtensors())
            else:
                self._forms[boundary] = Form.decoded(header)
        form = self._forms[boundary]
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        self._arriving[message] = dist.irecv(_on_wire(tensor), self._ranks[source], group=group), tensor

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
        return broadcast_object(value, self._ranks[source], self._all)

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


_logger = logging.getLogger("flextrain")


class PipelineEngine:
    """Runs forwards and backwards of this process's stages, and sends what goes to others.

    Args:
        run: the model and its stages.
        schedule: name of the schedule.
        transfers: to the other processes.
        processes: along the pipeline.
        each: stages of every process.
        reduces_always: reduce gradients after every micro-batch.
        tensor_mesh: of the tensor-parallel processes; None if there are none.
    """

    def __init__(
        self,
        run: StageRun,
        schedule: str,
        transfers: Transfers,
        processes: int,
        each: int,
        *,
        reduces_always: bool,
        tensor_mesh: DeviceMesh | None,
    ) -> None:
        self._run, self._schedule, self._transfers = run, schedule, transfers
        self._processes, self._each, self.count = processes, each, processes * each
        kind = SCHEDULES[schedule]
        self._process_of = [kind.process_of(stage, processes) for stage in range(self.count)]
        self._splits = kind.splits_backward
        self._last_process = self._process_of[-1]
        self._order = lru_cache(maxsize=64)(self._make_order)
        self._evaluation = self._evaluation_route()
        self._root: Any = None  # the FSDPModule; some of its methods are those of torch 2.15
        self._reduces_always = reduces_always
        self._tensor_mesh = tensor_mesh
        self._names: dict[Hashable, tuple[list[str], torch.dtype]] = {}  # by the structure of batches
        self._complained: set[str] = set()
        self._once = 0
        self._model: nn.Module | None = None

    @property
    def stage(self) -> int | None:
        """The stage under way; None between the stages."""
        return self._run.current

    def finish(self, model: nn.Module) -> None:
        """Register what has to be after everything else on the wrapped model."""
        model.register_forward_hook(self._run.leave)
        self._model = model
        if isinstance(model, FSDPModule):
            self._root = model
            if self._splits:
                # Gradients of weights are computed after FSDP has seen the end of backward, from gathered parameters.
                self._root.set_manual_backward_finalization(True)
                self._root.set_reshard_after_forward(False)
            settle_root(model)  # now, because a forward of a stage does not see the modules of others

    def _make_order(self, size: int) -> tuple[list[Action], Route]:
        """Return what this process does in a window of ``size`` micro-batches, and its messages."""
        orders = orders_of(self._schedule, self._processes, self._each, size)
        own = self._transfers.index
        return orders[own], route_of(orders, self._process_of, own)

    def _evaluation_route(self) -> Route:
        orders = [
            [Action("F", stage, 0) for stage, process in enumerate(self._process_of) if process == rank]
            for rank in range(self._processes)
        ]
        return route_of(orders, self._process_of, self._transfers.index)

    # Training

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        """Run forward and backward of all micro-batches; return the values to log, on every process."""
        size = len(window)
        own, route = self._order(size)
        keys = [self._key(batch) for batch in window]
        self._transfers.begin(route, keys)
        self._run.streams.begin_window()
        forwards: dict[tuple[int, int], _Forward] = {}
        logs: list[dict[str, Tensor]] = [{} for _ in window]
        begun: set[int] = set()
        last_backward = max(n for n, action in enumerate(own) if action.kind != "F")
        self._reduce(self._reduces_always)
        try:
            for n, action in enumerate(own):
                kind, stage, i = action
                for near in own[n : n + 2]:
                    if (message := awaited(near, self.count)) is not None:
                        self._transfers.expect(message)
                if kind == "F":
                    if i not in begun:
                        begun.add(i)
                        step.begin(i)
                    forwards[stage, i] = self._forward(stage, i, window[i], step, logs)
                    continue
                if n == last_backward and not self._splits:
                    self._reduce(True)
                if kind == "B":
                    self._backward(stage, i, forwards.pop((stage, i)), step)
                elif kind == "I":
                    self._backward_input(stage, i, forwards[stage, i], step)
                else:
                    forwards.pop((stage, i)).weights()
        finally:
            self._reduce(True)
        if self._splits and self._root is not None:
            self._root.finalize_backward()
        self._transfers.finish()
        own_logs = step.mean(logs) if self._last_process == self._transfers.index else {}
        return self._shared(own_logs, keys)

    def _forward(self, stage: int, i: int, batch: Any, step: TrainStep, logs: list[dict[str, Tensor]]) -> _Forward:
        forward = _Forward()
        found = self._run.run(stage, i, partial(self._receive, stage, i, forward), lambda: step.forward(batch))
        if isinstance(found, Left):
            self._transfers.send(("act", stage + 1, i), found.value.detach(), found.spread)
            forward.output = found.value
        else:
            forward.output, logs[i] = found
        return forward

    def _backward(self, stage: int, i: int, forward: _Forward, step: TrainStep) -> None:
        if stage + 1 == self.count:
            step.backward(forward.output, i)
        else:
            grad, _ = self._transfers.receive(("grad", stage, i))
            if forward.output.requires_grad:
                torch.autograd.backward([forward.output], [grad])
        self._send_gradient(stage, i, forward)

    def _send_gradient(self, stage: int, i: int, forward: _Forward) -> None:
        if forward.input is not None:
            grad, forward.input.grad = forward.input.grad, None
            self._transfers.send(("grad", stage - 1, i), torch.zeros_like(forward.input) if grad is None else grad)

    def _backward_input(self, stage: int, i: int, forward: _Forward, step: TrainStep) -> None:
        """Compute the gradient of the stage's input; keep what the gradients of weights need."""
        assert self._model is not None
        if stage + 1 == self.count:
            if step.shares[i] == 0.0:  # gradients of zero are made with special care, see OptimWrapper
                self._backward(stage, i, forward, step)
                forward.weights = _nothing
                return
            loss: Tensor = forward.output.detach().requires_grad_()  # its gradient is the factor with which it counts
            step.backward(loss, i)
            assert loss.grad is not None
            grad = loss.grad
        else:
            grad, _ = self._transfers.receive(("grad", stage, i))
        if forward.output.requires_grad:  # not if nothing of the first stage is trained
            if forward.input is None:  # the first stage has nothing to send, its weights can wait
                forward.weights = partial(torch.autograd.backward, [forward.output], [grad])
            else:
                forward.weights = backward_of_input(forward.output, grad, forward.input, self._model)
        self._send_gradient(stage, i, forward)

    def _receive(self, stage: int, i: int, forward: _Forward | None, like: Callable[[], Tensor]) -> Tensor:
        """Return the input of a stage; its gradient will be in ``forward.input``."""
        tensor, form = self._transfers.receive(("act", stage, i), like)
        leaf = tensor.detach()
        if forward is not None:
            forward.input = leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        if not form.spread:
            return leaf
        assert self._tensor_mesh is not None
        return cast(Tensor, DTensor.from_local(leaf, self._tensor_mesh, (Replicate(),), run_check=False))

    def _reduce(self, enabled: bool) -> None:
        """Let the next backward reduce gradients, or keep them, and the gathered parameters, for a later one."""
        if self._root is not None:
            self._root.set_requires_gradient_sync(enabled)
            self._root.set_reshard_after_backward(enabled)

    def rehearse(self, batch: Any, step: TrainStep) -> None:
        """Rehearse the forward of a batch, so that a model that cannot be cut is refused before its first update."""
        run = self._run
        run.only_plans = True
        try:
            with run.stage(run.own[0], lambda like: like()), kept_random_state(self._transfers.device):
                step.forward(batch)
        except Leaving:
            pass
        finally:
            run.only_plans = False
            if self._root is not None:
                self._root.reshard()

    # Evaluation

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """Return the predictions for a batch; None on a process without the last stage."""
        own = [Action("F", stage, 0) for stage in self._run.own]
        self._transfers.begin(self._evaluation, [self._key(batch)])
        self._run.streams.begin_window()
        found: Any = None
        for _, stage, i in own:
            found = self._run.run(stage, i, partial(self._receive, stage, i, None), lambda: step.predict(batch))
            if isinstance(found, Left):
                self._transfers.send(("act", stage + 1, i), found.value.detach(), found.spread)
                found = None
        return found

    # What all processes have to know

    def _key(self, batch: Any) -> Hashable:
        assert self._model is not None
        signature = signature_of(batch, self._model.training, torch.is_grad_enabled())
        if signature is None:  # holds something whose shapes are unknown, so that every batch is another one
            self._once += 1
            return self._once
        return signature

    def _shared(self, logs: dict[str, Tensor], keys: Sequence[Hashable]) -> dict[str, Tensor]:
        """Return the last stage's values to log on every process: those of the first window with batches of this structure.

        Another name, which only the last stage knows of, is left out, and a missing one is NaN, each with a line in the log.
        """
        structure = frozenset(key[1] if isinstance(key, tuple) else None for key in keys)
        if structure not in self._names:
            dtype = torch.float32
            for value in logs.values():
                dtype = torch.promote_types(dtype, value.dtype)
            self._names[structure] = self._transfers.share_object((list(logs) or ["loss"], dtype), self._last_process)
        names, dtype = self._names[structure]
        if self._last_process == self._transfers.index and logs.keys() != set(names):
            self._complain(logs.keys() - set(names), "was not there in the first window, it is left out")
            self._complain(
                set(names) - logs.keys(), "was there in the first window and is missing now, NaN takes its place"
            )
        missing = torch.full((), torch.nan, dtype=dtype, device=self._transfers.device)
        values = torch.stack([logs.get(name, missing).detach().to(missing) for name in names])
        self._transfers.share(values, self._last_process)
        return dict(zip(names, values.unbind(), strict=True))

    def _complain(self, names: set[str], what: str) -> None:
        for name in sorted(names - self._complained):
            self._complained.add(name)
            # An error, because processes other than rank 0 show no warnings.
            _logger.error(
                f"model: {name}, a value to log, {what}; with strategy.pp, return it for every batch, such as 0"
            )


def _nothing() -> None:
    pass


@dataclass
class _Forward:
    """What backward needs of a forward.

    Attributes:
        input: the leaf that the stage before has sent; None for the first stage.
        output: what the stage gave, or the loss.
        weights: computes the gradients of weights, after the one of the input was computed.
    """

    input: Tensor | None = None
    output: Tensor = field(default_factory=lambda: torch.zeros(()))
    weights: Callable[[], Any] = _nothing
