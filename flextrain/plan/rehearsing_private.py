"""All private names of torch that a rehearsal uses: tensors without values, a process group of one process, what it sends.

Each entry says what it does, and with which versions of torch it was checked, as in torch_private.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..core.comm.collectives import all_reduce
from ..core.torch_compat.torch_private import arguments_of, is_fake, with_values

CHECKED = ("2.15",)
"""The versions of torch with which every entry of this file was checked. Others might plan wrongly without an error."""


@contextmanager
def join_group_of_one_kind(rank: int, world_size: int, store: Any) -> Iterator[None]:
    """Context with a default process group whose collectives send nothing, as if all processes had what this one has. 2.15.

    Groups of the back end gloo are such too.
    """
    found = importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the back end
    options = found.FakeProcessGroup.Options()
    options.simulate_uniform_ranks = True
    plugins: dict[str, Any] = dist.distributed_c10d.Backend._plugins
    gloo = plugins.get("GLOO")
    plugins["GLOO"] = plugins["FAKE"]
    try:
        dist.init_process_group("fake", rank=rank, world_size=world_size, pg_options=options, store=store)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if gloo is None:  # torch registers it when it is first used
            del plugins["GLOO"]
        else:
            plugins["GLOO"] = gloo


def quick_fake_mode() -> Any:
    """A mode as ``fake_mode`` gives it that finds what it has seen before in a tenth of the time. 2.15.

    Torch describes every operand by all that symbolic shapes, sparse tensors and tracing need, and makes every result in contexts
    for them. Here are none: operands that are nothing special are described directly, and everything else goes torch's way.
    What torch stores of an operation, and which it does not store, stays torch's own decision.
    """
    found: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fake_tensor: Any = found.FakeTensor
    mode: Any = found.FakeTensorMode(allow_non_fake_inputs=True)
    slow_key, layout_of = mode._cache_key, cast(Any, Tensor).layout.__get__

    def is_described(values: Any, into: list[Any]) -> bool:
        into.append(len(values))
        for value in values:
            kind = type(value)
            into.append(kind)
            if kind is fake_tensor:
                if value.fake_mode is not mode or value.constant is not None or value.dispatch_keys is not None:
                    return False
                if layout_of(value) is not torch.strided:
                    return False
                into += (value.dtype, value.shape, value.stride(), value.storage_offset(), value._fake_device)
                into += (value.untyped_storage().nbytes(), value.requires_grad)
                into += (value.is_conj(), value.is_neg(), value.is_inference())
            elif kind in _KEPT_AS_THEY_ARE:
                into.append(value)
            elif kind in (list, tuple):
                if not is_described(value, into):
                    return False
            else:
                return False
        return True

    def key_of(state: Any, operation: Any, args: Any, kwargs: Any) -> Any:
        key: list[Any] = [operation, torch.get_default_dtype(), torch._C._get_default_device()]
        key.append(torch.is_inference_mode_enabled())
        if is_described(args, key) and is_described((*kwargs, *kwargs.values()), key):
            return tuple(key)
        return slow_key(state, operation, args, kwargs)

    def made(known: Any, args: Any) -> Any:
        if known.inplace_idx is not None:
            return args[known.inplace_idx]
        if (facts := known.metadata) is None:
            return known.constant_value
        if known.view_idx is None:
            empty = torch.empty_strided(
                facts.shape, facts.stride, dtype=facts.dtype, device="meta", requires_grad=facts.requires_grad
            )
        else:
            empty = torch.empty((), dtype=facts.dtype, device="meta", requires_grad=facts.requires_grad)
            storage = args[known.view_idx].untyped_storage()
            empty.set_(storage, facts.storage_offset, facts.shape, facts.stride)
        if facts.is_conj:
            torch._C._set_conj(empty, True)
        if facts.is_neg:
            torch._C._set_neg(empty, True)
        return fake_tensor(mode, empty, facts.device)

    def results_of(state: Any, known: Any, key: Any, args: Any) -> Any:
        results = tuple(made(one, args) for one in known.output_infos)
        return results if known.is_output_tuple else results[0]

    mode._cache_key, mode._output_from_cache_entry = key_of, results_of
    return mode


_KEPT_AS_THEY_ARE = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


def value_errors() -> tuple[type[Exception], ...]:
    """The errors of an operation whose result depends on values, which a fake tensor has none of. 2.15."""
    found: Any = importlib.import_module("torch._subclasses.fake_tensor")
    symbols: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return (
        found.DataDependentOutputException,
        found.DynamicOutputShapeException,
        found.UnsupportedOperatorException,
        symbols.GuardOnDataDependentSymNode,
    )


def device_errors() -> tuple[type[Exception], ...]:
    """The errors of an operation on tensors of several devices, or on one that is not there. 2.15."""
    found: Any = importlib.import_module("torch._subclasses.fake_tensor")
    return (found.FakeTensorDeviceMismatchError,)


@contextmanager
def indexing_with_values() -> Iterator[None]:
    """Context in which torch reads who has what from tensors with values, whatever mode calls it. 2.15.

    The constructor of DeviceMesh reads ranks, in the mode in which ``fully_shard`` makes one, and so does what makes the mesh of
    smaller groups for ``reshard_after_forward``; the layout of interleaved shards reads indices, which are counted as in a
    real run.
    """
    strided: Any = importlib.import_module("torch.distributed.tensor.placement_types")._StridedShard
    sharding: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    replaced: list[tuple[Any, str]] = [(DeviceMesh, "__init__"), (strided, "local_shard_size_and_offset")]
    replaced.append((sharding, "_get_post_forward_mesh_info"))
    before = [getattr(owner, name) for owner, name in replaced]
    for (owner, name), function in zip(replaced, before, strict=True):
        setattr(owner, name, _inside(with_values, function))
    try:
        yield
    finally:
        for (owner, name), function in zip(replaced, before, strict=True):
            setattr(owner, name, function)


@contextmanager
def moving_what_moves() -> Iterator[None]:
    """Context in which ``module.to(...)`` that changes nothing leaves the parameters alone. 2.15.

    Torch exchanges parameters without values for new ones even then, which it cannot while something refers to them weakly.
    """
    before: Any = nn.Module._apply

    def apply(self: nn.Module, function: Any, recurse: bool = True) -> Any:
        own = [*self.parameters(recurse), *self.buffers(recurse)]
        if all(tensor.grad is None and function(tensor) is tensor for tensor in own):
            return self
        return before(self, function, recurse)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


@contextmanager
def finding_shapes_in(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context in which DTensor enters ``context()`` when it makes tensors without values of whole shapes, once for an operation. 2.15."""
    owner: Any = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    before = owner._propagate_tensor_meta_non_cached
    owner._propagate_tensor_meta_non_cached = _inside(context, before)
    try:
        yield
    finally:
        owner._propagate_tensor_meta_non_cached = before


