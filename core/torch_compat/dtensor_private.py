"""All private names of torch.distributed.tensor, and of FSDP, which shards with it, that flextrain uses.

Each entry says what it does, and with which versions of torch it was checked, as in torch_private.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard


def strided_shard(dim: int, split_factor: int) -> Any:
    """Layout of a DTensor that is ``split_factor`` tensors joined along ``dim``, of each of which a process has a shard. 2.15."""
    return importlib.import_module("torch.distributed.tensor.placement_types")._StridedShard(
        dim, split_factor=split_factor
    )


def computes_strided_shards() -> bool:
    """Whether torch has rules for operations on ``strided_shard``. 2.11, 2.15.

    In torch 2.11 it is no Shard, and rules pass by it: some operations raise, others give wrong values.
    """
    specs = importlib.import_module("torch.distributed.tensor._dtensor_spec")
    return isinstance(strided_shard(0, 2), Shard) or hasattr(specs, "_StridedShardNotDecodableError")


def differentiates_twice() -> bool:
    """Whether derivatives of derivatives through DTensors are right. 2.11, 2.15.

    In torch 2.11 they are wrong, without a word; versions between were not tried.
    """
    return Version(torch.__version__).release >= (2, 15)


def waited(tensor: Tensor) -> Tensor:
    """The tensor, once the collective is done that computes it; what stands for it until then has no memory of its own. 2.6, 2.15."""
    collectives = importlib.import_module("torch.distributed._functional_collectives")
    if not isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor
    tensor.trigger_wait()
    return cast(Tensor, tensor.elem)


def finish(tensor: Tensor) -> None:
    """Wait for the collective of ``torch.ops._c10d_functional`` that computes a tensor, if one does. 2.6, 2.15."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def local_tensor(tensor: DTensor) -> Tensor:
    """What this process has of it, the same object every time, for the cost of an attribute. 2.6, 2.15."""
    return tensor._local_tensor


def local_part(gradient: Tensor, parameter: DTensor) -> Tensor:
    """What this process has of a parameter's gradient, which is laid out as the parameter if it is not yet. 2.6, 2.15."""
    given = cast(DTensor, gradient)
    if given._spec is not parameter._spec and given.placements != parameter.placements:
        given = given.redistribute(parameter.device_mesh, parameter.placements)
    return given._local_tensor


def local_tensors(tensors: Iterable[DTensor]) -> list[Tensor]:
    """``local_tensor`` of each, without a call for it. 2.6, 2.15."""
    return [*map(_LOCAL_TENSOR, tensors)]


_LOCAL_TENSOR = operator.attrgetter("_local_tensor")


def hand_gradients(parameters: Iterable[DTensor], locals: Iterable[Tensor]) -> None:
    """Give each of ``locals`` what this process has of its parameter's gradient, which is laid out as the parameter then. 2.6, 2.15."""
    gradient: DTensor | None
    for parameter, local in zip(parameters, locals, strict=True):
        if (gradient := parameter.grad) is None:  # type: ignore[assignment]
            continue
        if gradient._spec is not parameter._spec and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        local.grad = gradient._local_tensor


def laid_out_as(tensor: DTensor, local: Tensor) -> DTensor:
    """``local``, this process's part of a tensor that has the shape and the layout of another one. 2.6, 2.15.

    Unlike ``DTensor.from_local`` it leaves the part where it is: on the host, for parameters that FSDP keeps there.
    """
    spec = tensor._spec
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != local.dtype:
        spec = dataclasses.replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    # Without its constructor's ``__init__``, which does nothing, and takes as long for the compiler's sake as a product.
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def gradient_of(parameter: DTensor, local: Tensor, node: Any) -> DTensor | None:
    """Return the gradient that backward gives for a parameter, from this process's part; None: it was added already. 2.6, 2.15.

    Autograd's own addition takes as long for a DTensor as the products of a small matrix. It is left out where nothing waits for it,
    and not where a parameter says that its gradients have another dtype, as it can in newer versions.

    Args:
        node: of the graph, to which backward would give it.
    """
    known: DTensor | None
    if (
        type(node) is not _OF_LEAF
        or not _adds_to_leaf(node)
        or parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
        or getattr(parameter, "grad_dtype", None) not in (None, local.dtype)
    ):
        return laid_out_as(parameter, local)
    if (known := parameter.grad) is None:  # type: ignore[assignment]
        parameter.grad = laid_out_as(parameter, local)
    elif known.placements == parameter.placements and known.dtype == local.dtype:
        known._local_tensor.add_(local)
    else:
        return laid_out_as(parameter, local)
    return None


