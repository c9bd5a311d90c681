"""CanonicalState: the names and tensors that a strategy saves to checkpoints and loads from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.base.errors import StrategyError, counted, suggest
from ..core.checkpoint.replicas import FrozenPrints
from ..core.comm.collectives import floating_buffers
from ..core.model.module_state import tensor_names
from ..optim.canonical import GROUP, STATE, hyper_parameters, restored_hyper_parameters, split_key
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from .as_at_setup import replaced
from .environment import ProcessEnvironment
from .names import Names

Optim = OptimWrapper | OptimWrapperDict


class CanonicalState(ProcessEnvironment):
    """The part of a strategy that gives parameters, buffers and optimizer state under the names of the user's model.

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
        self._frozen_prints = FrozenPrints()
        self._uninitialised: set[str] = set()  # names of parameters that are zero until they are loaded

    @property
    def module(self) -> nn.Module:
        """The user's module, unwrapped.

        Raises:
            StrategyError: before ``setup``.
        """
        if self._module is None:
            raise StrategyError(f"{type(self).__name__}: no model yet, call setup(model, optim) first")
        return self._module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this process's parameters with their names in checkpoints: those in the model as it was built."""
        return self._names.parameters(self.module)

    def aliases(self) -> dict[str, str]:
        """Return further names of tied parameters and modules with extra state, on any process, each with its first."""
        return self._names.aliases(self.module)

    def elsewhere(self) -> frozenset[str]:
        """Return the names of the model's parameters and persistent buffers that only other processes hold."""
        return self._names.elsewhere(self.module)

    def keepers_elsewhere(self) -> frozenset[str]:
        """Return the names of the model's modules with extra state that only other processes hold."""
        return self._names.keepers_elsewhere(self.module)

    def saves(self, name: str) -> bool:
        """Return whether this process saves a buffer, or a module's extra state.

        These may differ between processes; the first process that has it saves it.
        """
        return self._names.owner(name, self.module, self.rank) == self.rank

    def model_state(self) -> dict[str, Tensor]:
        """Return this process's live parameters (float32 masters where they exist) and persistent buffers, by name.

        The name is the one in the user's model; a tied parameter has the first of its names. Its type gives the
        layout: a ``torch.Tensor`` is whole on every process, a DTensor or FlatShard is a shard.
        """
        optim = self.optim
        state = {name: p if optim is None else optim.master(p) for name, p in self.named_parameters()}
        return {name: tensor.detach() for name, tensor in state.items()} | self._buffers()

    def computed_with(self) -> dict[str, Tensor]:
        """Return this process's live parameters as the model computes with them, not their masters, by name.

        Types give the layout, as in ``model_state``. Whoever writes to frozen ones calls ``take_written`` afterwards.
        """
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def take_written(self, names: Collection[str]) -> None:
        """Let the next forward use what was written to ``computed_with()[name]`` of frozen parameters; a collective.

        Args:
            names: of the parameters; those that other processes hold are not among them.
        """

    def appeared(self) -> tuple[list[str], list[str]]:
        """Return the names of the parameters, and of the persistent buffers, that were added after ``setup``."""
        late = tensor_names(self.module) - self._at_setup if self._at_setup else frozenset()
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)} if late else set()
        return sorted(late & parameters), sorted(late - parameters)

    def left_out(self) -> frozenset[str]:
        """Return the names of the parameters that checkpoints do not contain: frozen ones, if these are excluded."""
        if not self.config.exclude_frozen_parameters:
            return frozenset()
        return frozenset(name for name, parameter in self.named_parameters() if not parameter.requires_grad)

    def state_left_out(self) -> dict[str, Tensor]:
        """Return this process's entries ``model.<name>`` of the parameters that ``left_out`` names, for exports of the whole model."""
        left_out = self.left_out()
        return {f"model.{name}": tensor for name, tensor in self.model_state().items() if name in left_out}

    def fingerprints_of_left_out(self) -> dict[str, str]:
        """Return a fingerprint for each parameter of ``left_out`` on any process, by name; a collective.

        It depends on neither the strategy nor the number of processes, only on dtype, shape and values. It begins with the
        dtype, because a strategy may keep frozen parameters in half precision. Computed again after a parameter was written.
        """
        if not self.config.exclude_frozen_parameters:
            return {}
        left_out = self.left_out()
        return self._frozen_prints.of({name: t for name, t in self.model_state().items() if name in left_out})

    def _offered(self) -> dict[str, Tensor]:
        """Return this process's entries ``model.<name>`` for a checkpoint: its parameters, and the buffers it saves."""
        skipped = self.left_out().union(
            name for name, buffer in self.module.named_buffers() if not self._offers(name, buffer)
        )
        return {f"model.{name}": tensor for name, tensor in self.model_state().items() if name not in skipped}

    def _offers(self, name: str, buffer: Tensor) -> bool:
        owner = self._names.owner(name, self.module, self.rank)
        # A sharded buffer comes from all processes of its mesh.
        return owner == self.rank or (isinstance(buffer, DTensor) and owner in buffer.device_mesh.mesh)

    def _buffers(self) -> dict[str, Tensor]:
        persistent = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}

    def keep_own_buffers(self) -> None:
        """Let running statistics follow what each process trains on, unless an option says otherwise; before training.

        Their means over the processes then stand for all data. Most strategies do so anyway.
        """

    def share_buffers(self) -> None:
        """Give every process the floating-point buffers of the first data shard; a collective, before evaluation.

        Running statistics depend on a process's training data. With different ones, metrics would depend on which
        process evaluates which sample.
        """
        self.topology.data.share(floating_buffers(self.module))

    def average_buffers(self) -> None:
        """Give every process the means of the floating-point buffers over the data shards; a collective."""
        self.topology.data.average(floating_buffers(self.module))

    def replicas(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parameters and the optimizer state of this process, by name, for ``check_replicas``.

        Their types give the layouts, as in ``model_state``; what no other process holds is not compared. The names are
        those of ``state_dict``, and ``module.<name>`` for whole weights that the model computes with beside its master.
        """
        weights, buffers = self.model_state(), {name for name, _ in self.module.named_buffers()}
        found = {f"model.{name}": tensor for name, tensor in weights.items() if name not in buffers}
        for name, parameter in self.named_parameters():
            master = weights[name]
            is_same = type(master) in (Tensor, nn.Parameter) and master.data_ptr() == parameter.data_ptr()
            if type(parameter) is nn.Parameter and parameter.shape == master.shape and not is_same:
                found[f"module.{name}"] = parameter.detach()
        state = {key: value for key, value in self.state_dict().items() if key.startswith(STATE)}
        return found, {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def state_dict(self) -> dict[str, Any]:
        """Return the canonical state: live tensors, not copied, and plain values.

        - ``model.<name>``: parameters and persistent buffers, except ``left_out()``;
        - ``optim.state.<name>.<key>``: the optimizer state of a parameter, if it exists yet;
        - ``optim.group.<name>.<key>``: its current hyper-parameters, and the class of its optimizer as ``optimizer``; of a frozen
          parameter only if its group has no trained one, which would have the same.

        Needs no communication. Each process returns its own state; a checkpoint stores equal entries of several once.
        Buffers are those of the first process that has them, as in evaluation (see ``share_buffers``); the running
        statistics of other processes, which may differ during training, are not saved.
        """
        state: dict[str, Any] = dict(self._offered())
        optimized = self._optimized()
        with_trained = {id(group) for _, _, parameter, group in optimized if parameter.requires_grad}
        for name, wrapper, parameter, group in optimized:
            for key, value in wrapper.adapter.state_of(parameter).items():
                state[f"{STATE}{name}.{key}"] = value
            if parameter.requires_grad or id(group) not in with_trained:
                state |= hyper_parameters(wrapper.adapter, group, name)
        return state

    def load_template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return tensors to fill with the contents of a checkpoint, in this strategy's layout.

        Args:
            saved: by key, an object with ``shape`` and ``dtype`` for a tensor, or the plain value.

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
        """Return an empty tensor of ``info.shape`` and ``info.dtype`` for state, in the parameter's layout."""
        if tuple(info.shape) == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)
        return torch.empty(info.shape, dtype=info.dtype)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a filled template together with the plain values; state without a key does not change.

        Raises:
            CheckpointError: another class of optimizer saved the state.
        """
        self._uninitialised -= {key.removeprefix("model.") for key in state if key.startswith("model.")}
        for wrapper in self.optim.wrappers.values() if self.optim is not None else ():
            wrapper.refresh()
        if not any(key.startswith("optim.") for key in state):
            return
        by_name: dict[str, dict[str, dict[str, Any]]] = {STATE: {}, GROUP: {}}
        for key, value in state.items():
            prefix, name, item = split_key(key)
            if prefix:
                by_name[prefix].setdefault(name, {})[item] = value
        for wrapper in self.optim.wrappers.values() if self.optim is not None else ():
            self._load_optimizer(wrapper, by_name[STATE], by_name[GROUP])

    def _await_values(self, names: Collection[str]) -> None:
        """Refuse to train until something has been loaded into these parameters, of which other processes may have some."""
        self._uninitialised = {name for name, _ in self.named_parameters() if name in names}
        if self._uninitialised:
            for wrapper in self.optim.wrappers.values() if self.optim is not None else ():
                wrapper.register_step_pre_hook(lambda _: self.check_initialised())  # for loops without a runner

    def check_initialised(self) -> None:
        """Check that every parameter of this process has values, before anything is computed with them.

        Raises:
            StrategyError: parameters that were not initialised at set-up were not loaded since; see ``note_initialised``.
        """
        if self._uninitialised:
            names = [name for name, _ in self.named_parameters() if name in self._uninitialised]
            more = f" and {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
            raise StrategyError(
                f"strategy.skip_init_weights: nothing has given values to {names[0]}{more}, all are zero; give load_from or resume, "
                "leave skip_init_weights out, or, if your own code has filled them, call strategy.note_initialised()"
            )

    def note_initialised(self, names: Iterable[str] | None = None) -> None:
        """Say that your own code has given values to parameters which ``skip_init_weights`` left at zero.

        What a checkpoint or a file is loaded into need not be named.

        Args:
            names: of the parameters, in the user's model; None: all of them.

        Raises:
            StrategyError: the model has no parameter of this name.
        """
        if names is None:
            self._uninitialised.clear()
            return
        own, aliases = {name for name, _ in self.named_parameters()}, self.aliases()
        for name in [names] if isinstance(names, str) else names:
            first = aliases.get(name, name)
            if first not in own and first not in self.elsewhere():
                raise StrategyError(f"note_initialised: the model has no parameter {name}{suggest(name, sorted(own))}")
            self._uninitialised.discard(first)

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
        """Return (name, wrapper, optimized tensor, group) for every parameter of every optimizer."""
        if self.optim is None:
            return []
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        found = [
            (wrapper.model_parameter(parameter), wrapper, parameter, group)
            for wrapper in self.optim.wrappers.values()
            for group in wrapper.param_groups
            for parameter in group["params"]
        ]
        if not all(id(own) in names for own, *_ in found):
            raise replaced(dict(self.named_parameters()), {id(own) for own, *_ in found})
        return [(names[id(own)], *rest) for own, *rest in found]
