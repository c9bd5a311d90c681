"""Strategy: where a model lives and who talks to whom. The base class behaves as one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pydantic
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.comm import collectives as dist
from ..core.comm.agreement import description, first_difference
from ..core.comm.matched_calls import roll_call
from ..core.comm.model_sync import floating_buffers, share_weights
from ..core.comm.topology import Topology
from ..core.config import Config, check_call, validate
from ..core.device import DeviceSpec, device_spec, select_device
from ..core.errors import ConfigError, StrategyError
from ..core.model import BaseModel, overrides
from ..core.module_state import check_savable, check_sizes, tensor_names
from ..core.overriding import overridden
from ..core.precision import Precision, PrecisionReport, cast_parameters, dtypes, require
from ..core.transforms import checkpoint_activations, compile_in_place, module_filter
from ..optim.canonical import GROUP, STATE, hyper_parameters, restored_hyper_parameters, split_key
from ..optim.description import description as recipe_of
from ..optim.wrapper import OptimWrapper
from ..optim.wrapper_dict import OptimWrapperDict
from .launch import Launch, detect_launch
from .model_parts import spread_updates
from .names import Names
from .needs import Needs
from .steps import EvalStep, TrainStep

Optim = OptimWrapper | OptimWrapperDict


def kept_gradients(engine: str) -> StrategyError:
    """What ``drop_gradients`` raises where ``engine`` keeps gradients that nobody else can reach."""
    return StrategyError(
        f"train(): the last one ended in the middle of an update, of which {engine} keeps gradients; make a new runner with "
        "resume=True, or with load_from"
    )


class ActivationCheckpointing(Config):
    """Which submodules are recomputed in backward."""

    check_fn: Callable[[nn.Module], bool] | None = None
    """Says of a submodule whether to recompute it."""
    classes: list[str] | None = None
    """Names of submodules' classes to recompute; in place of check_fn."""

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> ActivationCheckpointing:
        if (self.check_fn is None) == (self.classes is None):
            raise ConfigError("strategy.activation_checkpointing.check_fn: give either check_fn or classes")
        return self


class StrategyConfig(Config):
    """Options of every strategy."""

    device: str | None = None
    """Kind of device: "cpu", "cuda", "npu", "xpu", "mps" or a registered one; None takes the accelerator that is here, else
    the CPU."""
    launcher: str | None = None
    """Who started the processes: "none", "pytorch", "slurm" or "mpi"; None finds out."""
    backend: str | None = None
    """Process-group back end, such as "nccl"; gloo carries what is on the CPU if it does not. None takes the device's."""
    timeout_s: float | int = pydantic.Field(1800.0, gt=0)
    """Seconds after which a process that waits for others gives up."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Recompute activations in backward: ``dict(classes=["Block"])`` or ``dict(check_fn=...)``."""
    compile: bool | dict[str, Any] = False
    """True, or arguments of ``torch.compile``."""
    exclude_frozen_parameters: bool | None = None
    """Leave frozen parameters out of checkpoints; a run that resumes has them from its model, as that is built. None: False."""

    @pydantic.field_validator("compile")
    @classmethod
    def _torch_knows(cls, options: bool | dict[str, Any]) -> bool | dict[str, Any]:
        if isinstance(options, dict):
            check_call(torch.compile, options, "strategy.compile", ("model",))
        return options


NOTHING: AbstractContextManager[None] = nullcontext()
"""A context that changes nothing; one for all, since every micro-batch enters two."""


