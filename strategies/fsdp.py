"""Every process keeps a part of each parameter: fully sharded data parallelism through torch's fully_shard (FSDP2)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, cast

import pydantic
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..core.comm import collectives as dist
from ..core.config import Config, PositiveInt
from ..core.deferred import DeferredInit, Place, same_random_state
from ..core.errors import ConfigError, StrategyError, one_of, suggest
from ..core.gradients import average
from ..core.model import BaseModel, overrides
from ..core.norms import keeps_statistics
from ..core.precision import PrecisionReport, to_dtype
from ..core.registry import STRATEGIES
from ..core.torch_private import apply_to_tensors, settle_unit, storage_key
from ..core.transforms import compile_in_place, module_filter
from ..optim.wrapper import OptimWrapper
from .base import NOTHING, Optim, Strategy, StrategyConfig, kept_gradients
from .sharded_optimizers import ShardedOptimizers

_logger = logging.getLogger("flextrain")

# FSDP1's and MMEngine's keys that have no counterpart, and what to do instead.
_REFUSED = {
    "process_group": "processes are arranged by strategy.replicate_size",
    "ignored_modules": "every parameter is sharded",
    "ignored_states": "every parameter is sharded",
    "ignored_parameters": "every parameter is sharded",
    "param_init_fn": "a model given as dict or callable is initialised as its constructor says",
    "device_id": "give strategy.device",
}
# Those that say what is always so, with the value that says it.
_ALWAYS = {"use_orig_params": True, "sync_module_states": True, "limit_all_gathers": True}
_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


class MixedPrecision(Config):
    """Dtypes by name ("bfloat16") or as torch's; parameters are stored and updated in float32."""

    param_dtype: str | torch.dtype | None = None
    """Of forward and backward, and of the parameters that are gathered for them."""
    reduce_dtype: str | torch.dtype | None = None
    """In which gradients are reduced; None: float32."""
    output_dtype: str | torch.dtype | None = None
    """Of what the model returns; None: float32."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of every unit to param_dtype."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> MixedPrecision:
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            if (value := getattr(self, key)) is not None:
                to_dtype(value, f"strategy.mixed_precision.{key}")
        if self.param_dtype is not None and to_dtype(self.param_dtype, "") is torch.float16:
            raise ConfigError(
                "strategy.mixed_precision.param_dtype: float16 needs loss scaling, choose bfloat16, or "
                'optim_wrapper=dict(type="AmpOptimWrapper", dtype="float16")'
            )
        return self

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of one of the keys; float32 where none is given."""
        value = getattr(self, key)
        return torch.float32 if value is None else to_dtype(value, f"strategy.mixed_precision.{key}")


class WrapperConfig(Config):
    """MMEngine's ``model_wrapper``: arguments of torch's older FullyShardedDataParallel."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True, arbitrary_types_allowed=True)

    type: Any = None
    auto_wrap_policy: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    mixed_precision: Any = None

    @pydantic.model_validator(mode="after")
    def _translatable(self) -> WrapperConfig:
        where = "strategy.model_wrapper"
        name = getattr(self.type, "__name__", self.type)
        if name not in (None, "MMFullyShardedDataParallel", "FullyShardedDataParallel"):
            raise ConfigError(f'{where}.type: "{name}" is not allowed, FSDPStrategy wraps with fully_shard')
        known = [*type(self).model_fields, *_REFUSED, *_ALWAYS, "backward_prefetch", "forward_prefetch"]
        for key, value in (self.model_extra or {}).items():
            if key in _REFUSED and value is not None:
                raise ConfigError(f"{where}.{key}: has no counterpart, {_REFUSED[key]}; leave it out")
            if key in _ALWAYS and value not in (None, _ALWAYS[key]):
                raise ConfigError(f"{where}.{key}: {value} is not allowed, it is always {_ALWAYS[key]}")
            if key in ("backward_prefetch", "forward_prefetch") and value not in (None, False):
                raise ConfigError(f"{where}.{key}: has no counterpart, give strategy.prefetch; leave it out")
            if key not in known:
                raise ConfigError(f"{where}.{key}: unknown key{suggest(key, known) or f', choose {one_of(known)}'}")
        name = getattr(self.sharding_strategy, "name", self.sharding_strategy)
        if name == "NO_SHARD":
            raise ConfigError(f'{where}.sharding_strategy: NO_SHARD shards nothing, choose strategy.type="DDPStrategy"')
        if name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            raise ConfigError(f"{where}.sharding_strategy: {name} is not allowed, give strategy.replicate_size")
        if name not in (None, *_RESHARD):
            raise ConfigError(f'{where}.sharding_strategy: "{name}" is not allowed, choose {one_of(_RESHARD)}')
        policy = self.auto_wrap_policy
        if policy is not None and not callable(policy):
            raise ConfigError(
                f"{where}.auto_wrap_policy: {type(policy).__name__} is not allowed, give a function of "
                "torch.distributed.fsdp.wrap, or strategy.wrap"
            )
        return self

    @property
    def reshards(self) -> bool | None:
        """What the sharding strategy says about the time after forward."""
        return _RESHARD.get(getattr(self.sharding_strategy, "name", self.sharding_strategy))

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept on the CPU."""
        return bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload))