def _inside(context: Callable[[], AbstractContextManager[Any]], function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return call


class _KeepingBuckets:
    """A reducer that keeps the buckets of its construction."""

    def __init__(self, reducer: Any) -> None:
        self._own = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def _rebuild_buckets(self) -> bool:
        return False


class _WithoutValues(DistributedDataParallel):
    """DistributedDataParallel on tensors without values. 2.15.

    Torch orders the buckets in its second iteration as gradients have come, and compares this order over the processes in C++.
    Here, they have from the beginning the sizes that they get then, if gradients come in the reverse order of parameters.
    Buffers are broadcast in C++ there, and here in the same way, flattened, in messages of the same size.
    """

    _is_averaging = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_sync": False})  # it compares values

    def _ddp_init_helper(self, parameters: Any, expect_sparse_gradient: Any, *rest: Any) -> None:
        own: Any = self
        limits = own._bucket_config.compute_bucket_size_limits(static_graph=False, find_unused_parameters=True)[0]
        assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        found, sizes = assign(parameters[::-1], limits, expect_sparse_gradient[::-1])
        buckets = [[len(parameters) - 1 - index for index in bucket] for bucket in found]
        if own.static_graph or not own.find_unused_parameters:
            # The reducer gets the reverse of what this function gives.
            dist._compute_bucket_assignment_by_size = lambda *_: (buckets[::-1], sizes[::-1])  # type: ignore[attr-defined]
        try:
            super()._ddp_init_helper(parameters, expect_sparse_gradient, *rest)  # type: ignore[no-untyped-call]
        finally:
            dist._compute_bucket_assignment_by_size = assign  # type: ignore[attr-defined]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Average as one of torch's hooks does, which itself needs a result from the back end."""
        self._is_averaging = True
        sent = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}.get(hook.__name__)

        def reduce(state: object, bucket: Any) -> Any:
            buffer = bucket.buffer()
            found = all_reduce(buffer if sent is None else buffer.to(sent), "mean", self.process_group)
            done: Any = torch.futures.Future()
            done.set_result(buffer if sent is None else buffer.copy_(found))
            return done

        del reduce.__annotations__  # which torch reads
        super().register_comm_hook(None, reduce)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._is_averaging:
            self.register_comm_hook(None, _default)
        reducer: Any = self.reducer
        self.reducer = cast(Any, _KeepingBuckets(reducer))
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.reducer = reducer

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [buffer_size])  # type: ignore[attr-defined]
        for bucket in buckets:
            flat = torch.cat([tensors[index].detach().reshape(-1) for index in bucket])
            dist.broadcast(flat, authoritative_rank, group=self.process_group)


