"""Collectives that also work without a process group: the world size is 1 then."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..torch_compat.torch_private import default_store, nccl_options, process_groups, with_values
from .rendezvous import choose_interface, host_of, store_of_group

# A gloo thread needs the GIL to release the tensor that it has just sent, shortly after the collective has returned.
# An interpreter that exits meanwhile aborts ("terminate called without an active exception"). torch before 2.8
# (pytorch/pytorch#154976) holds the GIL while it waits for that thread, and never returns.
_GLOO_LETS_GO_S = 0.05
# The limit is needed when another process has left the group during a collective.
_LEAVE_TIMEOUT_S = 5.0

# Gloo connects each process with all others when a group is made, and each asks the store for every address. With W
# processes that is W * W of both for each group, and beyond some thousand more connections than a process may have open
# files. From this number on they connect when they first send to each other: to a few, or log2(W), by gloo's algorithms.
# Fewer connect at once, so that a broken network shows at the start.
_CONNECT_LATE_FROM = 256

_SENT = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
        torch.bool,
    }
)  # fmt: skip

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "max", "min"]
_SUM = dist.AllreduceOptions() if dist.is_available() else None
if hasattr(_SUM, "asyncOp"):  # not in torch 2.6
    _SUM.asyncOp = False  # type: ignore[union-attr]
_REDUCE_OPS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN} if dist.is_available() else {}


def is_initialized() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def index_among(ranks: Sequence[int]) -> int:
    """The index of this process in ``ranks``, which must have its rank."""
    return ranks.index(get_rank())


def alone() -> tuple[int]:
    """The ranks of a group that has this process only."""
    return (get_rank(),)


def rank_in(group: Any) -> int:
    """The rank of this process in ``group``, of which it must be a member."""
    return dist.get_group_rank(group, dist.get_rank())


def get_world_size(group: Any = None) -> int:
    """Number of processes in ``group`` (None: all processes); 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def is_alone() -> bool:
    """Whether this process is the only one."""
    return get_world_size() == 1


def is_main() -> bool:
    """Whether this process is rank 0."""
    return get_rank() == 0


def master_only(function: Callable[..., T]) -> Callable[..., T | None]:
    """Decorator: run the function on rank 0 only; it returns None on the other processes."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if is_main() else None

    return guarded


def barrier() -> None:
    """Wait until every process has called this function."""
    if get_world_size() > 1:
        dist.barrier()


def all_reduce(tensor: Tensor, op: ReduceOp = "sum", group: Any = None) -> Tensor:
    """All-reduce ``tensor`` in place over the processes of ``group`` (None: all) and return it.

    ``mean`` is the sum divided by the number of processes, in the tensor's dtype, because gloo has no average.
    """
    size = get_world_size(group)
    if size > 1:
        dist.all_reduce(tensor, op=_REDUCE_OPS.get(op, dist.ReduceOp.SUM), group=group)
        if op == "mean":
            tensor.div_(size)
    return tensor


def add_up(tensor: Tensor, group: Any) -> Tensor:
    """Replace ``tensor`` in place by its sum over ``group``, which this process is in, and return it.

    By the group's own method, for what every layer of a model does: torch's function takes as long again as the message's call.
    """
    work = group.allreduce([_as_real(tensor)], _SUM)
    if work is not None:
        work.wait()
    return tensor


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Overwrite ``tensor`` in place with the value of rank ``src``, and return it."""
    if get_world_size() > 1:
        dist.broadcast(tensor, src)
    return tensor


def all_gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """The tensors of all processes of ``group`` (None: all), in rank order; all must have the same shape and dtype."""
    size = get_world_size(group)
    if size == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(found, tensor, group=group)
    return found


