"""Engine: runs the stages of a process in the order of a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from ....core.dtensor_private import settle_root
from ....core.random_state import kept_random_state
from ....core.torch_private import backward_of_input
from ...steps import EvalStep, TrainStep
from .orders import SCHEDULES, Action, Route, awaited, orders_of, route_of
from .rehearsal import signature_of
from .stages import Leaving, Left, StageRun
from .transfers import Transfers

_logger = logging.getLogger("flextrain")


class Engine:
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
        self._root: FSDPModule | None = None
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
            self._root = cast(FSDPModule, model)
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
        if forward.input is None:  # the first stage has nothing to send, its weights can wait
            forward.weights = partial(torch.autograd.backward, [forward.output], [grad])
        elif forward.output.requires_grad:
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
        values = torch.stack([logs.get(name, missing).detach().to(dtype) for name in names])
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
