"""Strategy, the base class: places and wraps the model, runs its windows, gives its state. It trains on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.base.config import validate
from ..core.base.errors import StrategyError
from ..core.base.overriding import overridden, refuse_misspelled
from ..core.comm import collectives as dist
from ..core.comm.agreement import description, first_difference, raising_together, roll_call
from ..core.comm.collectives import share_weights
from ..core.comm.topology import DataShard, Topology, use_shard
from ..core.device.device import DeviceSpec, device_spec, device_uuid, select_device
from ..core.device.precision import Precision, PrecisionReport, dtypes, require
from ..core.hugging_face.transformers_private import keep_documents_apart
from ..core.model.base_model import overrides
from ..core.model.module_state import check_savable, check_sizes, check_trainable, tensor_names
from ..core.random.generators import drawing_apart
from ..core.torch_compat.torch_private import process_groups, set_time_limit, with_values
from ..optim.adapters import updates_matrices
from ..optim.canonical import GROUP, STATE, hyper_parameters, restored_hyper_parameters, split_key
from ..optim.gradients import ModelGroup
from ..optim.trial import Samples, updates_apart
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from ..optim.wrapper_dict import description as recipe_of
from .building import shape_of
from .config import Needs, StrategyConfig
from .gradient_hooks import Hooked, HooksAfterBackward, Removable
from .interface import INTERFACE_VERSION, check_interface, passed_on
from .launchers import Launch, detect_launch, saying_why_this_process_leaves
from .noted import Arranged, AsAtSetup, Blueprint, Names, Noted, ParametersAsMade, replaced
from .recomputation import compile_in_place, recompute

# TrainStep and EvalStep: the interfaces by which a strategy calls the model, for an update or an evaluation batch.


class TrainStep(Protocol):
    """One update, for ``Strategy.run_window``.

    For every micro-batch call ``begin`` first, then either ``run``, or ``forward`` and ``backward``. A schedule may
    order the forwards and backwards of all micro-batches freely, unless the model's wrapper depends on the order:
    DistributedDataParallel needs each backward right after its forward.
    """

    shares: Sequence[float | None]
    """Factor of each micro-batch's loss, so that the sum of the gradients is that of the update; None: 1."""

    def begin(self, index: int) -> bool:
        """Announce micro-batch ``index``; return whether its backward must reduce gradients."""

    def run(self, batch: Any, index: int) -> dict[str, Tensor]:
        """Run forward and backward of a micro-batch; return its values to log, 0-dim and without a graph."""

    def prepare(self, batch: Any) -> Any:
        """Return the model's input for a micro-batch, on the device."""

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, 0-dim with its graph, computed under ``autocast``, and its values to log.

        Raises:
            StrategyError: the model defines its own ``train_step``, which combines forward and backward.
        """

    def backward(self, loss: Tensor, index: int) -> None:
        """Run backward of a loss, multiplied by its share, and by the loss scale if there is one."""

    def mean(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the window's values to log, from those that ``run`` or ``forward`` returned for its micro-batches."""


class EvalStep(Protocol):
    """One batch of evaluation, for ``Strategy.evaluate``.

    Attributes:
        mode: "val" or "test", of which a model may predict otherwise.
    """

    mode: str

    def prepare(self, batch: Any) -> Any:
        """Return the model's input for a batch, on the device."""

    def predict(self, batch: Any) -> Any:
        """Return the predictions for a batch, by ``val_step``, ``test_step`` or ``forward``, under ``autocast``."""


# Gradient norms and overflows of optimizers on processes that hold different parameters of one replica of a model.


def spread_updates(
    optim: OptimWrapper | OptimWrapperDict,
    parameters: Iterable[tuple[str, nn.Parameter]],
    topology: Topology,
    device: torch.device,
) -> None:
    """Combine norms, clipping and overflows over ``topology.model``; a collective of this group.

    A parameter that several processes hold, under one name or tied in the whole model, counts once. Each of them must
    have its full gradient.

    Args:
        parameters: this process's parameters, by their names in the whole model; a tied one by its first name.

    Raises:
        StrategyError: on every process, if an optimizer's updates depend on parameters that other processes hold.
    """
    names = {id(parameter): name for name, parameter in parameters}
    for wrapper in optim.wrappers.values():
        own = {names[id(parameter)]: parameter for group in wrapper.param_groups for parameter in group["params"]}
        kinds = {parameter.dtype for parameter in own.values()}
        index = topology.index_in_model
        everyones = dist.all_gather_object((index, set(own), kinds, _updates_apart(wrapper)), topology.model)
        if not all(is_apart for *_, is_apart in everyones):
            raise StrategyError(
                f"{wrapper.where}.optimizer: {type(wrapper.optimizer).__name__} updates a parameter otherwise beside others than alone, "
                "by a norm of all gradients, say, and every process has a part of the model; choose AdamW, or data parallelism"
            )
        before = set().union(*(names for other, names, *_ in everyones if other < index))
        dtype = functools.reduce(
            torch.promote_types, set().union(*(kinds for *_, kinds, _ in everyones)), torch.float32
        )
        elsewhere = [parameter for name, parameter in own.items() if name in before]
        wrapper.spread(ModelGroup(topology.model, elsewhere, dtype, device))


