"""DeepSpeed's private state: reads the inside of its engine, written for and tested with 0.19.8; swapping.py does the rest.

- Stage 0 in float32 updates the model's parameters themselves. In half precision ``FP16_UnfusedOptimizer`` keeps a float32
  master of each parameter, ``FP16_Optimizer`` (for FusedAdam) one flat master of each group.
- Stages 1 and 2 flatten each group and give every process one shard of it: ``p._hp_mapping`` maps a part of the
  parameter to its place in ``single_partition_of_fp32_groups``.
- Stage 3 cuts every parameter into equal shards (``p.ds_tensor``, the last one padded); the masters of a sub-group's
  shards are ``fp32_partitioned_groups_flat[i]``, and ``grad_position`` has the offset of each shard.

The torch optimizer's state belongs to the flat tensors, so all parameters in a flat tensor share a step counter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ...core.base.errors import StrategyError
from ...core.checkpoint.chunks import FlatShard
from ...core.comm import collectives as dist
from . import swapping


@dataclass(frozen=True)
class Fragment:
    """This process's shard of a trainable parameter, as a range of the engine's flat tensor.

    Attributes:
        name: the parameter's name in the user's model.
        parameter: the model's parameter.
        shape: shape of the whole parameter.
        start, numel: the shard, as a range of the flattened parameter.
        flat: the tensor that the torch optimizer updates, which contains the shard at ``offset``.
        offset: None if ``flat`` is the whole parameter, or this process's FlatShard of it, in its shape.
        group: index of the torch optimizer's group.
        is_whole: whether every process has the whole parameter.
    """

    name: str
    parameter: Tensor
    shape: torch.Size
    start: int
    numel: int
    flat: Tensor
    offset: int | None
    group: int
    is_whole: bool

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the shard of a tensor with the layout of ``flat``, as a view."""
        tensor = tensor.detach()
        if self.offset is None:
            return tensor
        local = tensor.narrow(0, self.offset, self.numel)
        return local.view(self.shape) if self.is_whole else FlatShard(local, self.shape, self.start)

    def take(self, whole: Tensor) -> None:
        """Fill the shard from the whole parameter, or from the same shard."""
        fragment = self.cut(self.flat)
        if isinstance(fragment, FlatShard) and isinstance(whole, FlatShard):
            fragment.copy_(whole)
        elif isinstance(fragment, FlatShard):
            fragment.to_local().copy_(whole.detach().reshape(-1)[self.start : self.start + self.numel])
        else:
            fragment.copy_(whole)

    def copy_in_model(self) -> Tensor:
        """Return the shard's values in the model, in the dtype that it computes in."""
        if is_partitioned(self.parameter):
            return own_shard(self.parameter).to_local()
        flat = self.parameter.detach().reshape(-1)
        return flat[self.start : self.start + self.numel]


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether the parameter is sharded, as by stage 3."""
    return hasattr(parameter, "ds_tensor")


def own_shard(parameter: Any) -> FlatShard:
    """Return this process's shard of a parameter of stage 3, in the dtype that the model computes in."""
    in_file = swapping.is_in_file(parameter)
    shard = swapping.shard_in_file(parameter) if in_file else parameter.ds_tensor.detach().view(-1)
    size, count = shard.numel(), int(parameter.ds_numel)
    start = min(size * dist.rank_in(parameter.ds_process_group), count)
    return FlatShard(shard.narrow(0, 0, min(size, count - start)), parameter.ds_shape, start)


