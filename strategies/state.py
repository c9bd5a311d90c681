"""CanonicalState: the names and tensors that a strategy gives to checkpoints, and takes from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.errors import StrategyError
from ..core.module_state import tensor_names
from ..optim.canonical import GROUP, STATE, hyper_parameters, restored_hyper_parameters, split_key
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from .environment import ProcessEnvironment
from .names import Names

Optim = OptimWrapper | OptimWrapperDict


class CanonicalState(ProcessEnvironment):
    """The part of a strategy that names parameters, buffers and optimizer state as the user's model does.

    Args:
        options: the fields of this class's ``Config``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.optim: Optim | None = None
        self._model: nn.Module | None = None
        self._module: nn.Module | None = None
        self._names = Names(nn.Module())
        self._at_setup: frozenset[str] = frozenset()  # names of parameters and buffers when the model was set up

    @property
    def module(self) -> nn.Module:
        """The user's own module, unwrapped.

        Raises:
            StrategyError: before ``setup``.
        """
        if self._module is None:
            raise StrategyError(f"{type(self).__name__}: no model yet, call setup(model, optim) first")
        return self._module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process, by the names that checkpoints have: those in the model as it was built."""
        return self._names.parameters(self.module)

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters and of modules with extra state, on any process, to the one that is in use."""
        return self._names.aliases(self.module)

    def elsewhere(self) -> frozenset[str]:
        """Names of the model's parameters and persistent buffers that other processes hold, and this one does not."""
        return self._names.elsewhere(self.module)

    def keepers_elsewhere(self) -> frozenset[str]:
        """Names of the model's modules with extra state that other processes hold, and this one does not."""
        return self._names.keepers_elsewhere(self.module)

    def saves(self, name: str) -> bool:
        """Whether this process is the one whose copy counts: of a buffer, or of the extra state of a module.

        Each process may have its own of those. The first counts that has one.
        """
        return self._names.owner(name, self.module, self.rank) == self.rank

    def model_state(self) -> dict[str, Tensor]:
        """Every parameter (its float32 master where one exists) and persistent buffer of this process, live, by name.

        The name is the one in the user's model; a tied parameter has the first of its names. The value's type says how it
        lies: a plain tensor is whole on every process.
        """
        optim = self.optim
        state = {name: optim.master(p) if optim else p for name, p in self.named_parameters()}
        return {name: tensor.detach() for name, tensor in state.items()} | self._buffers()

    def appeared(self) -> tuple[list[str], list[str]]:
        """Names of the parameters, and of the persistent buffers, that the model has and had not when it was set up."""
        late = tensor_names(self.module) - self._at_setup if self._at_setup else frozenset()
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)} if late else set()
        return sorted(late & parameters), sorted(late - parameters)

    def left_out(self) -> frozenset[str]:
        """Names of the parameters that checkpoints lack and the model brings along: frozen ones, if they are excluded."""
        if not self.config.exclude_frozen_parameters:
            return frozenset()
        return frozenset(name for name, parameter in self.named_parameters() if not parameter.requires_grad)

    def _offered(self) -> dict[str, Tensor]:
        """``model.<name>`` for what a checkpoint gets from this process: all that it has, of buffers those that it saves."""
        skipped = self.left_out().union(
            name for name, buffer in self.module.named_buffers() if not self._offers(name, buffer)
        )
        return {f"model.{name}": tensor for name, tensor in self.model_state().items() if name not in skipped}

    def _offers(self, name: str, buffer: Tensor) -> bool:
        owner = self._names.owner(name, self.module, self.rank)
        # What several hold in parts comes from all that share it with the owner.
        return owner == self.rank or (isinstance(buffer, DTensor) and owner in buffer.device_mesh.mesh)

    def _buffers(self) -> dict[str, Tensor]:
        persistent = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}

    def state_dict(self) -> dict[str, Any]:
        """The canonical state: tensors without copying them, and plain values.

        - ``model.<name>``: parameters and persistent buffers, but for ``left_out()``;
        - ``optim.state.<name>.<key>``: what the optimizer keeps of a parameter, if it has created it;
        - ``optim.group.<name>.<key>``: the hyper-parameters in force for it, and its optimizer's class as ``optimizer``.

        Needs no communication. Each process gives what it has; several may give the same, which a checkpoint gets once.
        Buffers are those of the first process that has them, as in evaluation (see ``share_buffers``); other processes'
        running statistics, which may differ while training is under way, are not kept.
        """
        state: dict[str, Any] = dict(self._offered())
        for name, wrapper, parameter, group in self._optimized():
            for key, value in wrapper.adapter.state_of(parameter).items():
                state[f"{STATE}{name}.{key}"] = value
            state |= hyper_parameters(wrapper.adapter, group, name)
        return state

    def load_template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors to fill, in this strategy's layout, for what a checkpoint holds.

        Args:
            saved: key to something with ``shape`` and ``dtype`` for tensors, to the value itself for plain values.

        Returns:
            The model's own tensors, to be filled in place, and the optimizer's or, before its first update, new ones.
        """
        model = {f"model.{name}": tensor for name, tensor in self.model_state().items()}
        template = {key: tensor for key, tensor in model.items() if key in saved}
        optimized = {name: (wrapper, parameter) for name, wrapper, parameter, _ in self._optimized()}
        for key, info in saved.items():
            prefix, name, item = split_key(key)
            if prefix == STATE and name in optimized and hasattr(info, "shape"):
                wrapper, parameter = optimized[name]
                live = wrapper.adapter.state_of(parameter).get(item)
                if isinstance(live, Tensor) and (tuple(live.shape), live.dtype) == (tuple(info.shape), info.dtype):
                    template[key] = live
                else:
                    template[key] = self._state_like(wrapper, parameter, item, info)
        return template

    def _state_like(self, wrapper: OptimWrapper, parameter: Tensor, key: str, info: Any) -> Tensor:
        """An empty tensor for the state ``key`` of a parameter, of ``info.shape`` and ``info.dtype``, laid out like it."""
        if tuple(info.shape) == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)
        return torch.empty(info.shape, dtype=info.dtype)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopt a filled template together with the plain values; keys that are not there leave things as they are.

        Raises:
            CheckpointError: the state is of another class of optimizer.
        """
        for wrapper in self.optim.wrappers.values() if self.optim else ():
            wrapper.refresh()
        if not any(key.startswith("optim.") for key in state):
            return
        by_name: dict[str, dict[str, dict[str, Any]]] = {STATE: {}, GROUP: {}}
        for key, value in state.items():
            prefix, name, item = split_key(key)
            if prefix:
                by_name[prefix].setdefault(name, {})[item] = value
        for wrapper in self.optim.wrappers.values() if self.optim else ():
            self._load_optimizer(wrapper, by_name[STATE], by_name[GROUP])

    def _load_optimizer(
        self, wrapper: OptimWrapper, states: dict[str, dict[str, Any]], hyper: dict[str, dict[str, Any]]
    ) -> None:
        names = {id(parameter): name for name, _, parameter, _ in self._optimized()}
        optimizer, adapter = wrapper.optimizer, wrapper.adapter
        packed = optimizer.state_dict()
        packed["state"] = {}
        for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            for parameter, index in zip(group["params"], packed_group["params"], strict=True):
                name = names[id(parameter)]
                if name in states:
                    packed["state"][index] = adapter.own_state(states[name])
                packed_group.update(restored_hyper_parameters(adapter, group, hyper.get(name, {})))
        adapter.load(packed)

    def _optimized(self) -> list[tuple[str, OptimWrapper, Tensor, dict[str, Any]]]:
        """(name, its wrapper, the tensor that is optimized, its group) for every parameter of every optimizer."""
        if self.optim is None:
            return []
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return [
            (names[id(wrapper.model_parameter(parameter))], wrapper, parameter, group)
            for wrapper in self.optim.wrappers.values()
            for group in wrapper.param_groups
            for parameter in group["params"]
        ]