_OF_LEAF: type = torch._C._functions.AccumulateGrad


def _adds_to_leaf(node: Any) -> bool:
    """Whether the backward that is running adds to a leaf's ``grad``: ``torch.autograd.grad`` does not, nor one for other leaves. 2.6, 2.15.

    Args:
        node: the leaf's in the graph.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # backward returns the gradient of this leaf
        return False


ITEM = torch.ops.aten._local_scalar_dense.default
"""The operation of ``Tensor.item``. 2.6, 2.15."""

DRAWING_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
)
"""Attention of accelerators, by kernels that draw the masks of dropout themselves. 2.15."""


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Functions ``(operation, args, kwargs)`` that compute operations on DTensors in place of torch's rules. 2.6, 2.15."""
    return cast(dict[Any, Callable[..., Any]], DTensor._op_dispatcher._custom_op_handlers)


def write_data(write: Callable[[DTensor, Tensor], None]) -> None:
    """Let ``tensor.data = value`` of a DTensor call ``write``; torch changes the wrapper, and the shard stays as it is. 2.6, 2.15."""
    cast(Any, DTensor).data = property(torch._C.TensorBase.data.__get__, write)  # type: ignore[attr-defined]


def keep_derivatives() -> None:
    """Let gradients of gradients go through ``DTensor.from_local`` where its gradient is redistributed; torch cuts them there. 2.15."""
    function: Any = importlib.import_module("torch.distributed.tensor._api")._FromTorchTensor
    of_torch = function.backward

    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        if gradient is not None and torch.is_grad_enabled():
            given = ctx.grad_placements or ctx.forward_input_placements
            gradient = gradient.redistribute(placements=[Replicate() if one.is_partial() else one for one in given])
        return of_torch(ctx, gradient)

    function.backward = staticmethod(backward)


def relax_views(tell: Callable[[Any], None]) -> None:
    """Let ``view`` of DTensors communicate where a layout cannot stay, as ``reshape`` does, instead of raising. 2.15.

    Torch asks these functions once for every operation and layout, and remembers the answer.

    Args:
        tell: called with the operation's schema where a view communicates.
    """
    tensor: Any = importlib.import_module("torch.distributed.tensor._op_schema")
    specs: Any = importlib.import_module("torch.distributed.tensor._dtensor_spec")
    utils: Any = importlib.import_module("torch.distributed.tensor._ops.utils")
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    reshape = strategies[torch.ops.aten.reshape.default]

    def whole(schema: Any) -> Any:
        given = schema.args_schema[0]
        mesh = given.mesh
        everywhere = (Replicate(),) * mesh.ndim
        spec = specs.DTensorSpec(mesh, everywhere, tensor_meta=given.strategies[0].output_spec.tensor_meta)
        cost = utils.generate_redistribute_costs(given, spec)
        found = tensor.OpSpec(specs.DTensorSpec(mesh, everywhere), input_specs=(spec,), redistribute_cost=[cost])
        return tensor.OpStrategy([found])

    def relaxed(strict: Callable[[Any], Any], schema: Any) -> Any:
        try:
            found = strict(schema)
            if _keeps_strides(schema, found):
                return found
        except Exception:  # not only RuntimeError: assertions and indices too
            found = None
        tell(schema)
        strided = any(
            hasattr(one, "split_factor") for one in _placements(schema.args_schema[0].strategies[0].output_spec)
        )
        try:
            return whole(schema) if strided else reshape(schema)
        except Exception:
            return whole(schema)

    for operation in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        strategies[operation] = partial(relaxed, strategies[operation])