def gathering_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose parameters stage 3 gathers when they are called, by name: with leaf modules as a whole."""
    from deepspeed.utils import z3_leaf_module

    leaves = [module for module in model.modules() if z3_leaf_module(module)]
    inside = {id(part) for leaf in leaves for part in leaf.modules() if part is not leaf}
    found = {name: module for name, module in model.named_modules() if id(module) not in inside and module is not model}
    return {n: m for n, m in found.items() if m in leaves or any(True for _ in m.parameters(recurse=False))}


def is_gathered_next(module: nn.Module) -> bool:
    """Return whether stage 3 has parameters of the module to gather when it is called now.

    Small ones stay whole, but not always: one that two modules share, or of a module that the last forward left out, does not.
    """
    from deepspeed.utils import z3_leaf_module

    parameters: Iterable[Any] = module.parameters(recurse=z3_leaf_module(module))
    return any(is_partitioned(parameter) and parameter.ds_status.name != "AVAILABLE" for parameter in parameters)


def call_when_freed(parameter: Any, call: Callable[[Any], None]) -> None:
    """Call ``call(parameter)`` whenever stage 3 has freed the parameter, and now if it is."""
    from deepspeed.runtime.zero import partition_parameters

    parameter.when_freed = call
    if parameter.ds_status.name == "NOT_AVAILABLE":
        call(parameter)
    free = partition_parameters.free_param
    if not isinstance(free, partial):
        partition_parameters.free_param = partial(_free, free)


def _free(by_deepspeed: Callable[[Any], None], parameter: Any) -> None:
    by_deepspeed(parameter)
    if (call := getattr(parameter, "when_freed", None)) is not None:
        call(parameter)


def gathered_small(parameter: Any) -> bool:
    """Return whether stage 3 leaves the parameter whole because it is small; its shard has the values that updates change."""
    return is_partitioned(parameter) and parameter.ds_persist and parameter.ds_status.name == "AVAILABLE"


def gather_small(parameters: Iterable[Any]) -> None:
    """Gather again, from their shards, those of stage 3 that stay whole because they are small; a collective."""
    whole = [parameter for parameter in parameters if gathered_small(parameter)]
    if whole:
        whole[0].partition(whole)
        whole[0].all_gather(whole)


def cast_shard(parameter: Any, dtype: torch.dtype) -> None:
    """Cast this process's shard of a parameter to another dtype; one in a file is written again by ``renew_buffers``."""
    if not swapping.is_in_file(parameter):
        parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)
    parameter.data = parameter.data.to(dtype)


def inner_optimizer(engine: Any) -> Optimizer:
    """Return the torch optimizer inside DeepSpeed's optimizer."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)  # type: ignore[no-any-return]


def flat_tensors(engine: Any) -> list[Tensor]:
    """Return the tensors that stages 1 to 3 let the torch optimizer update, one in each of its steps."""
    optimizer = engine.optimizer
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return optimizer.single_partition_of_fp32_groups if flats is None else flats  # type: ignore[no-any-return]


def fragments(engine: Any, module: nn.Module) -> list[Fragment]:
    """Return this process's shards of all trainable parameters, empty ones included."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _stage_3(optimizer, names)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _stage_1_and_2(optimizer, names)
    if hasattr(optimizer, "fp32_groups_flat"):
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
        return [f for i, (group, flat) in enumerate(groups) for f in _flattened(group, flat, i, names)]
    lows = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    masters = getattr(optimizer, "fp32_groups", None) or lows
    return [
        Fragment(names[id(low)], low, low.shape, 0, low.numel(), master, None, i, True)
        for i, (low_group, master_group) in enumerate(zip(lows, masters, strict=True))
        for low, master in zip(low_group, master_group, strict=True)
    ]


def _stage_3(optimizer: Any, names: Mapping[int, str]) -> list[Fragment]:
    found = []
    for number, sub_group in enumerate(optimizer.fp16_groups):
        flat, group = optimizer.fp32_partitioned_groups_flat[number], optimizer.sub_group_to_group_id[number]
        for parameter in sub_group:
            shard = own_shard(parameter)
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            numel = shard.to_local().numel()
            name = names[id(parameter)]
            found.append(Fragment(name, parameter, shard.shape, shard.start, numel, flat, int(offset), group, False))
    return found


def _stage_1_and_2(optimizer: Any, names: Mapping[int, str]) -> list[Fragment]:
    found = []
    for group, parameters in enumerate(optimizer.bit16_groups):
        flat = optimizer.single_partition_of_fp32_groups[group]
        for parameter in parameters:
            mapping = parameter._hp_mapping
            start = mapping.lp_fragment_address.start if mapping else 0
            numel = mapping.lp_fragment_address.numel if mapping else 0
            offset = mapping.hp_fragment_address.start if mapping else 0
            name = names[id(parameter)]
            found.append(Fragment(name, parameter, parameter.shape, start, numel, flat, offset, group, False))
    return found


def _flattened(parameters: Iterable[Tensor], flat: Tensor, group: int, names: Mapping[int, str]) -> Iterable[Fragment]:
    offset = 0
    for parameter in parameters:
        size = parameter.numel()
        yield Fragment(names[id(parameter)], parameter, parameter.shape, 0, size, flat, offset, group, True)
        offset += size