class Strategy:
    """Spreads a model over devices and keeps its state canonical; runs alone as one device.

    Subclasses override ``_wrap``, mostly; further ``grad_sync``, ``autocast``, ``module`` and the three methods of state.
    One whose processes do not all train on data of their own says so in ``_arrange``.
    ``setup`` is called once; a strategy serves one model.

    Args:
        options: the fields of this class's ``Config``.

    Raises:
        ConfigError: an unknown or wrongly typed option.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    needs: ClassVar[Needs] = Needs()
    short_names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Short names for ``strategy=`` and `flextrain verify`, each with the options that it stands for; not inherited."""

    def __init__(self, **options: Any) -> None:
        self.config = validate(self.Config, options, "strategy")
        if hasattr(type(self), "data_shard"):
            raise StrategyError(
                f"{type(self).__name__}.data_shard: is never asked, define _arrange() and give Topology(data=DataShard(index, "
                "count, group)), strategy.topology then has it"
            )
        self.device = torch.device("cpu")
        self.launch = Launch()
        self.topology = Topology()
        """What this process is to the others, once ``setup_environment`` has been called."""
        self.precision = Precision()
        self.optim: Optim | None = None
        self._spec: DeviceSpec | None = None
        self._model: nn.Module | None = None
        self._module: nn.Module | None = None
        self._names = Names(nn.Module())
        self._at_setup: frozenset[str] = frozenset()  # names of parameters and buffers when the model was set up
        self._owns_group = False
        self._puts_off_sync = True  # whether grad_sync does anything, which setup finds out

    # Facts

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.topology.world_size

    @property
    def module(self) -> nn.Module:
        """The user's own module, unwrapped.

        Raises:
            StrategyError: before ``setup``.
        """
        if self._module is None:
            raise StrategyError(f"{type(self).__name__}: no model yet, call setup(model, optim) first")
        return self._module

    # Life

    def setup_environment(self) -> None:
        """Choose the device and join the process group; may be called again.

        Raises:
            LaunchError: the launcher's variables are missing.
            ConfigError: a back end that the device does not have.
            StrategyError: the device is not usable here, the strategy cannot run on this many processes, or the process
                group that exists cannot carry CPU tensors.
        """
        if self._spec is not None:
            return
        spec = device_spec(self.config.device)
        self.launch = detect_launch(self.config.launcher)
        self._check_world(self.launch.world_size)
        self.device = select_device(spec, self.launch.local_rank)
        if self.launch.world_size > 1 and not dist.is_initialized():
            dist.init_process_group(
                spec.complete_backend(self.config.backend),
                rank=self.launch.rank,
                world_size=self.launch.world_size,
                init_method=self.launch.init_method,
                timeout_s=float(self.config.timeout_s),
                job=self.launch.job,
            )
            self._owns_group = True
            dist.leave_at_exit()
        self._check_group()
        dist.side_group(float(self.config.timeout_s))  # made now, where all processes are
        self._spec = spec
        self.topology = Topology()  # rank and world size are known from here on
        self.topology = self._arrange()
        if self.topology.shares_data:
            self.topology.check()

    def _arrange(self) -> Topology:
        """What this process is to the others; asked once, when the process group exists, and on every process.

        By default every process trains on data of its own and holds all names.
        """
        return Topology()

    def meet(self, call: str) -> None:
        """Wait until every process has come to ``call``, which all of them have to make.

        Raises:
            StrategyError: on every process, one has not within ``timeout_s`` seconds, or is in another call.
        """
        if problem := roll_call(call, float(self.config.timeout_s)):
            raise StrategyError(f"{call}: {problem}; every process has to call it")

    def _join_alone(self) -> None:
        """Form a group of this process alone if there is none; for engines that cannot do without."""
        if dist.is_initialized():
            return
        assert self._spec is not None
        dist.init_alone(self._spec.complete_backend(self.config.backend))
        self._owns_group = True
        dist.leave_at_exit()

    def _check_group(self) -> None:
        """Raise StrategyError if a group that others have made cannot carry CPU tensors: counts, metrics, objects."""
        if not dist.is_alone() and not dist.carries_cpu_tensors(found := dist.group_backend()):
            raise StrategyError(
                f'strategy.backend: the process group that is there already has "{found}" and nothing for tensors on the '
                f'CPU, make it with init_process_group("cpu:gloo,{found}") or leave it to the strategy'
            )

    def _check_world(self, world_size: int) -> None:
        """Raise StrategyError if this strategy cannot run on ``world_size`` processes."""

    def check(self, model: nn.Module | type[nn.Module] | None, optim: Optim) -> None:
        """Raise if this strategy cannot train such a model, or with such a wrapper; asked when a runner is made.

        Args:
            model: the module or its class; None where only a function knows it. It is not built or placed yet.
            optim: its torch optimizer is not built yet.
        """

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which the runner builds a model from a configuration; may place parameters on the meta device."""
        return nullcontext()

    def init_weights(self, model: BaseModel) -> None:
        """Have a model, as ``init_context`` left it, initialise itself; before ``setup``."""
        model.init_weights()

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """Give every process rank 0's weights, place and wrap the model, and build the optimizer at the right moment.

        Args:
            model: the user's module; it is changed in place and stays ``self.module``.
            optim: what an update is; None for evaluation only.

        Returns:
            What to call in place of ``model``, and the wrapper to train with (possibly another object than ``optim``).

        Raises:
            StrategyError, ConfigError: something asked for cannot be honoured; nothing is found out later.
        """
        if self._model is not None:
            raise StrategyError(f"{type(self).__name__}: setup was called before, a strategy serves one model")
        self.setup_environment()
        check_sizes(model)
        if found := first_difference(description(model, self._shape_of)):
            raise StrategyError(f"model: {found}; every process has to build the same model")
        if optim is not None:
            optim.attach(self.device, self.autocast)
            self.precision = optim.precision
        self._check_request(model, optim)
        cast_parameters(model, self.precision)
        if (recompute := self.config.activation_checkpointing) is not None:
            chooser = recompute.check_fn or recompute.classes or ()
            where = "strategy.activation_checkpointing.classes"
            if not checkpoint_activations(model, module_filter(chooser, model, where)):
                raise ConfigError("strategy.activation_checkpointing.check_fn: accepts no submodule of the model")
        self._place(model)
        self._names = Names(model)
        self._module = model
        self._model = self._wrap(model)
        if self.config.compile:
            self._compile(self._model)
        if optim is not None:
            optim.build(self.module)
            if found := first_difference(recipe_of(optim), kind=f"part {self.topology.place_in_model} of the model"):
                raise StrategyError(f"{found}; every process has to be configured alike")
            if self.topology.model is not None:
                spread_updates(optim, self.named_parameters(), self.topology, self.device)
        self.optim = optim
        self._puts_off_sync = type(self).grad_sync is not Strategy.grad_sync or bool(overridden(self, "grad_sync"))
        self._check_precision()
        if optim is not None:
            check_savable(self.module)
            self._at_setup = tensor_names(self.module)
        self._names.gather(self.module)
        return self._model, optim

    def _shape_of(self, tensor: Tensor) -> Sequence[int]:
        """The shape of a whole parameter or buffer of a model that ``init_context`` may have left in parts."""
        return tensor.shape

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        """Raise if this strategy cannot do what the model or the wrapper asks for."""

    def _place(self, model: nn.Module) -> None:
        """Bring the model to the device and every process to rank 0's weights."""
        model.to(self.device)
        share_weights(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """What to call in place of ``model``, which is on the device and equal on all processes; called once."""
        return model

    def _compile(self, model: nn.Module) -> None:
        """Compile the wrapped model in place."""
        options = self.config.compile if isinstance(self.config.compile, dict) else {}
        # A model with its own train_step calls its parts; the whole is never called.
        parts = list(self.module.children()) if overrides(self.module, "train_step") else [model]
        compile_in_place(parts, options)

    def teardown(self) -> None:
        """Leave the process group, if this strategy joined it, and let go of the model; may be called again."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        self._model = self._module = self.optim = None
        self._spec = None
        self.topology = Topology()

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """Context for forward, in training and evaluation: autocast where the precision asks for it."""
        if not self.precision.autocast:
            return NOTHING
        return torch.autocast(self.device.type, self.precision.compute)  # type: ignore[no-any-return,unused-ignore]

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Context for forward and backward of one micro-batch; with False, reducing gradients is put off."""
        return NOTHING

    def run_window(self, window: Sequence[Any], step: TrainStep) -> dict[str, Tensor]:
        """Forward and backward of the micro-batches of one update; the update itself comes after.

        By default one micro-batch after the other, each within ``grad_sync``.

        Args:
            window: the micro-batches, as ``split`` gave them.
            step: calls the model the way it wants to be called.

        Returns:
            What to log: 0-dim tensors by name, means over the window. On every process, also those that see no loss.
        """
        parts = []
        for i, batch in enumerate(window):
            reduces = step.begin(i)
            if self._puts_off_sync:
                with self.grad_sync(reduces):
                    parts.append(step.run(batch, i))
            else:  # entering a context that does nothing takes as long as the rest of this loop
                parts.append(step.run(batch, i))
        return step.mean(parts)

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """What the model predicts for a batch of evaluation, as ``split`` gave it; None on processes that have no outputs.

        Those are no processes that report, see ``Topology``. By default one forward.
        """
        return step.predict(batch)

    def split(self, batch: Any) -> Any:
        """The part of a batch that this process computes with, where several share one; by default all of it.

        What ``loss_weight`` counts in the parts is added up over all processes.
        """
        return batch

    def drop_gradients(self) -> None:
        """Forget the gradients of an update that an exception has ended, because all of its micro-batches come again.

        Raises:
            StrategyError: they cannot be forgotten.
        """
        if self.optim is not None:
            self.optim.zero_grad()

    def share_buffers(self) -> None:
        """Give every process the floating-point buffers of the first part of the data; all come here before evaluation.

        Running statistics follow what a process trains on. Evaluation with those of each would depend on which process
        has which sample; DistributedDataParallel sends rank 0's before every forward for the same reason.
        """
        self.topology.data.share(floating_buffers(self.module))

    def average_buffers(self) -> None:
        """Give every process the means of the floating-point buffers over the parts of the data; all come here."""
        self.topology.data.average(floating_buffers(self.module))

    # State

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

    # Precision

    def precision_report(self) -> PrecisionReport:
        """The dtypes in force, read off the tensors."""
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
            masters=dtypes([m for p in trainable if self.optim and (m := self.optim.master(p)) is not p]),
            gradients=(self.precision.reduce,) if self.precision.reduce else stored,
            optimizer_state=dtypes(states),
        )

    def _check_precision(self) -> None:
        """Raise StrategyError if the tensors are not what was asked for."""
        asked, report = self.precision, self.precision_report()
        if asked.param is not None and asked.param not in report.parameters:
            require(asked.param, report.parameters, "parameters")
        if asked.autocast:
            # Autocast casts what it computes with; what is stored, and updated, has to keep its digits.
            require(torch.float32, report.masters or report.parameters, "parameters under autocast")
