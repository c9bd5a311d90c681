"""Updates of DTensors by an elementwise optimizer, computed on what each process holds of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.torch_compat.dtensor_private import laid_out_as, local_part, local_tensor

# State of torch's optimizers that is one number per parameter; all other tensors have the parameter's shape.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


class LocalShards:
    """The parameters of an optimizer as ordinary tensors, for the time of a step.

    DTensor's dispatch takes several times as long as the arithmetic of small parameters, and one foreach or fused call cannot
    take DTensors beside ordinary tensors. Values and state stay where they are: shard and DTensor share their memory.

    Args:
        optimizer: a built optimizer that updates every element of a parameter independently.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Tensor, _Shard] = {}
        self._inner: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for ``optimizer.step()``: groups and state have ordinary tensors, and are as before after it."""
        groups, state, inner = self._optimizer.param_groups, self._optimizer.state, self._inner
        whole = [group["params"] for group in groups]
        shards: list[_Shard] = []
        ordinary: list[Tensor] = []
        known = self._known
        # Once for every parameter and update: what can be compared is not called.
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = own = []
            for parameter in parameters:
                given = state.get(parameter)
                if not isinstance(parameter, DTensor):
                    ordinary.append(parameter)
                    own.append(parameter)
                    inner[parameter] = given or {}
                    continue
                shard = known.get(parameter)
                if shard is None or shard.tensor is not local_tensor(parameter):
                    shard = self._shard(parameter)
                if (grad := parameter.grad) is not None:
                    shard.local.grad = local_part(grad, parameter)
                if given is not shard.given or (given is not None and [*map(id, given.values())] != shard.ids):
                    shard.follow(given, inner)
                shards.append(shard)
                own.append(shard.local)
        self._optimizer.state = inner
        try:
            yield
        finally:
            self._optimizer.state = state
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            state.update((one, inner[one]) for one in ordinary if inner.get(one))
            for shard in shards:
                local = shard.local
                local.grad = None
                found = inner.get(local)
                if found and [*map(id, found.values())] != shard.local_ids:
                    shard.keep(found, state[shard.parameter])

    def _shard(self, parameter: DTensor) -> _Shard:
        if parameter in self._known:
            self._inner.pop(self._known[parameter].local, None)
        self._known[parameter] = shard = _Shard(parameter, local_tensor(parameter))
        return shard


class _Shard:
    """What this process has of a parameter and of its state.

    Attributes:
        given: the parameter's state as it was after the last step, None if it had none.
        ids, local_ids: of the values in it, and of those that the step has.
    """

    __slots__ = ("_values", "given", "ids", "local", "local_ids", "parameter", "tensor")

    def __init__(self, parameter: DTensor, tensor: Tensor) -> None:
        self.parameter, self.tensor = parameter, tensor
        self.local = nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
        self.given: dict[str, Any] | None = None
        self._values: list[Any] = []  # kept, so that no other has their ids
        self.ids: list[int] = []
        self.local_ids: list[int] = []

    def follow(self, state: dict[str, Any] | None, inner: dict[Tensor, dict[str, Any]]) -> None:
        """Give the step the parameter's state with ordinary tensors."""
        if state is None:
            inner.pop(self.local, None)
            self._note(None, {})
            return
        inner[self.local] = {
            key: local_tensor(value) if isinstance(value, DTensor) else value for key, value in state.items()
        }
        self._note(state, inner[self.local])

    def _note(self, state: dict[str, Any] | None, local: dict[str, Any]) -> None:
        values = [] if state is None else [*state.values()]
        self.given, self._values = state, [*values, *local.values()]
        self.ids, self.local_ids = [*map(id, values)], [*map(id, local.values())]

    def keep(self, found: dict[str, Any], state: dict[str, Any]) -> None:
        """Take over the state that a step has made or replaced; the rest was updated where it lies."""
        for key, value in found.items():
            known = state.get(key)
            if value is not (local_tensor(known) if isinstance(known, DTensor) else known):
                is_shard = isinstance(value, Tensor) and key not in _SCALARS
                state[key] = laid_out_as(self.parameter, value) if is_shard else value
        self._note(state, found)