@contextmanager
def using_in_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which a module's own parameters and buffers are ``tensors``, which may be part of a graph. 2.6, 2.15.

    ``torch.func.functional_call`` would call the module with its hooks, which are running already.
    """
    own: list[Any] = [module._parameters, module._buffers]
    before = [{name: found[name] for name in tensors if name in found} for found in own]
    for found, replaced in zip(own, before, strict=True):
        found.update({name: tensors[name] for name in replaced})
    try:
        yield
    finally:
        for found, replaced in zip(own, before, strict=True):
            found.update(replaced)


def forget_meshes() -> None:
    """Drop the layouts that DTensor has worked out, which hold the meshes of process groups that are gone. 2.6, 2.15.

    A mesh of the same ranks and names is equal to them, also with other groups: results would have the old groups.
    """
    _forget_layouts()
    # An accelerator's backward has a thread of its own. The thread that leaves at exit must not make it use another device.
    accelerators: Any = torch.accelerator
    if threading.current_thread() is threading.main_thread() and accelerators.is_available():
        device = accelerators.current_accelerator()
        if torch.get_device_module(device).is_initialized():
            with torch.enable_grad():
                tensor = torch.ones((), device=device, requires_grad=True) * 1
            tensor.register_hook(lambda _: _forget_layouts())  # type: ignore[no-untyped-call]
            tensor.backward()  # type: ignore[no-untyped-call]
    # A mesh keeps its groups, and each of gloo's has a thread that wakes a hundred times a second.
    for function in _cached_functions(
        tuple(name for name in sys.modules if name.startswith("torch.distributed.tensor."))
    ):
        function.cache_clear()
    planners: dict[Any, Any] = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_planner_cache", {})
    planners.clear()


def _forget_layouts() -> None:
    """Drop those of this thread."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    cached = propagator.propagate_op_sharding
    getattr(cached, "cache", cached).cache_clear()  # torch 2.6 keeps the cache of the thread in an attribute
    if (clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)) is not None:
        clear()


_CachedFunction = type(lru_cache(len))


@lru_cache(maxsize=1)
def _cached_functions(modules: tuple[str, ...]) -> list[Any]:
    """The functions and methods of these modules that keep what they have returned."""
    values = [value for name in modules for value in list(vars(sys.modules[name]).values())]
    methods = [each for value in values if isinstance(value, type) for each in vars(value).values()]
    functions = (getattr(each, "__func__", each) for each in (*values, *methods))
    return [function for function in functions if isinstance(function, _CachedFunction)]


def _placements(spec: Any) -> tuple[Any, ...]:
    return tuple(spec.placements)


def _keeps_strides(schema: Any, found: Any) -> bool:
    """Whether a strided shard stays one of a dimension of the same size, or becomes an ordinary one.

    For others, such as two dimensions joined of which the second is sharded in strides, torch's rules are wrong.
    """
    given, made = schema.args_schema[0], found.strategies[0].output_spec
    shape = list(schema.args_schema[1])
    if -1 in shape:
        rest = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = math.prod(given.shape) // max(rest, 1)
    kept = _placements(found.strategies[0].input_specs[0])
    for before, after in zip(kept, _placements(made), strict=True):
        factor = getattr(before, "split_factor", None)
        if factor is None or not hasattr(after, "split_factor"):
            continue
        if after.split_factor != factor or shape[after.dim] != given.shape[before.dim]:
            return False
    return True


def replicate_without_rule(tell: Callable[[Any], None]) -> None:
    """Let operations that torch has no rule for gather DTensors and compute as on one device, instead of raising. 2.15.

    Args:
        tell: called with the operation's schema, once for each operation.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    utils: Any = importlib.import_module("torch.distributed.tensor._ops.utils")
    original = propagator.propagate_op_sharding_non_cached

    def propagate(schema: Any) -> Any:
        try:
            return original(schema)
        except NotImplementedError:
            operation = schema.op
            key = torch._C.DispatchKey.CompositeImplicitAutograd
            # Torch itself takes such operations apart; views and writes must not have copies of their tensors.
            apart = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key)
            if apart or operation.is_view or operation._schema.is_mutable:
                raise
            tell(schema)
            propagator.register_op_strategy(operation, utils.replicate_op_strategy)
            return original(schema)

    propagator.propagate_op_sharding_non_cached = propagate
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(propagate)


class ChunksOnDemand:
    """What torch's ``_chunk_with_empty`` returns, each chunk made when it is asked for."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim

    def __getitem__(self, index: int) -> Tensor:
        length = self._tensor.size(self._dim)
        step = -(-length // self._number)
        begin = index * step
        if begin >= length > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(step, length - begin))


@contextmanager
def chunks_on_demand() -> Iterator[None]:
    """Context in which ``fully_shard`` makes two chunks of each parameter, and not one for each process. 2.15.

    It looks at two. Other versions are left as they are, and take time that grows with the number of processes.
    """
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    if Version(torch.__version__).release[:2] != (2, 15):
        yield
        return
    before = module._chunk_with_empty
    module._chunk_with_empty = ChunksOnDemand
    try:
        yield
    finally:
        module._chunk_with_empty = before


def settle_unit(unit: nn.Module) -> None:
    """Move an FSDP unit's shards now to their final memory, because hooks keep references to them. 2.6 to 2.9.

    torch before 2.10 moves padded shards at the first forward (pytorch/pytorch#163130); later versions need nothing.
    """
    if Version(torch.__version__) < Version("2.10"):
        group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        if group is not None:
            group.lazy_init()