def all_gather_small(values: Sequence[int], group: Any) -> list[list[int]]:
    """Return the integers of every process of a group of CPU messages, equally many each, after log2(processes) messages.

    An all-gather of gloo passes them round a ring, with as many messages as processes. In each step here a process knows twice as
    many values as in the last: its own and those of the processes after it (Bruck et al. 1997, Efficient algorithms for all-to-all
    communications in multiport message-passing systems).
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with with_values():
        known = torch.tensor([values] * size, device="cpu")
        count = 1
        while count < size:
            more = min(count, size - count)
            sent: Any = dist.isend(known[:more], group=group, group_dst=(rank - count) % size)
            dist.recv(known[count : count + more], group=group, group_src=(rank + count) % size)
            sent.wait()
            count += more
        return [list(row) for row in known.roll(rank, 0).tolist()]


def broadcast_tensors(
    tensors: list[Tensor],
    src: int = 0,
    bucket_bytes: int = 25 * 2**20,
    group: Any = None,
    via: torch.device | None = None,
) -> None:
    """Overwrite the tensors in place with those of rank ``src`` of the group, in messages of about ``bucket_bytes``.

    Messages go through the memory of the device ``via``; default: where the tensors are.
    """
    if get_world_size(group) == 1:
        return
    sender = src if group is None else dist.get_global_rank(group, src)
    for bucket in buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        flat = flat if via is None else flat.to(via)
        dist.broadcast(as_sent(flat), sender, group=group)
        _unflatten_into(flat, bucket)


def average_tensors(tensors: list[Tensor], bucket_bytes: int = 25 * 2**20, group: Any = None) -> None:
    """Replace the tensors in place by their means over ``group`` (None: all), in messages of about ``bucket_bytes``."""
    size = get_world_size(group)
    if size == 1:
        return
    for bucket in buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.all_reduce(_as_real(flat), group=group)
        _unflatten_into(flat.div_(size), bucket)


def as_sent(flat: Tensor) -> Tensor:
    """The memory of a tensor of one dimension in a dtype that every back end sends: gloo has no int16, float8 and such."""
    return _as_real(flat) if flat.is_complex() or flat.dtype in _SENT else flat.view(torch.uint8)


def _as_real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: gloo of torch 2.6 has no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def buckets(tensors: list[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """``tensors`` in buckets of one dtype and device and about ``bucket_bytes``, in the same order on all processes."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if key not in groups or room[key] < size:
            groups.setdefault(key, []).append([])
            room[key] = bucket_bytes
        groups[key][-1].append(tensor)
        room[key] -= size
    return [bucket for group in groups.values() for bucket in group]