@contextlib.contextmanager
def weights_agree() -> Iterator[None]:
    """Skip the engine's broadcast of rank 0's weights: all processes have them, and 0.19.8 fails for scalars."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = original


@contextlib.contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """Context in which parameters that stage 3 has taken away have their shape, without memory and without values."""
    taken = [p for p in model.parameters() if is_partitioned(p) and p.shape != p.ds_shape]  # type: ignore[attr-defined]
    data = [parameter.data for parameter in taken]
    for parameter in taken:
        parameter.data = parameter.data.new_zeros(()).expand(parameter.ds_shape)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, own in zip(taken, data, strict=True):
            parameter.data = own


@contextlib.contextmanager
def scalars_as_vectors(parameters: Iterable[Any]) -> Iterator[None]:
    """Give 0-dim parameters one dimension inside, because 0.19.8 fails to shard them otherwise."""
    scalars = [p for p in parameters if p.dim() == 0 and not is_partitioned(p)]
    for parameter in scalars:
        parameter.data = parameter.data.view(1)
    yield
    for parameter in scalars:
        if is_partitioned(parameter):
            parameter.ds_shape = torch.Size(())
        if parameter.numel():
            parameter.data = parameter.data.view(())


@contextlib.contextmanager
def no_spare_memory(device: torch.device) -> Iterator[None]:
    """Avoid two useless allocations of stage 3 in 0.19.8 for engines constructed inside.

    - Copies of float32 weights as masters. It means to share them, but compares a device with a device's name.
    - A gradient as large as the largest sub-group, for a trial update that it no longer makes.

    On the CPU, buffers of zeros take memory only when they are first written to.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    make_masters, prepare = Stage3._create_fp32_partitions, Stage3.initialize_optimizer_states

    def share_masters(optimizer: Any) -> None:
        name, optimizer.device = optimizer.device, torch.device(optimizer.device)
        make_masters(optimizer)
        optimizer.device = name

    Stage3._create_fp32_partitions = share_masters
    Stage3.initialize_optimizer_states = lambda self: prepare(self) if self.offload_optimizer else None
    try:
        with _ZerosOnDemand() if device.type == "cpu" else contextlib.nullcontext():
            yield
    finally:
        Stage3._create_fp32_partitions, Stage3.initialize_optimizer_states = make_masters, prepare


class _ZerosOnDemand(TorchFunctionMode):
    """Makes ``torch.zeros`` allocate like ``calloc``: pages take memory only when they are first written to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is not torch.zeros
            or kwargs.keys() != {"dtype", "device"}
            or torch.device(kwargs["device"]).type != "cpu"
        ):
            return func(*args, **kwargs)
        like = func(*args, dtype=kwargs["dtype"], device="meta")
        return torch.from_numpy(numpy.zeros(like.nbytes, dtype=numpy.uint8)).view(like.dtype).view(like.shape)


def refuse_other_backwards(engine: Any) -> None:
    """Raise where stages 2 and 3 would add the gradients of a backward that is not the engine's to the next update."""
    if not engine.zero_optimization_partition_gradients():
        return
    optimizer = engine.optimizer
    reduce = optimizer.reduce_ready_partitions_and_remove_grads

    def reduce_own(*args: Any) -> Any:
        if not engine._running_engine_backward:
            raise StrategyError(
                "model: backward was called beside the optimizer wrapper, as in a hook, and DeepSpeed would add its gradients to the next "
                "update; choose stage 1, or DDPStrategy"
            )
        return reduce(*args)

    optimizer.reduce_ready_partitions_and_remove_grads = reduce_own


def forget_trial_step(engine: Any) -> None:
    """Drop the optimizer state of the trial update with zero gradients that some of DeepSpeed's optimizers make.

    Weight decay has changed the weights too; the caller restores them.
    """
    inner_optimizer(engine).state.clear()


def in_master(fragment: Fragment) -> Tensor:
    """Return the shard's values that the optimizer updates, flat."""
    master = fragment.cut(fragment.flat)
    return master.to_local() if isinstance(master, FlatShard) else master.reshape(-1)


