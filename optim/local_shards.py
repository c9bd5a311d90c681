"""Updates of DTensors by an elementwise optimizer, computed on what each process holds of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.torch_compat.dtensor_private import laid_out_as, local_tensor

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

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for ``optimizer.step()``: groups and state have ordinary tensors, and are as before after it."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        whole = [group["params"] for group in groups]
        inner: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        shards: list[_Shard] = []
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = own = []
            for parameter in parameters:
                if not isinstance(parameter, DTensor):
                    own.append(parameter)
                    if parameter in state:
                        inner[parameter] = state[parameter]
                    continue
                shard = self._shard(parameter)
                own.append(shard.local)
                if parameter in state:
                    inner[shard.local] = shard.local_state(state[parameter])
                shards.append(shard)
        self._optimizer.state = inner
        try:
            yield
        finally:
            self._optimizer.state = state
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
                state.update((own, inner[own]) for own in parameters if own in inner)
            for shard in shards:
                shard.local.grad = None
                if shard.local in inner:
                    shard.keep(inner[shard.local], state[shard.parameter])

    def _shard(self, parameter: DTensor) -> _Shard:
        tensor, grad = local_tensor(parameter), cast(DTensor | None, parameter.grad)
        shard = self._known.get(parameter)
        if shard is None or shard.tensor is not tensor:
            self._known[parameter] = shard = _Shard(parameter, tensor)
        if grad is not None:
            if grad.placements != parameter.placements:
                grad = grad.redistribute(parameter.device_mesh, parameter.placements)
            shard.local.grad = local_tensor(grad)
        return shard


class _Shard:
    """What this process has of a parameter and of its state."""

    def __init__(self, parameter: DTensor, tensor: Tensor) -> None:
        self.parameter, self.tensor = parameter, tensor
        self.local = nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
        self._given: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The parameter's state with ordinary tensors; the same dict as long as the state has the same tensors."""
        given = self._given
        if len(given) != len(state) or any(given.get(key) is not value for key, value in state.items()):
            self._given = dict(state)
            self._state = {
                key: local_tensor(value) if isinstance(value, DTensor) else value for key, value in state.items()
            }
        return self._state

    def keep(self, found: dict[str, Any], state: dict[str, Any]) -> None:
        """Take over the state that a step has made or replaced; the rest was updated where it lies."""
        for key, value in found.items():
            known = self._given.get(key)
            if value is not (local_tensor(known) if isinstance(known, DTensor) else known):
                is_shard = isinstance(value, Tensor) and key not in _SCALARS
                state[key] = laid_out_as(self.parameter, value) if is_shard else value