def _unflatten_into(flat: Tensor, tensors: list[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def broadcast_object(value: T, src: int = 0, group: Any = None) -> T:
    """The value of rank ``src``, a process of ``group`` (None: all), on each of them; values must be picklable."""
    if get_world_size(group) == 1:
        return value
    with with_values():
        data = pickle.dumps(value)
        size = torch.tensor(len(data), device="cpu")
        dist.broadcast(size, src, group=group)
        # In place, as a tensor is broadcast: where no other process sends anything, the own value stays.
        message = torch.frombuffer(bytearray(data[: int(size)].ljust(int(size))), dtype=torch.uint8)
        dist.broadcast(message, src, group=group)
        return value if get_rank() == src else pickle.loads(message.numpy().data)


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """The values of all processes of ``group`` (None: all), ordered by rank, on each of them."""
    size = get_world_size(group)
    if size == 1:
        return [value]
    box: list[Any] = [None] * size
    with with_values():
        dist.all_gather_object(box, value, group=group)
    return box


def gather_object(value: T, group: Any = None) -> list[T] | None:
    """The values of all processes, ordered by rank, on rank 0; None elsewhere.

    Args:
        value: it must be picklable. All messages are as long as the longest.
        group: a gloo group of all processes; None: the default one.
    """
    size = get_world_size()
    if size == 1:
        return [value]
    with with_values():
        if group is None:
            box: list[Any] | None = [None] * size if get_rank() == 0 else None
            dist.gather_object(value, box, dst=0, group=group)
            return box
        # torch's function gives every process the sizes of all messages; the largest is enough.
        data = pickle.dumps(value)
        longest = all_reduce(torch.tensor(len(data), device="cpu"), "max", group)
        message = torch.frombuffer(bytearray(data) + bytes(int(longest) - len(data)), dtype=torch.uint8)
        found = gather_tensor(message, group)
        return (
            None if found is None else [pickle.loads(one.numpy().data) for one in found]
        )  # it ends before the padding


def gather_tensor(tensor: Tensor, group: Any = None) -> list[Tensor] | None:
    """The tensors of all processes, of one shape and dtype, by rank; on rank 0 alone. A ``group`` must have all processes."""
    size = get_world_size()
    if size == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(size)] if get_rank() == 0 else None
    dist.gather(tensor, found, dst=0, group=group)
    return found


def side_group(timeout_s: float | None = None, purpose: str = "") -> Any:
    """A second gloo group of all processes, for messages while the main process group is in use.

    The first call for a purpose makes the group; every process must make that call. None for a single process. Messages
    of different purposes may be sent in a different order on each process. The time limit of a message is the
    ``timeout_s`` (seconds) of the first call; default: torch's 30 minutes.
    """
    if get_world_size() == 1:
        return None
    groups = _side_groups.setdefault(dist.group.WORLD, {})
    if purpose not in groups:
        _connect_late(get_world_size())
        groups[purpose] = dist.new_group(backend="gloo", timeout=_timeout(timeout_s))
    return groups[purpose]


def start_reduce(number: int, op: Literal["sum", "max", "min"], group: Any) -> Callable[[], int]:
    """Start an all-reduce of ``number``; return a function that waits for the result and returns it.

    Args:
        group: from ``side_group``.
    """
    if group is None:
        return lambda: number
    with with_values():
        box = torch.tensor(number, device="cpu")  # explicit: the user may have set another default device
    work = dist.all_reduce(box, _REDUCE_OPS.get(op, dist.ReduceOp.SUM), group, async_op=True)

    def wait() -> int:
        work.wait()
        return int(box)

    return wait


def start_gather(number: int, group: Any) -> Callable[[], list[int]]:
    """Start to gather a ``number`` of each process; return a function that waits for them and returns them by rank.

    Args:
        group: from ``side_group``.
    """
    if group is None:
        return lambda: [number]
    with with_values():
        boxes = [torch.tensor(number, device="cpu") for _ in range(get_world_size(group))]
        work = dist.all_gather(boxes, torch.tensor(number, device="cpu"), group, async_op=True)

    def wait() -> list[int]:
        work.wait()
        return [int(box) for box in boxes]

    return wait


def _connect_late(world_size: int) -> None:
    """Let gloo connect processes when they first need it, if they are many; torch before 2.8 cannot.

    Who has set the variable decides: 0 connects all at once, 1 late.
    """
    if world_size >= _CONNECT_LATE_FROM:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _timeout(seconds: float | None) -> datetime.timedelta | None:
    return None if seconds is None else datetime.timedelta(seconds=seconds)


_side_groups: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def group_with_this_process(
    sets: Iterable[Sequence[int]],
    backend: str | None = None,
    timeout_s: float | None = None,
    most_blocks: int | None = None,
) -> Any:
    """Make a process group of each of several disjoint sets of ranks; return this process's, or None; a collective.

    Args:
        backend: None: that of the default group.
        timeout_s: the time limit of a message; None: torch's 30 minutes, or by NCCL its 10.
        most_blocks: how many thread blocks a message may take while NCCL waits for it; None: as many as NCCL likes.
    """
    own = None
    timeout = _timeout(timeout_s)
    for ranks in sets:
        options: Any = None
        if most_blocks is not None and "nccl" in (backend or dist.get_backend_config()):
            options = nccl_options(most_blocks, timeout)
        made = dist.new_group(list(ranks), backend=backend, timeout=timeout, pg_options=options)
        own = made if get_rank() in ranks else own
    return own


def group_among(ranks: tuple[int, ...]) -> Any:
    """The process group of these ranks, of which this process is one; a collective of them alone, the first time.

    Args:
        ranks: ascending.
    """
    if len(ranks) == get_world_size():
        return dist.group.WORLD
    groups = _groups_among.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


_groups_among: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def start_exchange(
    sent: Tensor, sent_sizes: list[int], received_sizes: list[int], group: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """Start to send each process of ``group`` its own part of a tensor; return a function that waits for what the others sent.

    Args:
        sent: of one dimension; the parts in the order of the group's ranks.
        sent_sizes, received_sizes: numbers of elements by rank.
    """
    received = sent.new_empty(sum(received_sizes))
    work: Any = dist.all_to_all_single(
        as_sent(received), as_sent(sent), received_sizes, sent_sizes, group=group, async_op=True
    )

    def wait() -> tuple[Tensor, ...]:
        nonlocal sent
        work.wait()
        del sent  # kept until now
        return torch.split(received, received_sizes)

    return wait


@contextmanager
def group_of(ranks: Sequence[int]) -> Iterator[Any]:
    """Context with a process group of these ranks; None on the other processes. Every process must enter it."""
    made = dist.new_group(list(ranks))
    group = made if get_rank() in ranks else None
    try:
        yield group
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def carries_cpu_tensors(backend: str) -> bool:
    """Whether a group with this back end (a name or ``device:name,...``) can send CPU tensors.

    The answer for a name that torch does not know is True, because torch uses such a back end for every device.
    """
    return "cpu" in tensors_of(backend, default=["cpu"])


def tensors_of(backend: str, default: list[str]) -> list[str]:
    """Types of the devices whose tensors a back end (a name or ``device:name,...``) sends; ``default`` if torch does not say."""
    if ":" in backend:
        return [pair.partition(":")[0].strip() for pair in backend.lower().split(",")]
    return dist.Backend.backend_capability.get(backend.lower(), default)


def group_backend() -> str:
    """The back ends of the default process group, as ``device:name,...``."""
    return str(dist.get_backend_config())


def carry_cpu_tensors_too() -> None:
    """Make the default process group anew with gloo for CPU tensors, if it has no back end for them; a collective.

    For a group that another program has just made and nobody has used. The new one has torch's time limits.
    """
    found = group_backend()
    if carries_cpu_tensors(found):
        return
    store, rank, world_size = default_store(), get_rank(), get_world_size()
    dist.destroy_process_group()
    own = dist.PrefixStore("flextrain/with_cpu", store)  # type: ignore[attr-defined]
    dist.init_process_group(f"cpu:gloo,{found}", store=own, rank=rank, world_size=world_size)


def init_process_group(
    backend: str,
    *,
    rank: int,
    world_size: int,
    init_method: str,
    timeout_s: float,
    job: str = "",
    is_derived: bool = False,
    several_machines: bool = False,
) -> None:
    """Join the default process group; after leaving, it can be joined again. Arguments are as in ``store_of_group``.

    Args:
        several_machines: True if not all processes are on this machine, so that gloo needs an interface between them.

    Raises:
        LaunchError: not all processes joined within ``timeout_s`` seconds.
    """
    store = store_of_group(
        init_method, rank=rank, world_size=world_size, timeout_s=timeout_s, job=job, is_derived=is_derived
    )
    if several_machines:
        choose_interface(store, host_of(init_method), rank, world_size)
    _connect_late(world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_timeout(timeout_s))
    side_group(timeout_s)  # made now, while all are here: waiting for a missing process later would have no time limit


def init_alone(backend: str) -> None:
    """Make a default process group with this process alone."""
    dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def destroy_process_group() -> None:
    """Leave the default process group; nothing happens if there is none."""
    if is_initialized():
        time.sleep(_GLOO_LETS_GO_S)
        _side_groups.pop(dist.group.WORLD, None)
        _groups_among.pop(dist.group.WORLD, None)
        dist.destroy_process_group()
        _forget_meshes()


def leave_groups(groups: Sequence[Any]) -> None:
    """Leave these process groups, on every process that is in them; one that is gone, or that all strategies share, is left out."""
    left = [group for group in groups if group in process_groups()]
    if left:
        time.sleep(_GLOO_LETS_GO_S)
        shared = [each for cache in (_side_groups, _groups_among) for each in cache.get(dist.group.WORLD, {}).values()]
        for group in left:
            if group not in shared:
                dist.destroy_process_group(group)
        _forget_meshes()


def _forget_meshes() -> None:
    if "torch.distributed.tensor" in sys.modules:
        from ..torch_compat.dtensor_private import forget_meshes  # which imports it

        forget_meshes()


@functools.cache
def leave_at_exit(device: torch.device) -> None:
    """Leave the process group when the interpreter exits; wait only a few seconds if it cannot be left.

    Args:
        device: this process's. Communicators are taken down on the current device, which each thread has for itself.
    """
    ends, left = threading.Event(), threading.Event()

    def leave() -> None:
        ends.wait()
        if device.index is not None:
            torch.get_device_module(device).set_device(device)
        destroy_process_group()
        left.set()

    def wait() -> None:
        ends.set()
        left.wait(_LEAVE_TIMEOUT_S)

    # Started now, because Python 3.12 starts no thread while the interpreter exits.
    threading.Thread(target=leave, name="flextrain-leave", daemon=True).start()
    atexit.register(wait)


# Broadcast a model's parameters and buffers from rank 0, and find the buffers that can be averaged.


def share_weights(
    model: nn.Module, parameters: Iterable[Tensor] | None = None, via: torch.device | None = None
) -> None:
    """Broadcast rank 0's parameters and buffers, except those on the meta device; every process must call it.

    Args:
        model: the module that has them.
        parameters: the parameters of which each process holds the whole; default: all.
        via: the device whose memory the messages go through; default: where the tensors are.
    """
    tensors = (*(model.parameters() if parameters is None else parameters), *model.buffers())
    broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta], via=via)


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that can be averaged; others (counters, masks) are equal on all, or do not affect training.

    Of a DTensor it is what this process holds of it, on the same memory.
    """
    found = [buffer for buffer in model.buffers() if can_be_averaged(buffer)]
    return [buffer.to_local() if isinstance(buffer, DTensor) else buffer for buffer in found]


def can_be_averaged(buffer: Tensor) -> bool:
    """Whether a buffer holds numbers of which a mean has a meaning."""
    return buffer.is_floating_point() or buffer.is_complex()