def check_layout(fragments: Iterable[Fragment]) -> None:
    """Raise StrategyError if a master differs from its rounded copy in the model: the fragments would be wrong."""
    for fragment in fragments:
        copy, local = fragment.copy_in_model(), in_master(fragment)
        # NaN is a possible value too, of memory whose values are read later.
        if not torch.allclose(local.to(copy), copy.reshape(-1), rtol=0.0, atol=0.0, equal_nan=True):
            raise StrategyError(
                f"DeepSpeed: the master weights of {fragment.name} were not found, flextrain does not know this "
                "version's layout; install deepspeed 0.19.8"
            )


def refresh(engine: Any, fragments: Iterable[Fragment]) -> None:
    """Copy the masters into the model's weights on all processes; a collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        with _all_split(optimizer), swapping.mapped(engine):
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "partition_all_parameters"):
        optimizer.partition_all_parameters()  # stage 3 for evaluation: parameters are gathered again on use
    else:
        for fragment in fragments:
            fragment.parameter.detach().copy_(fragment.cut(fragment.flat))


@contextlib.contextmanager
def _all_split(optimizer: Any) -> Iterator[None]:
    """Shard all parameters inside, also the small ones that stay whole; afterwards gather these again."""
    swapping.drop_buffers(parameter for group in optimizer.fp16_groups for parameter in group)
    optimizer.checkpoint_event_prologue()
    yield
    optimizer.checkpoint_event_epilogue()


def relink(engine: Any) -> None:
    """Make DeepSpeed look up the torch optimizer's state again, after it was replaced."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False


def loss_scaler(engine: Any) -> Any:
    """Return DeepSpeed's loss scaler, which has the loss scale as ``cur_scale``."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config


def scale_state(scaler: Any) -> dict[str, Any]:
    """Return a loss scale in the form of torch's GradScaler, with DeepSpeed's additional values."""
    # A fixed scale has no counter. A dynamic one grows after a number of updates without overflow: torch after the
    # window's length, DeepSpeed one update later.
    window = int(getattr(scaler, "scale_window", 1000))
    stable = scaler.cur_iter - scaler.last_overflow_iter - 1 if hasattr(scaler, "last_overflow_iter") else 0
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": window,
        "_growth_tracker": (stable - 1) % window if stable else 0,
        "stable": stable,
        "hysteresis": getattr(scaler, "cur_hysteresis", None),
    }


def load_scale_state(scaler: Any, saved: Mapping[str, Any]) -> None:
    """Continue from a ``scale_state``, or from the state of a GradScaler."""
    tracker = int(saved["_growth_tracker"])
    scaler.cur_scale = float(saved["scale"])
    if hasattr(scaler, "last_overflow_iter"):
        scaler.cur_iter, scaler.last_overflow_iter = int(saved.get("stable", tracker + 1)), -1
    if hasattr(scaler, "cur_hysteresis") and saved.get("hysteresis") is not None:
        scaler.cur_hysteresis = int(saved["hysteresis"])


def forget_added_groups(engine: Any) -> None:
    """Drop groups that the optimizer got after set-up, which were refused; the engine of stage 1 or 2 cannot be destroyed with them."""
    if (flat := getattr(engine.optimizer, "bit16_groups", None)) is not None:
        del engine.optimizer.optimizer.param_groups[len(flat) :]


def forget_modules(model: nn.Module) -> None:
    """Drop DeepSpeed's global references to a model of stage 3, which keep weights, engine and process group alive."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    own = set(model.modules())
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module not in own]
    # One of its methods has an unlimited cache, which is in the closure of the method's wrapper.
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def forget_process_groups() -> None:
    """Drop DeepSpeed's references to the process group before it is destroyed; the next job would use them."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in vars(groups).items():
        if name.isupper() and name.startswith("_") and name.endswith(("_GROUP", "_RANKS")):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    groups.mesh_device = groups.mpu = None


def prepared_tensor_parallelism() -> int | None:
    """Return the size that ``deepspeed.tp_model_init`` was called with, which every engine then follows, or None."""
    from deepspeed.runtime.tensor_parallel import init_utils

    found = init_utils._TP_MODEL_INIT_ARGS
    return None if found is None else found["tp_size"]


def has_sequence_groups() -> bool:
    """Whether DeepSpeed's sequence parallelism was initialised in this process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    return parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None