class FSDPConfig(StrategyConfig):
    """Options of FSDPStrategy."""

    model_wrapper: WrapperConfig | None = None
    """MMEngine's place for ``auto_wrap_policy`` and the like."""
    wrap: Literal["blocks"] | list[str] | Callable[..., bool] | None = None
    """Which submodules are units, gathered and freed at once: "blocks" (the repeated ones), names of classes, or a function
    of the submodule. None: the model as a whole is one."""
    reshard_after_forward: bool | int | None = None
    """Free gathered parameters between forward and backward; an int: keep them on groups of so many processes. None: for
    every unit but the outermost, which backward begins with."""
    mixed_precision: MixedPrecision | None = None
    """Compute in another dtype than float32; faster than AmpOptimWrapper."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the memory of the host."""
    replicate_size: PositiveInt = 1
    """Copies of the sharded model (hybrid sharding): each is spread over world_size / replicate_size processes."""
    prefetch: PositiveInt | None = None
    """Units that are gathered ahead of the one that computes; None: torch's own choice, one."""
    reduce_every_micro_batch: bool = False
    """While micro-batches accumulate, reduce the gradients of each at once: saves memory and costs communication."""
    skip_init_weights: bool = False
    """Leave the parameters of a model given as dict or callable at zero, because a checkpoint is loaded."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _older_keys(cls, given: Any) -> Any:
        for key in ("state_dict_cfg", "optim_state_dict_cfg"):
            if isinstance(given, dict) and given.get(key) is not None:
                raise ConfigError(f"strategy.{key}: checkpoints are sharded and fit every strategy, leave it out")
        if isinstance(given, dict):
            return {
                key: value for key, value in given.items() if not key.endswith("state_dict_cfg") or value is not None
            }
        return given

    @pydantic.model_validator(mode="after")
    def _one_home(self) -> FSDPConfig:
        if self.skip_init_weights and self.exclude_frozen_parameters:
            raise ConfigError(
                "strategy.exclude_frozen_parameters: a checkpoint without them leaves them at zero with "
                "strategy.skip_init_weights=True, give one of them"
            )
        inner = self.model_wrapper
        if inner is None:
            return self
        if inner.auto_wrap_policy is not None and self.wrap is not None:
            raise ConfigError("strategy.model_wrapper.auto_wrap_policy: strategy.wrap is given too, give one of them")
        if inner.reshards is not None and self.reshard_after_forward not in (None, inner.reshards):
            raise ConfigError(
                "strategy.model_wrapper.sharding_strategy: disagrees with "
                f"strategy.reshard_after_forward={self.reshard_after_forward}, give one of them"
            )
        if inner.mixed_precision is not None:
            raise ConfigError(
                "strategy.model_wrapper.mixed_precision: give strategy.mixed_precision=dict(param_dtype=..., "
                "reduce_dtype=...)"
            )
        return self

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept on the host, from both places."""
        return self.cpu_offload or bool(self.model_wrapper and self.model_wrapper.offloads)

    @property
    def reshards(self) -> bool | int | None:
        """What happens after forward, from both places."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.model_wrapper.reshards if self.model_wrapper else None


@STRATEGIES.register_module()
class FSDPStrategy(Strategy):
    """Parameters, gradients and optimizer state in parts, one per process; a unit is gathered while it computes.

    A model given as dict or callable is never whole in any process: it is built without memory and initialised parameter
    by parameter, with the values that an ordinary construction would give. A model given as an instance is sharded as it
    is. Buffers are rank 0's at every update, as under DDP.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023;
    https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    Config = FSDPConfig
    config: FSDPConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deferred = DeferredInit()
        self._units: list[nn.Module] = []
        self._scalars: set[nn.Parameter] = set()  # without a dimension to shard; whole in every process
        self._roots: list[FSDPModule] = []
        self._sharded: ShardedOptimizers | None = None

    @property
    def module(self) -> nn.Module:
        """See Strategy; its parameters are the sharded ones, also after a forward that no backward followed."""
        for root in self._roots:
            root.reshard()
        return super().module

    def setup_environment(self) -> None:
        """See Strategy; one process alone forms a group too, which a device mesh needs."""
        super().setup_environment()
        self._join_alone()

    def _check_world(self, world_size: int) -> None:
        if world_size % self.config.replicate_size:
            raise StrategyError(
                f"strategy.replicate_size: {self.config.replicate_size} does not divide the {world_size} processes"
            )

    def init_context(self) -> AbstractContextManager[Any]:
        """See Strategy; parameters take no memory."""
        return self._deferred

    def init_weights(self, model: BaseModel) -> None:
        """See Strategy; noted like the constructor's doing."""
        with self._deferred if any(parameter.is_meta for parameter in model.parameters()) else NOTHING:
            model.init_weights()

    def setup(self, model: nn.Module, optim: Optim | None = None) -> tuple[nn.Module, Optim | None]:
        """See Strategy."""
        self._built = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.is_meta}
        called, optim = super().setup(model, optim)
        for wrapper in optim.wrappers.values() if optim is not None else ():
            assert self._sharded is not None
            self._sharded.check(wrapper)
            if self.world_size > 1:
                own = [p for group in wrapper.param_groups for p in group["params"] if p.ndim == 0]
                if own:
                    wrapper.register_step_pre_hook(lambda _, scalars=own: average(scalars))  # type: ignore[misc]
        return called, optim

    def _check_request(self, model: nn.Module, optim: Optim | None) -> None:
        if self.precision.param is not None:
            raise StrategyError(
                f"optim_wrapper: stores parameters in {self.precision.param}, FSDPStrategy stores them in float32 and "
                "computes in strategy.mixed_precision.param_dtype"
            )
        if self.config.mixed_precision is not None and self.precision.autocast:
            raise StrategyError(
                "strategy.mixed_precision: the optim_wrapper asks for autocast too, give one of them; with "
                "mixed_precision, OptimWrapper"
            )
        if self.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise StrategyError(
                f'strategy.device: torch {torch.__version__} shards on accelerators only, "cpu" needs torch 2.7'
            )
        self._scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
        if self._scalars and "ignored_params" not in inspect.signature(fully_shard).parameters:
            name = next(name for name, parameter in model.named_parameters() if parameter.ndim == 0)
            raise StrategyError(
                f"model.{name}: has no dimension, which FSDP needs torch 2.7 for; give it one of size 1"
            )
        if self.config.offloads and self.device.type == "cpu":
            raise StrategyError('strategy.cpu_offload: everything is in the host\'s memory already on device "cpu"')
        untouched = self._built.keys() - self._initialised()
        # A model that is only evaluated has them from a checkpoint.
        if untouched and optim is not None and not self.config.skip_init_weights:
            raise StrategyError(
                f"model.{min(untouched)}: is built without memory and nothing initialises it, do it in the constructor "
                "or BaseModel's init_weights, or give the model as an instance"
            )

    def _initialised(self) -> set[str]:
        touched = self._deferred.touched
        return {name for name, parameter in self._built.items() if storage_key(parameter) in touched}

    def _place(self, model: nn.Module) -> None:
        """See Strategy; the parameters of an instance are made equal and stay where they are until they are sharded."""
        dist.broadcast_tensors([t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta])
        for scalar in self._scalars:
            if not scalar.is_meta:
                scalar.data = scalar.data.to(self.device)
        for module in model.modules():
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, name, buffer.to(self.device))

    # Wrapping

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh, reshard = self._mesh(), self.config.reshards
        self._sharded = ShardedOptimizers(mesh)
        # A model with its own train_step is not called as a whole: each of its children is a model of its own.
        roots = [model]
        if overrides(model, "train_step"):
            roots = [child for child in model.children() if any(True for _ in child.parameters())]
            own = next((name for name, _ in model.named_parameters(recurse=False)), None)
            if own is not None:
                raise StrategyError(
                    f"model.{own}: belongs to {type(model).__name__} itself, whose train_step calls its children only; "
                    "move it into one of them"
                )
        self._units = [unit for unit in self._choose(model) if unit not in roots and unit is not model]
        for unit in (*self._units, *roots):
            kinds = {parameter.dtype for parameter in unit.parameters()}
            if len(kinds) > 1:
                names = ", ".join(sorted(map(str, kinds)))
                raise StrategyError(f"model: {type(unit).__name__} has parameters of {names}, FSDP needs one dtype")
            options = self._options(outermost=unit in roots)
            if any(parameter in self._scalars for parameter in unit.parameters()):
                options["ignored_params"] = self._scalars
            # Spelled out: torch 2.6 takes no None.
            after = unit not in roots if reshard is None else reshard
            fully_shard(unit, mesh=mesh, reshard_after_forward=after, **options)
        self._roots = [cast(FSDPModule, root) for root in roots]
        if self._built:
            self._materialize(model)
        for unit in (*self._units, *roots):
            settle_unit(unit)
        self._prefetch()
        self._log_units(model)
        for root in roots:
            root.register_forward_hook(_free_after_evaluation)
            if any(keeps_statistics(module) for module in root.modules()) and self.world_size > 1:
                root.register_forward_pre_hook(self._share_buffers)
        return model

    def _mesh(self) -> DeviceMesh:
        copies = self.config.replicate_size
        if copies == 1:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        shape = (copies, self.world_size // copies)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def _options(self, outermost: bool) -> dict[str, Any]:
        mixed = self.config.mixed_precision
        policy = MixedPrecisionPolicy()
        if mixed is not None:
            policy = MixedPrecisionPolicy(
                param_dtype=mixed.dtype("param_dtype"),
                reduce_dtype=mixed.dtype("reduce_dtype"),
                # Between units the values stay in the dtype that is computed in.
                output_dtype=mixed.dtype("output_dtype") if outermost else None,
                cast_forward_inputs=mixed.cast_forward_inputs,
            )
        offload = CPUOffloadPolicy() if self.config.offloads else OffloadPolicy()
        return {"mp_policy": policy, "offload_policy": offload}

    def _choose(self, model: nn.Module) -> list[nn.Module]:
        """The units beside the model as a whole, inner ones first."""
        wrapper, wrap = self.config.model_wrapper, self.config.wrap
        policy = wrapper.auto_wrap_policy if wrapper else None
        if policy is not None:
            where, units = "strategy.model_wrapper.auto_wrap_policy", list(_by_policy(model, policy)[0])
        elif wrap == "blocks":
            where, units = "strategy.wrap", repeated_blocks(model)
        elif wrap is not None:
            where = "strategy.wrap"
            accepts = module_filter(cast(Any, wrap), model, where)
            units = [module for module in reversed(list(model.modules())) if module is not model and accepts(module)]
        else:
            return []
        if not units:
            sizes = [(_numel(module), type(module).__name__) for module in model.modules() if module is not model]
            size, name = max(sizes, default=(0, "none"))
            raise ConfigError(
                f"{where}: accepts no submodule of {type(model).__name__}, the largest is a {name} with {size:,} parameters; "
                'give strategy.wrap=["<name of a class>"], or leave it out to make the model one unit'
            )
        return _without_ties(model, [unit for unit in units if any(True for _ in unit.parameters())])

    def _prefetch(self) -> None:
        ahead = self.config.prefetch
        if ahead is None:
            return
        # In the order of the model, which is the order of forward in all but unusual models.
        order = [cast(FSDPModule, m) for m in self.module.modules() if any(m is unit for unit in self._units)]
        for i, unit in enumerate(order):
            unit.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead])
            unit.set_modules_to_backward_prefetch(order[max(0, i - ahead) : i][::-1])

    def _log_units(self, model: nn.Module) -> None:
        counts: dict[tuple[str, int], int] = {}
        for unit in (*reversed(self._units), *(cast(nn.Module, root) for root in self._roots)):
            name = type(unit).__name__.removeprefix("FSDP")
            counts[name, _numel(unit)] = counts.get((name, _numel(unit)), 0) + 1
        parts = [f"{number} x {name} ({size:,})" for (name, size), number in counts.items()]
        _logger.info(f"FSDP units with their parameters: {', '.join(parts)}")
        if self.precision.autocast:
            _logger.info(
                f"Autocast to {self.precision.compute} gathers parameters in float32; "
                "strategy.mixed_precision=dict(param_dtype=...) is faster and sends half as much"
            )

    def _compile(self, model: nn.Module) -> None:
        options = self.config.compile if isinstance(self.config.compile, dict) else {}
        compile_in_place(self._units or [cast(nn.Module, root) for root in self._roots], options)

    # A model without memory

    def _materialize(self, model: nn.Module) -> None:
        """Give every parameter memory for this process's part of it, and the values that the constructor wanted."""
        for scalar in self._scalars:
            if scalar.is_meta:  # in place, since several modules may have it
                real = nn.Parameter(torch.zeros_like(scalar, device=self.device), requires_grad=scalar.requires_grad)
                torch.utils.swap_tensors(scalar, real)  # type: ignore[no-untyped-call]
        device = torch.device("cpu") if self.config.offloads else self.device
        # Buffers have their memory already.
        apply_to_tensors(model, lambda t: torch.zeros_like(t, device=device) if t.is_meta else t)
        places: dict[int, Place] = {}
        for name, built in self._built.items():
            target = model.get_parameter(name).detach()
            places[storage_key(built)] = Place(built, partial(_gather, target), partial(_scatter, target))
        if not self.config.skip_init_weights:
            with same_random_state(dist.broadcast(torch.get_rng_state())):
                self._deferred.replay(places)
        self._built = {}

    # Around a micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        """See Strategy; casts are not kept, they would be a copy of the whole model."""
        if not self.precision.autocast:
            return NOTHING
        return torch.autocast(self.device.type, self.precision.compute, cache_enabled=False)  # type: ignore[no-any-return,unused-ignore]

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """See Strategy; FSDPModule.set_requires_gradient_sync."""
        if enabled or self.config.reduce_every_micro_batch:
            return NOTHING
        return self._without_reduction()

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for root in self._roots:
                root.set_requires_gradient_sync(True)

    def drop_gradients(self) -> None:
        """See Strategy."""
        raise kept_gradients("FSDP")

    def _share_buffers(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            dist.broadcast_tensors(
                [b for m in module.modules() if keeps_statistics(m) for b in m.buffers(recurse=False)]
            )

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

    def teardown(self) -> None:
        """See Strategy."""
        super().teardown()
        self._units, self._roots = [], []


def _free_after_evaluation(root: nn.Module, args: Any, output: Any) -> None:
    """The outermost unit stays gathered for the backward to come; in evaluation there is none."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, root).reshard()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost submodules that stand in a ModuleList or Sequential beside others of their class, and have parts."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and container not in inside:
            kinds = [type(child) for child in container]
            blocks = [c for c in container if kinds.count(type(c)) > 1 and any(True for _ in c.children())]
            found += blocks
            inside.update(part for block in blocks for part in block.modules())
    return [block for block in found if any(True for _ in block.parameters())]


def _without_ties(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The units that share no parameter with a module outside of them; a shared one belongs to an outer unit."""
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(module)
    return [unit for unit in units if all(owners[id(p)] <= set(unit.modules()) for p in unit.parameters())]


def _by_policy(module: nn.Module, policy: Callable[..., bool]) -> tuple[list[nn.Module], int]:
    """The submodules that a policy of torch.distributed.fsdp.wrap accepts, inner ones first, and their parameters' number.

    Such a policy is asked with ``recurse=True`` whether to look into a module, and with ``recurse=False`` whether the module
    is a unit, given the number of its parameters that no inner unit has.
    """
    size = _numel(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=size):
        return [], 0
    units: list[nn.Module] = []
    taken = 0
    for child in module.children():
        inner, numel = _by_policy(child, policy)
        units += [unit for unit in inner if unit not in units]
        taken += numel
    if policy(module=module, recurse=False, nonwrapped_numel=size - taken):
        return [*units, module], size
    return units, taken


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _gather(target: Tensor) -> Tensor:
    return (target.full_tensor() if isinstance(target, DTensor) else target).cpu()


def _scatter(target: Tensor, whole: Tensor) -> None:
    """Keep this process's part of a tensor that every process has."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    for dim, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            parts = whole.chunk(target.device_mesh.size(dim), placement.dim)
            place = target.device_mesh.get_local_rank(dim)
            whole = parts[place] if place < len(parts) else whole.narrow(placement.dim, 0, 0)
    target.to_local().copy_(whole)