def settle_root(root: nn.Module) -> None:
    """Make an FSDP module the root of those inside it, which its first forward would do. 2.6, 2.15.

    If a part of it computed before it does, that part would be the root, and the forward of the whole would raise.
    """
    cast(Any, root)._get_fsdp_state()._lazy_init()


def reset_after_error(root: nn.Module) -> bool:
    """If an error has ended forward or backward of an FSDP root, free what was gathered, and drop gradients. 2.6, 2.15.

    Reading a parameter that FSDP takes for gathered would end the process. After an error in backward, FSDP would not reduce
    the gradients of the next one.

    Returns:
        Whether it may train on; before torch had ``reset_iter_state`` it may not after an error in backward.
    """
    module = cast(Any, root)
    state = module._get_fsdp_state()
    found = {each._training_state.name for each in state._state_ctx.all_states}
    if not state._is_root or found == {"IDLE"}:
        return True
    # torch leaves gradients of gathered parameters that backward had computed and not reduced: the next one would add to them.
    for parameter in (
        one for each in state._state_ctx.all_states for group in _groups_of(each) for one in group.fsdp_params
    ):
        if "unsharded_accumulated_grad" in vars(
            parameter
        ):  # from torch 2.15 on it is the gathered parameter's gradient
            parameter.unsharded_accumulated_grad = None
        if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
            gathered.grad = None
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return True
    idle = type(state._training_state).IDLE
    for each in state._state_ctx.all_states:
        each._training_state = idle
        if each._fsdp_param_group is not None:
            each._fsdp_param_group._training_state = idle
            each._fsdp_param_group.reshard()
    state._state_ctx.iter_forward_root = None
    return found <= {"IDLE", "FORWARD"}


def _groups(unit: nn.Module) -> list[Any]:
    """The groups of parameters that an FSDP unit gathers; torch before 2.11 or so has one, or none."""
    return _groups_of(cast(Any, unit)._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found) if found is not None else [one for one in (state._fsdp_param_group,) if one is not None]


def fill_gradients(
    unit: nn.Module, takes_part: Callable[[Tensor], bool], note: Callable[[list[Tensor], list[Tensor]], None]
) -> None:
    """Let an FSDP unit reduce zeros for parameters without a gradient, which it would leave out of its message. 2.6, 2.15.

    torch 2.15 has ``set_reduce_scatter_unused_params`` for it, which does not tell whose gradients are zeros.

    Args:
        takes_part: whether a sharded parameter must be in the message.
        note: called after each reduction, with the sharded parameters that had gradients, and with those whose first gradient since
            the last update are these zeros.
    """
    for group in _groups(unit):
        group.post_backward = partial(_reduce_filled, group, group.post_backward, takes_part, note)


def _reduce_filled(group: Any, reduce: Callable[..., None], takes_part: Any, note: Any, *unused: Any) -> None:
    given, filled = [], []
    for each in group.fsdp_params if group.reduce_grads else ():
        whole = getattr(each, "_unsharded_param", None)
        if whole is None:
            continue
        if whole.grad is not None or each.unsharded_accumulated_grad is not None:
            given.append(each.sharded_param)
        elif takes_part(each.sharded_param):
            whole.grad = _zeros_like(whole, getattr(whole, "grad_dtype", None) or whole.dtype)
            if each.sharded_param.grad is None:
                filled.append(each.sharded_param)
    reduce(*unused)
    if given or filled:
        note(given, filled)


