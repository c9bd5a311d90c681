"""All private names of torch that a rehearsal uses: tensors without values, a process group of one process, what it sends.

Each entry says what it does, and with which versions of torch it was checked, as in torch_private.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute is another."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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
    readers: list[tuple[Any, str]] = [(DeviceMesh, "__init__"), (strided, "local_shard_size_and_offset")]
    readers.append((sharding, "_get_post_forward_mesh_info"))
    with ExitStack() as stack:
        for owner, name in readers:
            stack.enter_context(replaced(owner, name, _inside(with_values, getattr(owner, name))))
        yield


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

    with replaced(nn.Module, "_apply", apply):
        yield


@contextmanager
def finding_shapes_in(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context in which DTensor enters ``context()`` when it makes tensors without values of whole shapes, once for an operation. 2.15."""
    owner: Any = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    with replaced(owner, name, _inside(context, getattr(owner, name))):
        yield


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
