"""FSDPStrategy: fully sharded data parallelism with torch's fully_shard (FSDP2)."""

from __future__ import annotations

import inspect
import itertools
import logging
import socket
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Thread, current_thread
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...core.base.errors import StrategyError, counted
from ...core.base.registry import STRATEGIES
from ...core.base.trees import tree_map_only
from ...core.checkpoint.chunks import fill, full_tensor
from ...core.comm import collectives as dist
from ...core.comm.collectives import share_weights
from ...core.comm.topology import DataShard
from ...core.device.precision import PrecisionReport
from ...core.model.base_model import calls_itself
from ...core.torch_compat.dtensor_private import (
    KeptForDerivatives,
    chunks_on_demand,
    fill_gradients,
    reset_after_error,
    settle_root,
    settle_unit,
)
from ...core.torch_compat.torch_private import (
    DeviceFollower,
    apply_to_tensors,
    gradient_hooks,
    has_values,
    swappable,
    with_values,
)
from ...optim.gradients import average
from ...optim.wrapper import OptimWrapper
from ..added_parameters import refuse_added
from ..base import NOTHING, EvalStep, Optim, Strategy, kept_gradients
from ..config import ANY_DEVICE, Needs
from ..divided import register_divided
from ..gathering_order import Together, UnitOrder, message_group
from ..gradient_hooks import OwnMeans, StepsInTime, draw_alike
from ..lost_writes import Replaced, refuse_other_settings, settings_given, watch_forward
from ..noted import Arranged, is_subclass
from ..parts import choices, construct, explain, prepare_whole
from ..parts.advice import explain_dtypes
from ..parts.model_state import await_values
from ..recomputation import compile_in_place
from ..sharding import ShardedOptimizers, check_dense, check_real, check_tables, has_shards, make_contiguous
from ..without_memory import ModelWithoutMemory, give_memory
from .config import FSDPConfig
from .float8_weights import Float8Weights
from .units import check_one_dtype, choose_roots, choose_units, described, freed_after_forward, prefetch

# Around FSDP's micro-batches: errors that end one in the middle, and the layout of gradients after one.


