"""Updates of DTensors by an elementwise optimizer, computed on what each process holds of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, SparseAdam

from ..core.torch_compat.dtensor_private import hand_gradients, laid_out_as, local_tensor, local_tensors
from ..core.torch_compat.torch_private import has_step_hooks, without_function_modes
from .gradients import gradients

# State of torch's optimizers that is one number per parameter; all other tensors have the parameter's shape.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


class LocalShards:
    """The parameters of an optimizer as ordinary tensors, for the time of a step.

    DTensor's dispatch takes several times as long as the arithmetic of small parameters, and one foreach or fused call cannot
    take DTensors beside ordinary tensors. Values and state stay where they are: shard and DTensor share their memory. A step compares
    what it knows with what is there, object by object and without a call for each, and looks closer where something is new.

    Args:
        optimizer: a built optimizer.
        is_elementwise: whether it is torch's own, and updates every element of a parameter independently. Others, and those whose
            hooks look at parameters, step the DTensors.
    """

    def __init__(self, optimizer: Optimizer, is_elementwise: bool) -> None:
        self._optimizer = optimizer
        # SparseAdam's gradients have no layout as DTensors.
        self._is_able = is_elementwise and not isinstance(optimizer, SparseAdam)
        self._known: dict[Tensor, _Shard] = {}
        self._inner: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._own: list[list[Tensor]] = []  # by group, what the step has
        self._shards: list[_Shard] = []
        self._sharded: list[DTensor] = []
        self._locals: list[Tensor] = []
        self._ordinary: list[Tensor] = []
        self._sizes: list[int] = []
        self._seen: list[Any] = []
        self._seen_inside: list[Any] = []

    def step(self) -> AbstractContextManager[None]:
        """Context for ``optimizer.step()``; what it gets of a gradient is laid out as the parameter."""
        if self._is_able and not has_step_hooks(self._optimizer):
            return self._step()
        gradients(self._optimizer.param_groups)
        return nullcontext()

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Context in which groups and state have ordinary tensors; they are as before after it."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        whole = [group["params"] for group in groups]
        if [*map(len, whole)] != self._sizes or not _same(self._there(whole, state), self._seen):
            self._follow(whole, state)
        for group, own in zip(groups, self._own, strict=True):
            group["params"] = own
        with without_function_modes():  # reading a gradient of a DTensor takes half as long
            hand_gradients(self._sharded, self._locals)
        self._optimizer.state = self._inner
        try:
            yield
        finally:
            self._optimizer.state = state
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            for local in self._locals:
                local.grad = None
            if not _same(_values(self._inner), self._seen_inside):
                self._keep(whole, state)

    def _there(self, whole: Sequence[Sequence[Tensor]], state: dict[Tensor, dict[str, Any]]) -> list[Any]:
        """The objects that the step depends on."""
        return [*chain.from_iterable(whole), *local_tensors(self._sharded), *_values(state)]

    def _follow(self, whole: Sequence[Sequence[Tensor]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Give the step what the groups and the state have."""
        inner = self._inner
        self._own, self._shards, self._ordinary = [], [], []
        for parameters in whole:
            own: list[Tensor] = []
            self._own.append(own)
            for parameter in parameters:
                given = state.get(parameter)
                if not isinstance(parameter, DTensor):
                    self._ordinary.append(parameter)
                    own.append(parameter)
                    inner[parameter] = given or {}
                    continue
                shard = self._known.get(parameter)
                if shard is None or shard.tensor is not local_tensor(parameter):
                    shard = self._shard(parameter)
                if given is not shard.given or (given is not None and [*map(id, given.values())] != shard.ids):
                    shard.follow(given, inner)
                self._shards.append(shard)
                own.append(shard.local)
        self._sharded = [shard.parameter for shard in self._shards]
        self._locals = [shard.local for shard in self._shards]
        self._note(whole, state)

    def _keep(self, whole: Sequence[Sequence[Tensor]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Take over what the step has made."""
        inner = self._inner
        state.update((one, inner[one]) for one in self._ordinary if inner.get(one))
        for shard in self._shards:
            found = inner.get(shard.local)
            if found and [*map(id, found.values())] != shard.local_ids:
                shard.keep(found, state[shard.parameter])
        self._note(whole, state)

    def _note(self, whole: Sequence[Sequence[Tensor]], state: dict[Tensor, dict[str, Any]]) -> None:
        self._sizes, self._seen = [*map(len, whole)], self._there(whole, state)
        self._seen_inside = _values(self._inner)

    def _shard(self, parameter: DTensor) -> _Shard:
        if parameter in self._known:
            self._inner.pop(self._known[parameter].local, None)
        self._known[parameter] = shard = _Shard(parameter, local_tensor(parameter))
        return shard


def _values(state: Mapping[Tensor, dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, state.values()))]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


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