def _zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the layout of a gathered parameter, which may be of a class that has no ``zeros_like``."""
    own = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    zeros = torch.zeros(own.shape, dtype=dtype, device=own.device)
    return laid_out_as(parameter, zeros) if isinstance(parameter, DTensor) else zeros


def gather_as(
    unit: nn.Module, choose: Callable[[nn.Module, str], Callable[[Tensor], Tensor] | None]
) -> list[tuple[DTensor, Any]]:
    """Let an FSDP unit gather parameters as tensors of another class, while what it shards stays of torch's own. 2.11, 2.15.

    FSDP has methods for it that a shard's class can define, ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    Args:
        choose: called with the module and the name in it of each parameter that no other module shares. It returns what makes, of
            this process's shard with padding, a tensor of a class with these methods; or None. Attribute ``scale`` of what it
            returns is looked at: another object there makes another tensor.

    Returns:
        The sharded parameters with what was chosen for them.
    """
    found = []
    for group in _groups(unit):
        kind = _gathered_in_own_way(type(group.fsdp_params[0]))
        for each in group.fsdp_params:
            info = each._module_info
            chosen = None if info.shared_modules else choose(info.module, info.param_name)
            if chosen is not None:
                each.__class__ = kind
                each.make_own, each.made_of, each.made = chosen, (), None
                each._init_extensions()
                found.append((each.sharded_param, chosen))
    return found


def _gathered_in_own_way(kind: Any) -> Any:
    """The class of FSDP's parameters, which looks for the methods at a tensor that is made for it."""

    def shard(self: Any) -> Tensor:
        made_of = (self._sharded_param_data, self.make_own.scale)
        if any(new is not old for new, old in zip(made_of, self.made_of or (None, self), strict=True)):
            self.made_of, self.made = made_of, self.make_own(made_of[0].view(self.padded_sharded_param_size))
        return cast(Tensor, self.made)

    return type(kind.__name__, (kind,), {"_sharded_local_tensor": property(shard)})


def hook_before_freeing(unit: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward hook of an FSDP module that sees the output as FSDP's own does, after the user's hooks. 2.6, 2.15.

    FSDP gathers for backward when the gradient of that output comes.
    """
    unit.register_forward_hook(hook)
    handle = cast(Any, unit)._get_fsdp_state()._post_forward_hook_handle
    cast(Any, unit._forward_hooks).move_to_end(handle.id)


def before_reducing(unit: nn.Module, function: Callable[[], None]) -> None:
    """Call ``function`` before an FSDP module frees its parameters in backward and reduces their gradients. 2.6, 2.15."""
    for group in _groups(unit):
        group.post_backward = partial(_call_before, function, group.post_backward)


def _call_before(first: Callable[[], None], second: Callable[..., None], *args: Any) -> None:
    first()
    second(*args)


class KeptForDerivatives:
    """Keeps an FSDP unit gathered after a backward with ``create_graph=True``, since the graph that it made needs the parameters. 2.6, 2.15."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit, self._has_reduced = unit, False
        self._kept: dict[int, bool] = {}  # what its groups did before
        for group in _groups(unit):
            group.pre_backward = partial(self._gather, group, group.pre_backward)
            group.post_backward = partial(self._reduce, group, group.post_backward)

    def _gather(self, group: Any, gather: Callable[..., None], *unused: Any) -> None:
        if torch.is_grad_enabled():
            self._kept.setdefault(id(group), group.reshard_after_backward)
            group.reshard_after_backward = False
        elif id(group) in self._kept:
            group.reshard_after_backward = self._kept.pop(id(group))
            self._has_reduced = False
        gather(*unused)

    def _reduce(self, group: Any, reduce: Callable[..., None], *unused: Any) -> None:
        self._has_reduced |= bool(self._kept) and group._training_state.name == "IDLE"  # nobody has called begin()
        reduce(*unused)

    def begin(self) -> None:
        """Begin another backward; FSDP does not know of one that comes to that graph only."""
        if self._kept and is_gathered(self._unit):
            cast(Any, self._unit)._get_fsdp_state()._pre_backward(None)

    def has_gradients(self) -> bool:
        """Whether there are gradients of a backward that FSDP does not know of."""
        groups = _groups(self._unit) if self._kept and is_gathered(self._unit) else ()
        return bool(groups) and (
            self._has_reduced
            or any(each.unsharded_param.grad is not None for group in groups for each in group.fsdp_params)
        )


def is_gathered(unit: nn.Module) -> bool:
    """Whether an FSDP unit is gathered, or will be without another message. 2.6, 2.15."""
    return all(group.is_unsharded or group._all_gather_result is not None for group in _groups(unit))


@contextmanager
def pass_by(unit: nn.Module) -> Iterator[None]:
    """Context that gathers and frees a unit as its forward does, in its root's forward. 2.6, 2.15."""
    state = cast(Any, unit)._get_fsdp_state()
    state._pre_forward(unit, (), {})
    yield
    state._post_forward(unit, (), None)


@contextmanager
def complete_backward(unit: nn.Module, gathers: bool) -> Iterator[None]:
    """Context around what a unit has inside: gathers it for backward, and reduces its gradients unless that is done. 2.6, 2.15."""
    state, groups = cast(Any, unit)._get_fsdp_state(), _groups(unit)
    if gathers:
        state._pre_backward(None)
    yield
    for group in reversed(groups):
        if group._training_state.name == "PRE_BACKWARD":
            group.post_backward()