def _default(state: object, bucket: Any) -> Any:
    raise AssertionError("is never called")


@contextmanager
def data_parallel_without_values() -> Iterator[None]:
    """Context in which who makes a DistributedDataParallel gets one for tensors without values. 2.15."""
    DistributedDataParallel.__new__ = lambda cls, *_, **__: object.__new__(  # type: ignore[method-assign]
        _WithoutValues if cls is DistributedDataParallel else cls
    )
    try:
        yield
    finally:
        # A class keeps the slot of a deleted ``__new__``, and then refuses the arguments of its constructor.
        DistributedDataParallel.__new__ = lambda cls, *_, **__: object.__new__(cls)  # type: ignore[method-assign]


# What collectives send

_FUNCTIONAL = ("_c10d_functional", "_dtensor")


def collective_of(
    operation: Any, args: Any, kwargs: Mapping[str, Any], result: Any
) -> tuple[str, Any, int, int | None] | None:
    """Return name, process group, bytes, and rank of the other process, of a collective that a TorchDispatchMode sees. 2.15.

    The bytes are those of the whole tensor, see ``Traffic``. The rank is that of a message to one process, in the group.
    None for all other operations.
    """
    found = _counted(operation)
    if found is None:
        return None
    kind, counted = found
    given = arguments_of(operation, args, kwargs)
    tensors = result if counted == "result" else given[counted]
    group = given.get("process_group")
    if group is None:
        group = importlib.import_module("torch._C._distributed_c10d")._resolve_process_group(given["group_name"])
    else:
        group = dist.ProcessGroup.unbox(group)
    return kind, group, _bytes(tensors), given.get("dst", given.get("src")) if kind in ("send", "receive") else None


@functools.cache
def _counted(operation: Any) -> tuple[str, str] | None:
    """The collective that an operation is, and the argument whose bytes count."""
    namespace, _, name = operation.name().partition("::")
    return _COLLECTIVES.get(name.partition(".")[0]) if namespace in ("c10d", *_FUNCTIONAL) else None


_COLLECTIVES = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "send": ("send", "tensors"),
    "recv_": ("receive", "tensors"),
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "broadcast": ("broadcast", "input"),
    "all_gather_into_tensor": ("all_gather", "result"),
    "all_gather_into_tensor_out": ("all_gather", "result"),
    "all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "all_to_all_single": ("all_to_all", "input"),
    "shard_dim_alltoall": ("all_to_all", "input"),
}
"""Collectives by the names of torch's operations, each with the argument whose bytes count."""


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    return sum(_bytes(each) for each in value)


def only_waits(operation: Any, args: Any) -> bool:
    """Whether an operation waits for a collective, and its tensor has no values. 2.15.

    The operation returns the tensor that it gets. For one without values torch makes another one, which needs memory too.
    """
    return bool(operation.name() == "_c10d_functional::wait_tensor" and is_fake(args[0]))


def in_backward() -> bool:
    """Whether autograd computes gradients on this thread. 2.15."""
    return torch._C._current_graph_task_id() != -1
