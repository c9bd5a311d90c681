"""Adapters of optimizers that look at whole matrices or parameters, of which processes have shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.base.errors import StrategyError
from .adapters import NOTHING, OF_OTHERS, OptimizerAdapter
from .matrices import STRUCTURE
from .owners import Chunk, Matrix, OwnerExchange, Plans, device_of, exchanges, is_shard, own_gradient, own_tensor

# Muon, whose other optimizer steps as it would alone.


class MuonAdapter(OptimizerAdapter):
    """Checkpoints name the optimizer of each parameter, so that the parameters of the others are as without Muon."""

    def __init__(self, optimizer: Any, where: str) -> None:
        super().__init__(optimizer, where)
        self._muon = optimizer
        self._others = (
            None if optimizer.others is None else OptimizerAdapter(optimizer.others, f"{where}.optimizer.others")
        )

    @property
    def takes_shards(self) -> bool:
        """See OptimizerAdapter."""
        return self._others is None or self._others.takes_shards

    def looks_at_whole(self, group: Mapping[str, Any]) -> bool:
        """See OptimizerAdapter."""
        return not group.get(OF_OTHERS)

    def optimizer_of(self, group: Mapping[str, Any]) -> Optimizer:
        """See OptimizerAdapter."""
        others = self._muon.others
        return others if others is not None and group.get(OF_OTHERS) else self.optimizer

    def stepping(self) -> AbstractContextManager[None]:
        """See OptimizerAdapter."""
        return NOTHING if self._others is None else self._others.stepping()

    @contextmanager
    def only(self, group: dict[str, Any]) -> Iterator[None]:
        """See OptimizerAdapter."""
        try:
            with super().only(group):
                self._muon.join()
                yield
        finally:
            self._muon.join()

    def hyper_parameters_of(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See OptimizerAdapter."""
        return {key: value for key, value in group.items() if key not in STRUCTURE}


# Optimizers of users that look at whole parameters: each that is sharded is updated by its owner.


_BUCKET_BYTES = 256 * 2**20
"""About how much memory the whole parameters and gradients of others take on a process at a time."""