def _updates_apart(wrapper: OptimWrapper) -> bool:
    optimizer = wrapper.optimizer
    if wrapper.adapter.is_elementwise or updates_matrices(type(optimizer)):
        return True
    with with_values():
        return updates_apart(wrapper.make_another, Samples.like(optimizer))


def kept_gradients(engine: str) -> StrategyError:
    """Return the error of ``abort_update`` for an ``engine`` whose gradients cannot be dropped from outside."""
    return StrategyError(
        f"the last call ended in the middle of an update, and {engine} still has its gradients; make another runner with resume=True or "
        "load_from, or another Engine and load()"
    )


Optim = OptimWrapper | OptimWrapperDict

NOTHING: AbstractContextManager[None] = nullcontext()
"""A context that does nothing; a single object, because every micro-batch enters two."""


class Strategy:
    """Trains a model on one or many devices and gives its state in canonical form; the base class uses one device.

    Most subclasses override ``_wrap``; some also ``grad_sync``, ``autocast``, ``module`` and the three methods of
    state. If several processes train on the same data, or hold different parameters, override ``_arrange``.
    ``setup`` is called once; a strategy serves one model.

    Args:
        options: the fields of this class's ``Config``.

    Raises:
        ConfigError: an unknown or wrongly typed option.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    needs: ClassVar[Needs] = Needs()
    short_names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Short names for ``strategy=`` and commands, each with its options; not inherited."""
    not_promised: ClassVar[Mapping[str, str]] = {}
    """Checks of ``check_strategy`` in which it may differ from one device, each with the reason."""
    tolerance: ClassVar[float | Mapping[str, float] | None] = None
    """Relative difference from one device that ``check_strategy`` and ``flextrain verify`` count as rounding, of all checks or by name; None: the kit's own."""
    _earlier_groups: Sequence[Any] = ()  # process groups of others, which are left as they are
    _own_groups: Sequence[Any] = ()  # those that were made for this strategy, beside the default one
    _puts_off_sync = True  # whether grad_sync is overridden, see setup
    _given_as: Mapping[str, str] = MappingProxyType({})  # where options that are not under ``strategy`` were given
    interface_version: ClassVar[int | range] = INTERFACE_VERSION
    """The version of this interface that a class is written for; a package states it, and another one is refused."""

    def __init__(self, **options: Any) -> None:
        check_interface(type(self))
        self.config = validate(self.Config, options, "strategy")
        if hasattr(type(self), "data_shard"):
            raise StrategyError(
                f"{type(self).__name__}.data_shard: is never asked, define _arrange() and give Topology(data=DataShard(index, "
                "count, group)), strategy.topology then has it"
            )
        refuse_misspelled(type(self), "strategy")
        self.device = torch.device("cpu")
        self.launch = Launch()
        self.topology = Topology()
        """This process's relations to the others; valid after ``join``."""
        self.optim: Optim | None = None
        self.noted = Noted()
        self.precision = Precision()
        self.example: Callable[[], Any] | None = None
        """Returns a batch of the data, for the shapes in it, or None; a runner sets it before ``setup``."""
        self._spec: DeviceSpec | None = None
        self._owns_group = False
        self._model: nn.Module | None = None
        self._module: nn.Module | None = None
        self._gradient_hooks: list[Removable] = []  # on the user's parameters; leave removes them

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return passed_on(self, name)

    # Processes and devices

    def join(self) -> None:
        """Choose the device and join the process group; may be called again.

        Raises:
            LaunchError: the launcher's variables are missing.
            ConfigError: a backend that the device does not support.
            StrategyError: the device is not usable, the strategy cannot run on this number of processes, or the
                existing process group cannot send CPU tensors.
        """
        if self._spec is not None:
            return
        spec = device_spec(self.config.device)
        self.launch = detect_launch(self.config.launcher)
        with saying_why_this_process_leaves(self.config.launcher):
            self._check_world(self.launch.world_size)
            self.device = select_device(spec, self.launch.local_rank)
        if self.launch.world_size > 1 and not dist.is_initialized():
            dist.init_process_group(
                spec.complete_backend(self.config.backend, self._key_of_backend),
                rank=self.launch.rank,
                world_size=self.launch.world_size,
                init_method=self.launch.init_method,
                timeout_s=float(self.config.timeout_s),
                job=self.launch.job,
                is_derived=self.launch.is_derived,
                several_machines=self.launch.several_machines,
            )
            self._owns_group = True
            dist.leave_at_exit(self.device)
        self._check_group()
        dist.side_group(float(self.config.timeout_s))  # created here, because all processes are here
        # The processes compare their topologies below, where one that is alone would wait without end.
        if not dist.is_alone():
            meet(self, "Strategy.join()")
            self._check_devices()
            self._earlier_groups = process_groups()
        self._spec, self.topology = spec, Topology()  # _arrange may need rank and world size
        try:
            with raising_together():
                arranged: object = self._arrange()
                if not isinstance(arranged, Topology):
                    raise StrategyError(
                        f"{type(self).__name__}._arrange: gave {type(arranged).__name__}, return Topology(data=DataShard(index, count, group))"
                    )
                self.topology = arranged
                use_shard(arranged.data)
            if not dist.is_alone():
                self.topology.check()
                self._keep_groups()
        except BaseException:
            self._spec, self.topology = None, Topology()  # another call must not find it set up
            raise

    def _arrange(self) -> Topology:
        """Return this process's relations to the others; called once on every process, after the process group exists.

        By default every process trains on its own data and holds all parameters.
        """
        return Topology()

    @property
    def _key_of_backend(self) -> str:
        return self._given_as.get("backend", "strategy.backend")

    def _join_alone(self) -> None:
        """Create a process group of this process alone if there is none, for libraries that need one."""
        if dist.is_initialized():
            return
        assert self._spec is not None
        dist.init_alone(self._spec.complete_backend(self.config.backend, self._key_of_backend))
        self._owns_group = True
        dist.leave_at_exit(self.device)

    def _check_group(self) -> None:
        """Raise StrategyError if an existing process group cannot send CPU tensors: counts, metrics, objects."""
        if not dist.is_alone() and not dist.carries_cpu_tensors(found := dist.group_backend()):
            raise StrategyError(
                f'strategy.backend: the existing process group has the backend "{found}" and none for CPU tensors, '
                f'create it with init_process_group("cpu:gloo,{found}") or let the strategy create it'
            )

    def _check_devices(self) -> None:
        """Raise StrategyError if processes share a device and nobody asked for it: each sees one, and it is the same."""
        if self.device.type == "cpu" or self.config.backend is not None:
            return
        holder: dict[str, int] = {}
        for rank, uuid in enumerate(dist.all_gather_object(device_uuid(self.device))):
            if uuid is not None and (first := holder.setdefault(uuid, rank)) != rank:
                raise StrategyError(
                    f"strategy.device: ranks {first} and {rank} have the same {self.device.type} device ({uuid}), start one "
                    "process per device; to let processes share one, name a strategy.backend that can"
                )

    def _check_world(self, world_size: int) -> None:
        """Raise StrategyError if this strategy cannot run on ``world_size`` processes."""

    def _leave_environment(self) -> None:
        """Leave the process group, if this strategy joined it, and those that were made for it."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        elif self._own_groups:
            dist.leave_groups(self._own_groups)
        self._own_groups = ()
        self._spec = None
        self.topology = Topology()

    # Set-up

    @property
    def module(self) -> nn.Module:
        """The user's module, unwrapped.

        Raises:
            StrategyError: before ``setup``.
        """
        if self._module is None:
            raise StrategyError(f"{type(self).__name__}: no model yet, call setup(model, optim) first")
        return self._module

    def check(self, model: nn.Module | type[nn.Module] | None, optim: Optim) -> None:
        """Raise if this strategy cannot train this model, or with this wrapper; called when a runner is made.

        Args:
            model: the module or its class; None if only a function can build it. It is not set up yet.
            optim: the wrapper, whose torch optimizer is not built yet.
        """

    def building(self, model: nn.Module | None = None, draws: Tensor | None = None) -> AbstractContextManager[Any]:
        """Return the context in which a model is made, initialised or changed; before ``setup``.

        Parameters that are made in it may be on the meta device afterwards.

        Args:
            model: one that was made in such a context, or given by the user, to initialise or to change; None: one is made.
            draws: the state of torch's generator on the CPU from which what changes ``model`` draws, so that it draws the
                same under every strategy; None: the model is initialised, by its ``init_weights``.
        """
        return NOTHING if model is None or draws is None else drawing_apart(draws)

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """Give every process rank 0's weights, place and wrap the model, and build the optimizer; a collective.

        Args:
            model: the user's module; it is changed in place and stays ``self.module``.
            optim: the wrapper to train with; None for evaluation only.

        Returns:
            The module to call instead of ``model``, and the wrapper to train with, which may be another than ``optim``.

        Raises:
            StrategyError, ConfigError: a setting is not possible; all such errors are raised here, none later.
        """
        if self._model is not None:
            raise StrategyError(f"{type(self).__name__}: setup was called before, a strategy serves one model")
        self.join()
        check_sizes(model)
        shaped = partial(shape_of, self)
        several = not dist.is_alone()
        if several:
            self._start_together(description(model, shaped))
        if optim is not None:
            optim.attach(self.device, self.autocast)
            self.precision = optim.precision
            if self.topology.model is None:  # otherwise another process may have what is trained
                check_trainable(model)
            optim.examine(model)
            model.zero_grad()  # what a trial has left would be in the first update of some strategies, and not of others
        self._check_request(model, optim)
        noted = self.noted
        blueprint = noted.blueprint = Blueprint(model, shaped)
        as_made = ParametersAsMade(model, shaped)
        if self.config.activation_checkpointing is not None:
            recompute(model, self.config.activation_checkpointing, trains=optim is not None, device=self.device)
        keep_documents_apart(model)
        self._place(model)
        noted.names = Names(model)
        self._module = model
        self._model = self._wrap(model)
        hooked = as_made.give(self.module, type(self).__name__, self.topology)
        blueprint.follow()
        if self.config.compile:
            self._compile(self._model)
        if optim is not None:
            optim.build(self.module)
            part = f"part {self.topology.index_in_model} of the model"
            if several and (found := first_difference(recipe_of(optim), kind=part)):
                raise StrategyError(f"{found}; every process has to be configured alike")
            if self.topology.model is not None:
                spread_updates(optim, self.parameters(), self.topology, self.device)
            if hooked and self._averaged_over().count > 1:
                self._call_hooks(hooked, optim)
        self.optim = optim
        self._puts_off_sync = type(self).grad_sync is not Strategy.grad_sync or bool(overridden(self, "grad_sync"))
        self._check_precision()
        if optim is not None:
            unchanged = noted.unchanged = AsAtSetup(lambda: self.module, self._arranged(), optim)
            for wrapper in optim.wrappers.values() if overrides(model, "train_step") else ():  # which may remove hooks
                wrapper.register_backward_pre_hook(unchanged.checking_hooks(model))
            check_savable(self.module, left_out(self))
            noted.at_setup = tensor_names(self.module)
        if several:
            noted.names.gather(self.module)
            self._keep_groups()
        return self._model, optim

    def _start_together(self, described: Mapping[str, str]) -> None:
        """Raise StrategyError if processes give other models, and note which process groups there are; a collective."""
        if found := first_difference(described):
            raise StrategyError(f"model: {found}; every process has to build the same model")
        self._earlier_groups = process_groups()

    def _keep_groups(self) -> None:
        """Note the process groups that were made for this strategy, and give them ``timeout_s``: torch gives those of meshes its own."""
        for group in process_groups():
            if group not in self._earlier_groups and group not in self._own_groups:
                set_time_limit(group, self.config.timeout_s)
                self._own_groups = [*self._own_groups, group]

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        """Raise if this strategy does not support the model, or the settings of the wrapper."""

    def _arranged(self) -> Arranged:
        """Return which changes of parameters after set-up training would miss, and why; called when the model is wrapped."""
        return Arranged()

    def _place(self, model: nn.Module) -> None:
        """Move the model to the device, and give every process rank 0's weights."""
        model.to(self.device)
        if not dist.is_alone():
            share_weights(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call instead of ``model``, which is on the device and equal on all processes."""
        return model

    def _averaged_over(self) -> DataShard:
        """Return the processes over which gradients are averaged, also those of parameters that the strategy leaves whole."""
        return self.topology.data

    def _call_hooks(self, hooked: Mapping[str, Hooked], optim: Optim) -> None:
        """See to it that gradient hooks of users get means over the processes; with several of them."""
        hooks = HooksAfterBackward(hooked, self._averaged_over())
        for wrapper in optim.wrappers.values():
            hooks.register(wrapper)
        self._gradient_hooks.append(hooks)

    def _compile(self, model: nn.Module) -> None:
        """Compile the wrapped model in place."""
        options = self.config.compile if isinstance(self.config.compile, dict) else {}
        # A model with its own train_step calls its submodules; forward of the whole model is never called.
        parts = list(self.module.children()) if overrides(self.module, "train_step") else [model]
        compile_in_place(parts, options)

    def leave(self) -> None:
        """Leave the process group, if this strategy joined it, and drop the model; may be called again."""
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks.clear()
        self._model = self._module = self.optim = None
        self.noted.drop_model()
        self._leave_environment()

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward, in training and evaluation: autocast if the precision needs it."""
        if not self.precision.autocast:
            return NOTHING
        return torch.autocast(self.device.type, self.precision.compute)  # type: ignore[no-any-return,unused-ignore]

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Return the context for forward and backward of a micro-batch; it reduces gradients only if ``enabled``."""
        return NOTHING

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        """Run forward and backward of the micro-batches of one update, but not the update itself.

        By default one micro-batch after the other, each within ``grad_sync``.

        Args:
            window: the micro-batches, as returned by ``split``.
            step: the interface to call the model.

        Returns:
            Values to log: 0-dim tensors by name, means over the window. On every process, also those without loss.
        """
        parts = []
        for i, batch in enumerate(window):
            reduces = step.begin(i)
            if self._puts_off_sync:
                with self.grad_sync(reduces):
                    parts.append(step.run(batch, i))
            else:  # entering an empty context takes as long as the rest of this loop
                parts.append(step.run(batch, i))
        return step.mean(parts)

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """Return the predictions for an evaluation batch that ``split`` returned; None on processes without outputs.

        Processes without outputs do not report metrics, see ``Topology``. By default one forward.
        """
        return step.predict(batch)

    def split(self, batch: Any) -> Any:
        """Return this process's shard of a batch, if several processes share one; by default the whole batch.

        The ``loss_weight`` of the shards is summed over all processes.
        """
        return batch

    def abort_update(self) -> None:
        """Drop the gradients of an update that an exception has ended: all of its micro-batches will be repeated.

        Raises:
            StrategyError: the gradients cannot be dropped.
        """
        if self.optim is not None:
            self.optim.zero_grad()

    # State

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this process's parameters with their names in checkpoints: those in the model as it was built."""
        return self.noted.names.parameters(self.module)

    def model_state(self) -> dict[str, Tensor]:
        """Return this process's live parameters (float32 masters where they exist) and persistent buffers, by name.

        The name is the one in the user's model; a tied parameter has the first of its names. Its type gives the
        layout: a ``torch.Tensor`` is whole on every process, a DTensor or FlatShard is a shard.
        """
        return {name: parameter.detach() for name, parameter in self.parameters()} | self.buffers()

    def _offered(self) -> dict[str, Tensor]:
        """Return this process's entries ``model.<name>`` for a checkpoint: its parameters, and the buffers it saves."""
        skipped = left_out(self).union(
            name for name, buffer in self.module.named_buffers() if not self._offers(name, buffer)
        )
        return {f"model.{name}": tensor for name, tensor in self.model_state().items() if name not in skipped}

    def _offers(self, name: str, buffer: Tensor) -> bool:
        owner = self.noted.names.owner(name, self.module, self.topology.rank)
        # A sharded buffer comes from all processes of its mesh.
        return owner == self.topology.rank or (isinstance(buffer, DTensor) and owner in buffer.device_mesh.mesh)

    def buffers(self) -> dict[str, Tensor]:
        """Return this process's persistent buffers, by name."""
        persistent = self.module.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}

    def state(self) -> dict[str, Any]:
        """Return the canonical state: live tensors, not copied, and plain values.

        - ``model.<name>``: parameters and persistent buffers, except those that are left out by ``exclude_frozen_parameters``;
        - ``optim.state.<name>.<key>``: the optimizer state of a parameter, if it exists yet;
        - ``optim.group.<name>.<key>``: its current hyper-parameters, and the class of its optimizer as ``optimizer``; of a frozen
          parameter only if its group has no trained one, which would have the same;
        - ``optim.own.<name>``: tensors and plain values that only a subclass knows; they belong to the optimizer's state.

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

    def template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
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
                if not wrapper.adapter.keeps_state_of(parameter):
                    continue
                live = wrapper.adapter.state_of(parameter).get(item)
                if isinstance(live, Tensor) and (tuple(live.shape), live.dtype) == (tuple(info.shape), info.dtype):
                    template[key] = live
                else:
                    template[key] = self._state_like(wrapper, parameter, item, info)
                of_parameter = getattr(saved.get(f"model.{name}"), "dtype", None)
                if item != "step" and info.dtype == of_parameter != parameter.dtype:
                    template[key] = template[key].to(parameter.dtype)
        return template

    def _state_like(self, wrapper: OptimWrapper, parameter: Tensor, key: str, info: Any) -> Tensor:
        """Return an empty tensor of ``info.shape`` and ``info.dtype`` for state, in the parameter's layout."""
        if (own := wrapper.adapter.empty_state(parameter, info.shape, info.dtype)) is not None:
            return own
        if tuple(info.shape) == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=info.dtype, requires_grad=False)
        return torch.empty(info.shape, dtype=info.dtype)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a filled template together with the plain values; state without a key does not change.

        Raises:
            CheckpointError: another class of optimizer saved the state.
        """
        self.noted.uninitialised -= {key.removeprefix("model.") for key in state if key.startswith("model.")}
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

    def _load_optimizer(
        self, wrapper: OptimWrapper, states: dict[str, dict[str, Any]], hyper: dict[str, dict[str, Any]]
    ) -> None:
        names = {id(parameter): name for name, _, parameter, _ in self._optimized()}
        optimizer, adapter = wrapper.optimizer, wrapper.adapter
        packed = optimizer.state_dict()
        packed["state"] = {}
        for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
            members = [
                (names[id(p)], p, index) for p, index in zip(group["params"], packed_group["params"], strict=True)
            ]
            # The settings of one that is trained count: a frozen one may have been saved with others, and does not use them.
            for name, _, index in sorted(members, key=lambda member: (member[1].requires_grad, member[0] in states)):
                if name in states:
                    packed["state"][index] = adapter.own_state(states[name])
                packed_group.update(restored_hyper_parameters(adapter, group, hyper.get(name, {})))
        adapter.load(packed)

    def _optimized(self) -> list[tuple[str, OptimWrapper, Tensor, dict[str, Any]]]:
        """Return (name, wrapper, optimized tensor, group) for every parameter of every optimizer."""
        if self.optim is None:
            return []
        names = {id(parameter): name for name, parameter in self.parameters()}
        found = [
            (wrapper, parameter, group)
            for wrapper in self.optim.wrappers.values()
            for group in wrapper.param_groups
            for parameter in group["params"]
        ]
        if not all(id(parameter) in names for _, parameter, _ in found):
            raise replaced(dict(self.parameters()), {id(parameter) for _, parameter, _ in found})
        return [(names[id(parameter)], wrapper, parameter, group) for wrapper, parameter, group in found]

    # Precision

    def precision_report(self) -> PrecisionReport:
        """Return the dtypes in use, read from the tensors."""
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        stored = dtypes(trainable)
        compute = self.precision.compute
        states = [
            value
            for _, wrapper, parameter, _ in self._optimized()
            for value in wrapper.optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        return PrecisionReport(
            compute=(compute,) if self.precision.autocast and compute is not None else stored,
            parameters=stored,
            masters=(),
            gradients=(self.precision.reduce,) if self.precision.reduce else stored,
            optimizer_state=dtypes(states),
        )

    def _check_precision(self) -> None:
        """Raise StrategyError if the tensors do not have the dtypes of ``precision``."""
        asked, report = self.precision, self.precision_report()
        if asked.autocast:
            # Autocast casts for computation only; stored parameters must stay in float32 for accurate updates.
            require(torch.float32, report.masters or report.parameters, "parameters under autocast")


def meet(strategy: Strategy, call: str) -> None:
    """Wait until every process has made ``call``; a collective.

    Raises:
        StrategyError: on every process, if one does not come within ``timeout_s`` seconds or makes another call.
    """
    if not dist.is_alone() and (problem := roll_call(call, float(strategy.config.timeout_s))):
        raise StrategyError(f"{call}: {problem}; every process has to call it")


def left_out(strategy: Strategy) -> frozenset[str]:
    """Return the names of the parameters that checkpoints do not contain: frozen ones, if these are excluded."""
    if not strategy.config.exclude_frozen_parameters:
        return frozenset()
    return frozenset(name for name, parameter in strategy.parameters() if not parameter.requires_grad)