class NotingErrors:
    """Context around a micro-batch, the evaluation of a batch, or a check of one; one of them may be inside of another.

    Attributes:
        has_seen: an error has left it, so that FSDP may have stopped in the middle.
        is_final: FSDP cannot go on after it.
        thread: in which it computes; None before it has.
    """

    has_seen = is_final = False
    thread: Thread | None = None
    _depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        self.thread = current_thread()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._depth -= 1
        if kind is not None:
            self.has_seen = True

    @property
    def is_open(self) -> bool:
        """Whether the model computes at the moment."""
        return self._depth > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing computes, and no other thread may begin to."""
        own = self.thread in (None, current_thread())
        return not self.is_open and (own or not cast(Thread, self.thread).is_alive())


# Hybrid sharding by nodes: how many replicas there are if each node holds one.


_logger = logging.getLogger("flextrain")


def replicas_by_node(data: DataShard) -> int:
    """Return the number of nodes, for a replica on each; a collective.

    Raises:
        StrategyError: the nodes have different numbers of processes, or their ranks alternate.
    """
    names = dist.all_gather_object(socket.gethostname())
    blocks = [len(list(same)) for _, same in itertools.groupby(names)]
    if len(blocks) != len(set(names)) or len(set(blocks)) > 1 or data.count != len(names):
        raise StrategyError(
            f"strategy.model_wrapper.sharding_strategy: needs as many processes on each node, with consecutive ranks and data of "
            f"their own, found {', '.join(map(str, blocks))} on {', '.join(dict.fromkeys(names))}; give strategy.replicate_size"
        )
    _logger.info(f"Hybrid sharding: {len(blocks)} replicas, each over the {blocks[0]} processes of a node")
    return len(blocks)


# Forwards that write to parameters: FSDP has gathered them for the time of forward, and the write would be lost.


_GATHERED = "since FSDP has gathered its parameters for forward only"


def parameters_of(unit: nn.Module, names: dict[int, str]) -> dict[str, tuple[nn.Module, str]]:
    """Return where the parameters are that FSDP gathers with a unit, by name.

    Args:
        unit: a module after ``fully_shard``.
        names: of the modules of the model, by id.
    """
    return {
        f"{names.get(id(module), '')}.{key}".lstrip("."): (module, key)
        for module in _own_modules(unit)
        for key, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor) and has_shards(parameter)
    }


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


# Processes whose samples use different parameters: all reduce the same gradients, and update what any of them has
# used.


_NONE, _ZEROS, _OWN = range(3)
"""What a process has computed for a parameter: no gradient, or frozen; none, for which it has sent zeros; a gradient."""


class UsedParameters:
    """Lets every process reduce gradients of the same parameters, with zeros for those that it has not used.

    Before an update the processes agree on which parameters were used, in one small message. A parameter that no process has
    used has no gradient then, as on one device, where neither weight decay nor momentum moves it.

    Args:
        module: the model, after ``fully_shard``.
        units: the modules that FSDP gathers.
        data: the processes that average gradients, and the ``device`` on which they do.
        rank: of this process, for messages.
    """

    def __init__(
        self, module: nn.Module, units: Iterable[nn.Module], data: DataShard, device: torch.device, rank: int
    ) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self._zeros: dict[int, Tensor] = {}  # gradients that are zeros of this process, by parameter
        self._data, self._device, self._rank = data, device, rank
        self._updates = 0
        self._told: list[tuple[list[int], Tensor]] = []  # of each wrapper, what was told last: here, on the device
        for unit in units:
            fill_gradients(unit, self._takes_part, self._note)

    def register(self, optim: OptimWrapper) -> None:
        """Agree before every update of this wrapper."""
        own = [p for group in optim.param_groups for p in group["params"]]
        sharded = [parameter for parameter in own if isinstance(parameter, DTensor)]
        if sharded and self._data.count > 1:
            number = len(self._told)
            with with_values():  # a rehearsal sends and reads what this process tells too
                all_own = torch.zeros(2, len(sharded), dtype=torch.int8, device=self._device)
                all_own[0] = _OWN  # without a copy from the host
            self._told.append(([_OWN] * len(sharded), all_own))
            optim.register_step_pre_hook(lambda _: self._agree(number, sharded))

    def _takes_part(self, parameter: Tensor) -> bool:
        if parameter.requires_grad:
            self._trained.add(id(parameter))  # also one that was frozen at first
        return id(parameter) in self._trained

    def _note(self, given: list[Tensor], filled: list[Tensor]) -> None:
        for parameter in given:
            self._zeros.pop(id(parameter), None)
        for parameter in filled:
            assert parameter.grad is not None
            self._zeros[id(parameter)] = parameter.grad

    def _agree(self, number: int, parameters: list[DTensor]) -> None:
        """Drop gradients that are zeros of all processes.

        The answer is read where this process has sent zeros, or has computed other gradients than in the last update: whatever
        differs then is read by the process that has changed. On the CPU, where reading waits for nothing, it is always read.

        Raises:
            StrategyError: some processes have computed a gradient that others have not, and have sent no zeros for.
        """
        self._updates += 1
        zeros = self._zeros
        computed = [
            _NONE
            if (gradient := parameter.grad) is None or not parameter.requires_grad
            else _ZEROS
            if zeros and zeros.get(id(parameter)) is gradient
            else _OWN
            for parameter in parameters
        ]
        is_new = computed != self._told[number][0]
        with with_values():
            if is_new:
                told = [computed, [_OWN - one for one in computed]]
                self._told[number] = computed, torch.tensor(told, dtype=torch.int8, device=self._device)
            dist.all_reduce(ends := self._told[number][1].clone(), "max", self._data.group)
            is_read = self._device.type == "cpu" or _ZEROS in computed or is_new
            read = zip(parameters, computed, *ends.tolist(), strict=True) if is_read else ()
        for parameter, own, most, least in read:
            if most < _OWN or least:
                self._settle(parameter, own, most, _OWN - least)
        zeros.clear()

    def _settle(self, parameter: DTensor, own: int, most: int, least: int) -> None:
        if least == _NONE < most:
            name, has_none = self._names[id(parameter)], own == _NONE
            frozen = "" if parameter.requires_grad else ", because it is frozen here"
            raise StrategyError(
                f"model.{name}: rank {self._rank} has {f'no gradient{frozen}' if has_none else 'a gradient'} in update "
                f"{self._updates} since the start, and other processes have {'one' if has_none else 'none'}; freeze and thaw a "
                "parameter, and call the modules that train_step calls, on every process alike"
            )
        if most < _OWN:
            parameter.grad = None
        if most == _NONE and not parameter.requires_grad:
            self._trained.discard(id(parameter))


@STRATEGIES.register_module()
class FSDPStrategy(Strategy):
    """Shards parameters, gradients and optimizer state over the processes; a unit is gathered while it computes.

    A model given as dict or callable is never whole in any process: it is built on the meta device and initialised
    parameter by parameter, with the same values as an ordinary construction. A model given as an instance is sharded as
    it is. Buffers are rank 0's at every update, as under DDP. Processes may use different parameters and units;
    what the model's own ``train_step`` calls, every process calls as often and in one order.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023;
    https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    Config = FSDPConfig
    needs = Needs(distributed=True, others=(ANY_DEVICE,))
    short_names = {"fsdp": {}}
    config: FSDPConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._without_memory = ModelWithoutMemory(keep_zeros=self.config.skip_init_weights)
        self._units: list[nn.Module] = []
        self._whole: set[nn.Parameter] = set()  # on every process, with nothing to shard or as users made them
        self._roots: list[FSDPModule] = []
        self._unsettled: list[FSDPModule] = []  # roots that may not have computed yet
        self._kept: list[KeptForDerivatives] = []
        self._sharded: ShardedOptimizers | None = None
        self._noting = NotingErrors()
        self._used: UsedParameters | None = None
        self._float8: Float8Weights | None = None

    @property
    def module(self) -> nn.Module:
        """See Strategy; between micro-batches its parameters are the shards, also after a forward without backward or an error.

        While the model computes, and to another thread than the one that does, they are as they are.
        """
        if self._noting.is_over:
            self._reset_after_error()
            _free(self._gathering())
        return super().module

    def _gathering(self) -> list[FSDPModule]:
        """Return all modules that FSDP gathers. What is kept for backward stays gathered if backward never comes to its root."""
        return [*cast(list[FSDPModule], self._units), *self._roots] if self._roots else []

    def join(self) -> None:
        """See Strategy; a single process creates a process group too, because a device mesh needs one."""
        super().join()
        self._join_alone()

    def _check_world(self, world_size: int) -> None:
        if world_size % self.config.replicate_size:
            raise StrategyError(
                f"strategy.replicate_size: {self.config.replicate_size} does not divide the {world_size} processes"
            )

    def building(self, model: nn.Module | None = None, draws: Tensor | None = None) -> AbstractContextManager[Any]:
        """See Strategy; parameters are on the meta device and take no memory, and calls on such a model are recorded."""
        return self._without_memory.building(model, draws, lambda: super(FSDPStrategy, self).building(model, draws))

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy."""
        self._without_memory.note(model)
        replaced, given = Replaced(model), settings_given(optim, model)
        called, optim = super().setup(model, optim)
        replaced.refuse(self.module, type(self).__name__)
        refuse_other_settings(optim, self.module, given, type(self).__name__)
        await_values(self, self._without_memory.left_at_zero)
        wrappers = [*optim.wrappers.values()] if optim is not None else []
        own_of = [[p for group in wrapper.param_groups for p in group["params"]] for wrapper in wrappers]
        for wrapper, updated in zip(wrappers, own_of, strict=True):
            assert self._sharded is not None
            self._sharded.check(wrapper)
            wrapper.register_backward_pre_hook(self._begin_backward)
            if self._averaged_over().count > 1:
                refuse_added(wrapper, self.module)
                draw_alike(self, wrapper, self._averaged_over())
                if calls_itself(self.module) and not self.config.reduces_always:
                    self._gradient_hooks.append(StepsInTime(wrapper))
            wrapper.register_step_pre_hook(self._check_kept)
            if self._used is not None:
                self._used.register(wrapper)
            if self._float8 is not None:
                wrapper.register_step_pre_hook(lambda _, weights=self._float8: weights.forget())  # type: ignore[misc]
            if own := [p for p in updated if p in self._whole]:
                data = self._averaged_over()
                if data.count > 1 and calls_itself(self.module):
                    self._gradient_hooks.append(OwnMeans(wrapper, lambda own=own: own, data))  # type: ignore[misc]
                else:
                    wrapper.register_step_pre_hook(lambda _, scalars=own, data=data: average(scalars, data))  # type: ignore[misc]
            # What stays gathered would have the weights of before the update, in every forward until it is freed; what no
            # optimizer has would stay so for good. Backward may still come to what only others have.
            known, elsewhere = {*updated}, {p for other in own_of if other is not updated for p in other}
            units = [
                unit
                for unit in self._gathering()
                if not known.isdisjoint(held := [*cast(nn.Module, unit).parameters()]) or elsewhere.isdisjoint(held)
            ]
            wrapper.register_step_pre_hook(lambda _, units=units: _free(units))  # type: ignore[misc]
        return called, optim

    def _arranged(self) -> Arranged:
        advice = "register it before the runner gets the model, or change the gradient in the model's forward"
        return Arranged(hooked=f"which FSDP never calls; {advice}" if self._roots else "")

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        check_real(model, "FSDPStrategy")
        if self.topology.data.count > 1 or self._shards(self._mesh()):
            check_tables(model, type(self).__name__)
        if optim is not None:
            check_dense(model, type(self).__name__)
        if self.config.mixed_precision is not None and self.precision.autocast:
            raise StrategyError(
                "strategy.mixed_precision: the optim_wrapper asks for autocast too, give one of them; with "
                "mixed_precision, OptimWrapper"
            )
        if self.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise StrategyError(
                f'strategy.device: torch {torch.__version__} shards on accelerators only, "cpu" needs torch 2.7'
            )
        self._whole = _left_whole(model)
        if self._whole and "ignored_params" not in inspect.signature(fully_shard).parameters:
            name = next(name for name, parameter in model.named_parameters() if parameter in self._whole)
            raise StrategyError(
                f"model.{name}: has no dimension, no elements, a gradient hook or a class of its own, which FSDP needs torch 2.7 for; "
                "give it one of size 1, or choose DDPStrategy"
            )
        for name, parameter in model.named_parameters() if self.config.own_dtype not in (None, torch.float32) else ():
            if parameter in self._whole and has_shards(parameter):
                raise StrategyError(
                    f"model.{name}: has {'a gradient hook' if gradient_hooks(parameter) else 'a class of its own'}, so that every process "
                    "keeps it as it is, and strategy.mixed_precision computes in another dtype; give AmpOptimWrapper in its place"
                )
        if self.config.offloads and self.device.type == "cpu":
            raise StrategyError('strategy.cpu_offload: everything is in the host\'s memory already on device "cpu"')
        if self.config.skip_init_weights and all(map(has_values, model.parameters())):
            raise StrategyError(
                "strategy.skip_init_weights: has no effect on a model that is given as an instance, give dict(type=...) or a class, or "
                "leave it out"
            )
        if optim is not None:  # for evaluation only, a checkpoint gives the values
            self._without_memory.check_initialised(self.noted.read_later)

    def _place(self, model: nn.Module) -> None:
        """See Strategy; an instance's parameters get rank 0's values, and move to the device when they are sharded."""
        make_contiguous(model)
        share_weights(model, via=self.device)  # an accelerator's processes send faster than their hosts
        for scalar in self._whole:
            if not scalar.is_meta:
                scalar.data = scalar.data.to(self.device)
        for module in model.modules():
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, name, buffer.to(self.device))

    # Wrapping

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh, reshard, others = self._mesh(), self.config.reshards, self._other_meshes()
        self._sharded = ShardedOptimizers(mesh)
        self._whole = _left_whole(model)  # may be others by now
        roots = choose_roots(model)
        chosen = self._choose_units(model)
        self._units = [*others, *(unit for unit in chosen if unit not in (*roots, *others) and unit is not model)]
        if not self._shards(mesh, *others.values()):
            return self._unsharded(model)
        register_divided()
        for unit in (*self._units, *roots):
            check_one_dtype(unit)
            if unit in others and any(
                parameter in self._whole and has_shards(parameter) for parameter in unit.parameters()
            ):
                raise StrategyError(
                    f"model: {type(unit).__name__} has a parameter with a gradient hook or a class of its own, and processes have "
                    "different ones; leave these out, or choose DDPStrategy"
                )
            options = self._options(outermost=unit in roots)
            if any(parameter in self._whole for parameter in unit.parameters()):
                options["ignored_params"] = self._whole
            over = others.get(unit, mesh)
            after = freed_after_forward(reshard, over.size(-1), is_root=unit in roots, is_own_mesh=unit in others)
            with chunks_on_demand():
                fully_shard(unit, mesh=over, reshard_after_forward=after, **options)
        self._roots = [cast(FSDPModule, root) for root in roots]
        self._unsettled = list(self._roots)
        self._materialize(model, on_host=self.config.offloads)
        names = {id(module): name for name, module in model.named_modules()}
        for unit in (*self._units, *roots):
            settle_unit(unit)
            self._kept.append(KeptForDerivatives(unit))
            watch_forward(unit, parameters_of(unit, names), _GATHERED, is_compiled=bool(self.config.compile))
        self._gather_float8(roots)
        if (data := self._averaged_over()).count > 1:
            self._used = UsedParameters(model, (*self._units, *roots), data, self.device, self.topology.rank)
            self._keep_order(roots, names, data)
        if self.config.prefetch is not None:
            for root in roots:
                prefetch(root, self._units, self.config.prefetch)
        self._log_units()
        for root in roots:
            root.register_forward_hook(self._leave_root, always_call=True)
        return model

    def _gather_float8(self, roots: Sequence[nn.Module]) -> None:
        """Let weights of layers that compute in float8 be gathered so; their scales are found once between two updates."""
        freed = self.config.reshards
        if freed is not None and not isinstance(freed, bool):  # shards of a part of the processes have no other form
            return
        weights = Float8Weights((*self._units, *roots), self.device)
        if not len(weights):
            return
        self._float8 = weights
        _logger.info(f"Gathered in float8: {counted(len(weights), 'weight')} of layers that compute so")

        def scale(root: nn.Module, args: Any) -> None:
            # Outside of an update or evaluation somebody may have changed weights since.
            if not (weights.have_scales and self._noting.is_open):
                weights.scale()

        for root in roots:
            hook = torch.compiler.disable(scale) if self.config.compile else scale  # type: ignore[no-untyped-call]
            root.register_forward_pre_hook(hook, prepend=True)  # before FSDP's

    def _materialize(self, model: nn.Module, *, on_host: bool) -> None:
        """Allocate this process's shard of every parameter that has no memory, and initialise it as the constructor does."""
        with swappable(model):
            for whole in model.parameters():
                if whole.is_meta and not isinstance(
                    whole, DTensor
                ):  # modules that share one would each get another below
                    give_memory(whole, torch.zeros_like(whole, device=self.device))
        if any(parameter.is_meta for parameter in model.parameters()):
            home = torch.device("cpu") if on_host else self.device
            # Buffers have their memory already.
            apply_to_tensors(model, lambda t: torch.zeros_like(t, device=home) if t.is_meta else t)
        for module in model.modules():
            if isinstance(module, DeviceFollower):  # of batches, which are on the device wherever parameters are
                module.device = self.device
        self._without_memory.initialise(model, _gather, _scatter)

    def _keep_order(self, roots: Sequence[nn.Module], names: dict[int, str], data: DataShard) -> None:
        """Let all processes gather the units in one order, whichever of them their samples go through."""
        if not self._units and len(roots) == 1 and self.topology.model is None:  # another stage may have some
            return
        group = message_group(data, float(self.config.timeout_s))
        hidden = torch.compiler.disable if self.config.compile else lambda hook: hook
        together = Together(data, self.topology.rank, group, hidden, self._stage, len(roots))
        units = {id(unit) for unit in self._units}
        orders: dict[str, UnitOrder] = {}
        for root in roots:
            for name, holder in reversed([*root.named_modules(prefix=names[id(root)])]):  # inner ones first
                own = {names[id(module)]: module for module in holder.modules() if id(module) in units - {id(holder)}}
                if (own and id(holder) in units) or (holder is root and (own or len(roots) > 1)):
                    orders[name] = UnitOrder(holder, name, own, together, orders)

    def _stage(self) -> Hashable:
        """Return which of the stages that this process has computes now; for subclasses."""
        return None

    def _shards(self, *meshes: DeviceMesh) -> bool:
        """Return whether parameters need FSDP; over meshes of one process it only costs time and memory."""
        return True

    def _unsharded(self, model: nn.Module) -> nn.Module:
        """Return a model whose parameters stay as they are: each of them is on one process, or divided already."""
        self._materialize(model, on_host=False)
        model.to(self.device)
        return model

    def _choose_units(self, model: nn.Module) -> list[nn.Module]:
        # Blocks overlap sending with computing; on the CPU sending computes too, and stages of a pipeline are cut first.
        has_units = self.device.type != "cpu" and self.topology.model is None
        return choose_units(model, self.config, "blocks" if has_units else "model")

    def _mesh(self) -> DeviceMesh:
        data = self.topology.data
        copies = replicas_by_node(data) if self.config.replicates_by_node else self.config.replicate_size
        if data.count % copies:
            raise StrategyError(f"strategy.replicate_size: {copies} does not divide the {data.count} data shards")
        names: tuple[str, ...] = ("replicate", "shard")
        shape: tuple[int, ...] = (copies, data.count // copies)
        if copies == 1:
            names, shape = names[1:], shape[1:]
        with with_values():
            if not self.topology.shares_data:
                return init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            # Every process must create the groups of all processes.
            everyones = sorted(set(dist.all_gather_object(data.ranks)))
            ranks = torch.tensor(everyones).view(-1, *shape)
            return DeviceMesh(self.device.type, ranks, mesh_dim_names=("copy", *names))[names]

    def _other_meshes(self) -> dict[nn.Module, DeviceMesh]:
        """Return the modules to shard over another mesh than the rest, each with its mesh; they are units of their own."""
        return {}

    def _options(self, outermost: bool) -> dict[str, Any]:
        mixed = self.config.mixed_precision
        policy = MixedPrecisionPolicy()
        if mixed is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=mixed.dtype("param_dtype"),
                reduce_dtype=mixed.dtype("reduce_dtype"),
                # Between units, activations stay in the compute dtype.
                output_dtype=mixed.dtype("output_dtype") if outermost else None,
                cast_forward_inputs=mixed.cast_forward_inputs,
            )
        offload = CPUOffloadPolicy() if self.config.offloads else OffloadPolicy()
        return {"mp_policy": policy, "offload_policy": offload}

    def _log_units(self) -> None:
        units = (*reversed(self._units), *(cast(nn.Module, root) for root in self._roots))
        if kept := [name for name, p in self.module.named_parameters() if p in self._whole and has_shards(p)]:
            _logger.warning(
                f"model.{kept[0]}{f' and {len(kept) - 1} more' if kept[1:] else ''}: with a gradient hook or a class of its own, every "
                "process keeps the whole of it, with its optimizer state"
            )
        _logger.info(f"FSDP units with their parameters: {described(units)}")
        if self.precision.autocast:
            _logger.info(
                f"Autocast to {self.precision.compute} gathers parameters in float32; "
                "strategy.mixed_precision=dict(param_dtype=...) is faster and sends half as much"
            )

    def _compile(self, model: nn.Module) -> None:
        units = [unit for unit in self._units if unit not in self._other_meshes()]
        parts = units or [cast(nn.Module, root) for root in self._roots]
        if not parts:  # FSDP was not needed
            super()._compile(model)
            return
        compile_in_place(parts, self.config.compile if isinstance(self.config.compile, dict) else {})

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """See Strategy; without autocast's cache, which would hold a copy of the whole model."""
        if not self.precision.autocast:
            return NOTHING
        return torch.autocast(self.device.type, self.precision.compute, cache_enabled=False)  # type: ignore[no-any-return,unused-ignore]

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """See Strategy; uses FSDPModule.set_requires_gradient_sync."""
        self._reset_after_error()
        if self._noting.is_final:
            raise StrategyError(
                f"strategy: an error ended backward, after which FSDP of torch {torch.__version__} cannot go on; start again"
            )
        if enabled or self.config.reduces_always:
            return self._noting
        return self._without_reduction()

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        try:
            with self._noting:
                yield
        finally:
            for root in self._roots:
                root.set_requires_gradient_sync(True)

    def _reset_after_error(self) -> None:
        """Free what was gathered when an error ended a forward or backward; not at once, because it may wait for others."""
        if self._noting.has_seen:
            self._noting.has_seen = False
            for root in self._roots:
                self._noting.is_final |= not reset_after_error(cast(nn.Module, root))

    def evaluate(self, batch: Any, step: EvalStep) -> Any:
        """See Strategy; a model may be evaluated by parts before it was called as a whole."""
        with self._computing():
            return super().evaluate(batch, step)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Context of what calls the model outside of an update."""
        self._reset_after_error()
        for root in self._unsettled:
            settle_root(cast(nn.Module, root))
        self._unsettled = []
        self._forget_scales()  # a comparison of the first batch computes with other weights
        try:
            with self._noting:
                yield
        finally:
            self._forget_scales()  # a checkpoint or a hook may change the weights before the next batch

    def _forget_scales(self) -> None:
        if self._float8 is not None:
            self._float8.forget()

    def _begin_backward(self, loss: Tensor) -> None:
        if loss.requires_grad and self._kept:
            loss.register_hook(self._go_on)  # type: ignore[no-untyped-call]

    def _go_on(self, _: Tensor) -> None:
        for kept in self._kept:
            kept.begin()

    def _check_kept(self, optim: OptimWrapper) -> None:
        if any(kept.has_gradients() for kept in self._kept):
            raise StrategyError(
                "model: train_step computes gradients of gradients (create_graph=True) past optim_wrapper, which FSDP would not average; "
                "call optim_wrapper.backward(loss) or update_params(loss)"
            )

    def abort_update(self) -> None:
        """See Strategy."""
        if self._roots:
            raise kept_gradients("FSDP")
        super().abort_update()

    def _leave_root(self, root: nn.Module, args: Any, output: Any) -> None:
        """Free all units after an evaluation forward; in training they stay gathered for backward, if they do."""
        if output is None:
            self._noting.has_seen = True
        elif not torch.is_grad_enabled():
            _free(cast(Iterable[FSDPModule], (*self._units, root)))

    # State

    def _state_like(self, wrapper: OptimWrapper, parameter: Tensor, key: str, info: Any) -> Tensor:
        found = None if self._sharded is None else self._sharded.empty_state(wrapper, parameter, key, info)
        return super()._state_like(wrapper, parameter, key, info) if found is None else found

    # Precision

    def precision_report(self) -> PrecisionReport:
        """See Strategy."""
        report, mixed = super().precision_report(), self.config.mixed_precision
        if mixed is None:
            return report
        return PrecisionReport(
            (mixed.dtype("param_dtype"),),
            report.parameters,
            report.masters,
            (mixed.dtype("reduce_dtype"),),
            report.optimizer_state,
        )

    def leave(self) -> None:
        """See Strategy."""
        super().leave()
        self._units, self._roots, self._unsettled, self._kept, self._used, self._float8 = [], [], [], [], None, None


@construct.register(FSDPStrategy)
def _(
    strategy: FSDPStrategy, make: Callable[[], nn.Module], initialise: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """See ``construct``; a model that looks at the values of its parameters is built with memory."""
    build = partial(construct.dispatch(object), strategy, make, initialise)
    return strategy._without_memory.build(build, strategy.device, strategy.launch.local_rank)


@prepare_whole.register(FSDPStrategy)
def _(strategy: FSDPStrategy, model: nn.Module) -> torch.dtype | None:
    mixed = strategy.config.mixed_precision
    if mixed is None or (dtype := mixed.dtype("param_dtype")) is None:
        return None
    gives = mixed.dtype("output_dtype")
    if mixed.cast_forward_inputs:
        model.register_forward_pre_hook(lambda _, *given: _cast(given, dtype), with_kwargs=True)
    if gives is not None:
        model.register_forward_hook(lambda _, args, output: _cast(output, gives))
    return dtype


@choices.register(FSDPStrategy)
def _(strategy: FSDPStrategy) -> list[str]:
    found = choices.dispatch(Strategy)(strategy)
    inner = strategy.config.model_wrapper
    is_open = strategy.config.wrap is None and (inner is None or inner.auto_wrap_policy is None)
    return ['FSDP units by blocks (strategy.wrap="model")', *found] if is_open and strategy._units else found


@explain.register(FSDPStrategy)
def _(strategy: FSDPStrategy, error: BaseException) -> str | None:
    if (changed := explain.dispatch(Strategy)(strategy, error)) is not None:
        return changed
    if "got mixed torch.Tensor and DTensor" in str(error):
        if "_foreach_norm" in str(error):
            return "some parameters are divided and others are not: optim_wrapper.clip_grad=dict(max_norm=...) clips by the norm of all"
        return (
            "parameters are sharded while the model is not called: call it as a whole, self(...) and not self.forward(...), and "
            "compute in its forward what needs parameters; to generate text, call runner.generate(); a module that computes with "
            "parameters of another one, and a model that asks for gradients in its forward, as torch.autograd.grad does, need "
            'strategy.wrap="model"'
        )
    if "setStorage" in str(error) and "out of bounds" in str(error):
        return (
            "something computes with parameters that FSDP has freed after their unit's forward or backward: give "
            'strategy.wrap="model", or strategy.reshard_after_forward=False; in a train_step, let one call of the whole model, '
            "self(...), compute such a loss, or choose DDPStrategy"
        )
    if "sparse" in str(error):
        return (
            "gradients are sparse, which cannot be divided: give sparse=False to what makes them, or choose DDPStrategy"
        )
    if "in-place operations that require placement changes" in str(error):
        return (
            "a module writes into a tensor of which processes have shards, as torch.nn.utils.spectral_norm does; compute out "
            "of place, as torch.nn.utils.parametrizations.spectral_norm does"
        )
    if "FSDP does not support deepcopy" in str(error) or "cannot pickle 'torch._C._distributed_c10d" in str(error):
        return (
            "a sharded model cannot be copied (copy.deepcopy, torch's AveragedModel): EMAHook keeps averages for validation, and a copy that "
            "trains with the model is made in its __init__"
        )
    mixed = strategy.config.mixed_precision
    return None if mixed is None else explain_dtypes(error, mixed.dtype("param_dtype"))


def _free(units: Iterable[FSDPModule]) -> None:
    for unit in units:
        unit.reshard()


def _gather(parameter: nn.Parameter) -> Tensor:
    target = parameter.detach()
    return (full_tensor(target) if isinstance(target, DTensor) else target).cpu()


def _scatter(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this process's shard of a tensor that every process has."""
    target = parameter.detach()
    if isinstance(target, DTensor):
        fill(target, whole)
    else:
        target.copy_(whole)


def _left_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are not sharded: without elements or dimensions, or such as only users know.

    A gradient hook needs the whole gradient, and may read or write its parameter; so may what looks at the class of one.
    """
    return {p for p in model.parameters() if not has_shards(p) or gradient_hooks(p) or is_subclass(p)}


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with every floating-point tensor in ``dtype``, as FSDP casts what a module gets and gives."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values)