class WholeAdapter(OptimizerAdapter):
    """Adapter of optimizers whose class declares ``owns_whole = True``, as Shampoo and SOAP may.

    The owner of a sharded parameter gets it whole, with its gradient, steps, and returns the new values. It alone has the state, which is as
    on one device, in checkpoints too. In an update ``step()`` is called several times, each time with some of the parameters, or
    none: what it keeps from update to update has to be in the state of parameters, or in values of groups that depend on none.
    """

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        super().__init__(optimizer, where)
        self._plans = Plans()

    @property
    def takes_shards(self) -> bool:
        """See OptimizerAdapter."""
        return True

    def looks_at_whole(self, group: Mapping[str, Any]) -> bool:
        """See OptimizerAdapter."""
        return True

    @property
    def steps_in_parts(self) -> bool:
        """See OptimizerAdapter."""
        return bool(self._plan())

    def check(self, model: nn.Module) -> None:
        """See OptimizerAdapter."""
        if self.steps_in_parts and (inner := [*self._inner()]):
            raise StrategyError(
                f"{self.where}.optimizer: {type(self.optimizer).__name__} has an optimizer of its own in {inner[0]}, whose state stays "
                'apart from the parameters that their owners get whole; keep all in one state, or choose strategy="ddp"'
            )

    def keeps_state_of(self, parameter: Tensor) -> bool:
        """See OptimizerAdapter."""
        self._plan()
        return not is_shard(parameter) or id(parameter) in self._plans.owned

    def empty_state(self, parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """See OptimizerAdapter."""
        return torch.empty(tuple(shape), dtype=dtype) if is_shard(parameter) else None

    def load(self, packed: dict[str, Any]) -> None:
        """See OptimizerAdapter; state of parameters with other owners is left out."""
        groups = zip(self.optimizer.param_groups, packed["param_groups"], strict=True)
        numbers = [pair for own, saved in groups for pair in zip(own["params"], saved["params"], strict=True)]
        kept = {number for parameter, number in numbers if self.keeps_state_of(parameter)}
        state = {number: values for number, values in packed["state"].items() if number in kept}
        super().load({**packed, "state": state})
        for parameter, values in self.optimizer.state.items():
            if is_shard(parameter):
                values.update(self.state_at_owner(parameter, values))

    def state_at_owner(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """See OptimizerAdapter."""
        device = device_of(parameter)
        return {k: v.to(device) if isinstance(v, Tensor) and v.ndim else v for k, v in state.items()}

    @contextmanager
    def _by_owners(self) -> Iterator[None]:
        """Context in which ``optimizer.step()`` is a step of every parameter by its owner."""
        optimizer: Any = self.optimizer
        step, own = optimizer.step, vars(optimizer).get("step")
        optimizer.step = lambda *args, **kwargs: self._step(lambda: step(*args, **kwargs))
        try:
            yield
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own

    def stepping(self) -> AbstractContextManager[None]:
        """See OptimizerAdapter."""
        return self._by_owners() if self.steps_in_parts else NOTHING

    def _plan(self) -> list[OwnerExchange]:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

        def plan() -> list[OwnerExchange]:
            wholes = [Matrix(p, tuple((0, size) for size in p.shape)) for p in parameters if is_shard(p)]
            return exchanges(wholes, lambda matrix: matrix.parameter.dtype, _BUCKET_BYTES, given=2)

        return self._plans.of(parameters, plan)

    @torch.no_grad()
    def _step(self, step: Callable[[], Any]) -> None:
        groups = self.optimizer.param_groups
        members, begin = [group["params"] for group in groups], [*map(settings_now, groups)]
        trained = {id(p) for own in members for p in own if is_shard(p) and p.grad is not None}

        def give(matrix: Matrix, chunk: Chunk) -> list[Tensor]:
            return [chunk.of(own_tensor(matrix.parameter)), chunk.of(own_gradient(matrix.parameter))]

        def compute(found: list[tuple[Matrix, list[Tensor]]]) -> list[Tensor]:
            wholes = {id(matrix.parameter): _with_gradient(*given) for matrix, given in found}
            if wholes:
                step_with(lambda parameter: wholes.get(id(parameter)))
            return [wholes[id(matrix.parameter)].detach() for matrix, _ in found]

        def take(matrix: Matrix, chunk: Chunk, values: Tensor) -> None:
            chunk.of(own_tensor(matrix.parameter)).copy_(values)

        def step_with(stand_in: Callable[[Tensor], Tensor | None]) -> None:
            """Step the parameters that have a stand-in, each by it; groups begin each time as before the update."""
            state = self.optimizer.state
            pairs = [(p, own) for parameters in members for p in parameters if (own := stand_in(p)) is not None]
            for group, parameters, begin_anew in zip(groups, members, begin, strict=True):
                begin_anew()
                group["params"] = [own for p in parameters if (own := stand_in(p)) is not None]
            self.optimizer.state = defaultdict(dict, {own: state[p] for p, own in pairs if p in state})
            try:
                with torch.enable_grad():
                    step()
            finally:
                state.update({p: self.optimizer.state[own] for p, own in pairs if self.optimizer.state.get(own)})
                self.optimizer.state = state
                for group, parameters in zip(groups, members, strict=True):
                    group["params"] = parameters

        for exchange in self._plan():
            exchange.run(lambda matrix: id(matrix.parameter) in trained, give, compute, take)
        # On every process, so that what groups count is the same on all.
        step_with(lambda parameter: None if is_shard(parameter) else parameter)


def settings_now(group: dict[str, Any]) -> Callable[[], None]:
    """Return a function that gives a group the settings that it has now, and no parameters: tensors also their values."""
    before = {key: value for key, value in group.items() if key != "params"}
    values = {key: value.clone() for key, value in before.items() if isinstance(value, Tensor)}

    def begin_anew() -> None:
        group.clear()
        group.update(before)
        for key, value in values.items():
            before[key].copy_(value)

    return begin_anew


def _with_gradient(values: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values.detach())
    parameter.grad = gradient
    return parameter
