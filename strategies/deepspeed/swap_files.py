"""SwapFiles: the part of DeepSpeedStrategy that keeps state in files: folders, buffers, and whether all of it fits."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.comm.collectives import all_gather_object, is_main, side_group, start_reduce
from ...core.comm.joint_errors import raising_together, told_by_rank_0
from ...core.errors import LaunchError, StrategyError, counted
from ...optim.adapters.trial import Samples, TrialError
from ...optim.wrapper import OptimWrapper
from ..launchers import detect_launch
from . import swapping
from .async_io import check_async_io, load_async_io
from .config import DeepSpeedConfig
from .offloading import WHERE, Aio, Offload
from .swap_folder import SwapFolder

logger = logging.getLogger("flextrain")

_SUB_GROUP = 50_000_000
# DeepSpeed's own defaults.
_PARAM_BUFFERS, _PARAM_ELEMENTS, _STATE_BUFFERS = 5, 100_000_000, 4
_MASTER = 4  # bytes of a float32 master, and of a gradient
_MAY_LOCK = 14  # the bit of CAP_IPC_LOCK


class SwapFiles:
    """Folders for swap files, removed by ``remove``, and DeepSpeed's options for them.

    Args:
        config: the strategy's options; nothing happens if they keep no state in files.

    Raises:
        StrategyError: DeepSpeed's asynchronous input and output is not compiled and cannot be; of several processes,
            ``open`` raises it.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        self._zero, self._aio = config.zero_optimization, config.aio or Aio()
        self._folders: dict[str, SwapFolder] = {}
        # While a model is built in shards, one parameter is written at a time.
        self._param_buffers, self._param_elements, self._state_buffers = 1, _PARAM_ELEMENTS, _STATE_BUFFERS
        self._patience_s = float(config.timeout_s)
        if self._zero.on_files and _starts_alone(config.launcher):
            check_async_io()

    def open(self) -> None:
        """Load DeepSpeed's extension, compiled if it is not yet, and create this process's folders.

        Raises:
            StrategyError: the extension cannot be compiled, or a folder cannot be created.
        """
        if self._zero.on_files and not self._folders:
            check_async_io()
            load_async_io(self._patience_s)
            swapping.reserve_before_writing()
            for path in dict.fromkeys(str(part.nvme_path) for part in self._zero.on_files):
                self._folders[path] = SwapFolder(Path(path))

    def remove(self) -> None:
        """Remove this process's folders."""
        for folder in self._folders.values():
            folder.remove()
            swapping.forget(folder.path)
        self._folders = {}

    def keys(self, zero: dict[str, Any]) -> dict[str, Any]:
        """Complete DeepSpeed's keys under "zero_optimization" for state in files, and return those under "aio"."""
        for part in self._zero.on_files:
            keys = zero.get(part.key)
            if keys is None:  # without an optimizer, or while the model is built
                continue
            keys["nvme_path"] = str(self._folders[str(part.nvme_path)].path)
            if part is self._zero.offload_optimizer:
                keys["buffer_count"] = self._state_buffers
                zero.setdefault("sub_group_size", _SUB_GROUP)
            else:
                keys |= {"buffer_count": self._param_buffers, "buffer_size": self._param_elements}
                keys.setdefault("max_in_cpu", 0)
                # Gathered parameters keep a buffer each, so they must not stay gathered for a later use.
                zero.setdefault("stage3_max_reuse_distance", 0)
        return self._aio.model_dump() if self._zero.on_files else {}

    @property
    def largest_while_built(self) -> int | None:
        """The largest shard, in elements, of a model that is built in shards; None if these are not in files."""
        param = self._zero.offload_param
        if param is None or not param.on_files:
            return None
        if param.buffer_size is not None:
            self._param_elements = int(param.buffer_size)
        return self._param_elements

    def fit(self, model: nn.Module, wrapper: OptimWrapper | None, world_size: int, dtype: torch.dtype) -> list[Path]:
        """Choose the buffers for a model and its optimizer, and give them to parameters that are in files already.

        A collective: no process writes before all have measured the room on their disks.

        Args:
            world_size: number of processes, which share every parameter.
            dtype: dtype of the model.

        Returns:
            Folders to ``discard`` once masters are filled.

        Raises:
            StrategyError: on every process, if on one of them buffers, the disk or the limit of page-locked memory are
                too small.
        """
        if not self._zero.on_files:
            return []
        with raising_together(), _reachable():
            rooms = self._measured(self._needed(model, wrapper, world_size, dtype))
        check_room(all_gather_object(on_shared_disks(rooms), side_group()))
        param = self._zero.offload_param
        if param is None or not param.on_files:
            return []
        with raising_together(), _reachable():
            return swapping.renew_buffers(model.parameters(), dtype, self._param_buffers, self._param_elements)

    def _needed(
        self, model: nn.Module, wrapper: OptimWrapper | None, world_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        """Choose the buffers, and return the bytes that this process needs, by folder."""
        trained = [p for p in model.parameters() if p.requires_grad] if wrapper is not None else []
        total = sum(swapping.shard_numel(p, world_size) for p in trained)
        states = 0
        needed = dict.fromkeys(self._folders, 0)
        locked = 0
        optimizer, param = self._zero.offload_optimizer, self._zero.offload_param
        if optimizer is not None and optimizer.on_files and wrapper is not None:
            states = _states_of(wrapper)
            self._state_buffers = self._count_state_buffers(states)
            needed[str(optimizer.nvme_path)] += total * _MASTER * (2 + states)
            largest = max((swapping.shard_numel(p, world_size) for p in trained), default=0)
            sub_group = min(total, int(self._zero.sub_group_size or _SUB_GROUP) + largest)
            locked += self._state_buffers * sub_group * _MASTER
            smallest, _ = swapping.smallest_in_files(self._aio.block_size)
            if sub_group * _MASTER < smallest:
                _warn_of_no_effect(optimizer.key, "sub-group", smallest)
        if param is not None and param.on_files:
            held = [swapping.shard_numel(p, world_size) for p in model.parameters()]
            needed[str(param.nvme_path)] += sum(held) * dtype.itemsize
            self._fit_param_buffers(model, world_size, dtype)
            locked += self._param_buffers * self._param_elements * dtype.itemsize
        _check_locked(locked)
        return needed

    def _count_state_buffers(self, states: int) -> int:
        """Return the number of buffers for the master, the gradient, and ``states`` tensors of a sub-group."""
        offload = self._zero.offload_optimizer
        assert offload is not None
        once = 2 + states
        needed = once * (1 + offload.pipeline_read + offload.pipeline_write)
        given = offload.buffer_count
        if given is not None and given < needed:
            raise StrategyError(
                f"{WHERE}.zero_optimization.offload_optimizer.buffer_count: {given} is not enough, this optimizer needs "
                f"{needed}: master, gradient and {counted(states, 'state')} of a sub-group"
                + (", for each sub-group in the pipeline" if needed > once else "")
            )
        return given or max(needed, _STATE_BUFFERS)

    def _fit_param_buffers(self, model: nn.Module, world_size: int, dtype: torch.dtype) -> None:
        param = self._zero.offload_param
        assert param is not None
        where = f"{WHERE}.zero_optimization.offload_param"
        _, smallest = swapping.smallest_in_files(self._aio.block_size)
        swapped: dict[int, tuple[int, str]] = {}
        for name, parameter in model.named_parameters():
            numel = swapping.shard_numel(parameter, world_size)
            if swapping.is_in_file(parameter) or (
                not hasattr(parameter, "ds_tensor") and numel * dtype.itemsize >= smallest
            ):
                swapped[id(parameter)] = numel, name
        largest, name = max(swapped.values(), default=(0, ""))
        if not swapped:
            _warn_of_no_effect(param.key, "parameter", smallest)
        if param.buffer_size is not None and param.buffer_size < largest:
            raise StrategyError(
                f"{where}.buffer_size: {param.buffer_size} is not enough, a process's shard of {name} has {largest} elements"
            )
        count, module = swapping.buffers_at_once(model, set(swapped))
        if param.buffer_count is not None and param.buffer_count < count:
            raise StrategyError(
                f"{where}.buffer_count: {param.buffer_count} is not enough, {module or 'the model'} needs {count} parameters "
                "at a time"
            )
        self._param_buffers = param.buffer_count or max(count, _PARAM_BUFFERS)
        self._param_elements = int(param.buffer_size or max(largest, 1))

    def _measured(self, needed: dict[str, int]) -> list[Room]:
        """Return the room that this process finds for what it needs, by folder."""
        machine = socket.gethostname()
        keys = {str(part.nvme_path): f"{_where(part)}.nvme_path" for part in reversed(self._zero.on_files)}
        return [
            Room(machine, Path(path).stat().st_dev, keys[path], path, shutil.disk_usage(path).free, num_bytes)
            for path, num_bytes in needed.items()
        ]


class Room(NamedTuple):
    """What a process needs in a folder, and what it finds there, in bytes."""

    machine: str
    disk: int
    key: str
    folder: str
    free: int
    needed: int


def on_shared_disks(rooms: Sequence[Room]) -> list[Room]:
    """Let a network disk that several machines see be one disk, rank 0's, with the room that is left of it; a collective.

    Otherwise the free room of a disk would count once for each machine. A disk that several machines share, and rank 0's does
    not, is not recognised.

    Raises:
        StrategyError: rank 0 cannot write to one of its folders.
    """
    marks = told_by_rank_0(lambda: [_marked(room) for room in rooms])
    try:
        seen = [next((mark for mark in marks if _sees(room, mark)), None) for room in rooms]
        found = [
            room if mark is None else room._replace(machine=mark.machine, disk=mark.disk)
            for room, mark in zip(rooms, seen, strict=True)
        ]
        start_reduce(0, "max", side_group())()  # no mark is removed before all have looked
        return found
    finally:
        if is_main():
            for room, mark in zip(rooms, marks, strict=True):
                with contextlib.suppress(OSError):
                    (Path(room.folder) / mark.name).unlink()


class _Mark(NamedTuple):
    name: str
    """Of an empty file in one of rank 0's folders."""
    machine: str
    disk: int


def _marked(room: Room) -> _Mark:
    mark = _Mark(f".flextrain_{uuid.uuid4().hex}.tmp", room.machine, room.disk)
    with _reachable():
        (Path(room.folder) / mark.name).touch()
    return mark


def _sees(room: Room, mark: _Mark) -> bool:
    try:
        return (Path(room.folder) / mark.name).exists()
    except OSError:
        return False


def check_room(rooms: Sequence[Sequence[Room]]) -> None:
    """Raise StrategyError if a disk has less room than all processes on its machine need together.

    Args:
        rooms: those of every process, by rank; each process gets the same and comes to the same end.
    """
    by_disk: dict[tuple[str, int], list[tuple[int, Room]]] = {}
    for rank, found in enumerate(rooms):
        for room in found:
            by_disk.setdefault((room.machine, room.disk), []).append((rank, room))
    machines = {machine for machine, _ in by_disk}
    for (machine, _), sharing in by_disk.items():
        needed, free = sum(room.needed for _, room in sharing), min(room.free for _, room in sharing)
        if needed > free:
            first, local = sharing[0][1], len({rank for rank, _ in sharing})
            at = f" on {machine}" if len(machines) > 1 else ""
            raise StrategyError(
                f'{first.key}: "{first.folder}" has {free / 2**30:.1f} GiB free{at}, and '
                f"{counted(local, 'process', 'processes')} need about {needed / 2**30:.1f} GiB"
            )


@contextmanager
def _reachable() -> Iterator[None]:
    """Raise StrategyError where the folders cannot be looked at or written to any more."""
    try:
        yield
    except OSError as error:
        raise StrategyError(
            f"{WHERE}.zero_optimization: {error.filename or 'nvme_path'}: {error.strerror or error}"
        ) from error


def _starts_alone(launcher: str | None) -> bool:
    """Return whether there are no other processes to tell; how a launch is wrong is said when they should meet."""
    try:
        return detect_launch(launcher).world_size == 1
    except LaunchError:
        return False


def _warn_of_no_effect(key: str, what: str, smallest: int) -> None:
    logger.warning(
        '%s.zero_optimization.%s: device="nvme" has no effect for this model, no process\'s shard of a %s reaches %.0f KiB, and '
        "DeepSpeed keeps smaller ones in memory",
        WHERE,
        key,
        what,
        smallest / 1024,
    )


def _where(part: Offload) -> str:
    return f"{WHERE}.zero_optimization.{part.key}"


def _states_of(wrapper: OptimWrapper) -> int:
    """Return how many tensors like the parameter the optimizer keeps for each.

    Raises:
        StrategyError: it cannot update on the CPU, or not with state in float32.
    """
    kind = type(wrapper.optimizer).__name__
    settings = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in wrapper.param_groups
    ]
    samples = Samples(settings, [[(16,)]] * len(settings), torch.device("cpu"))
    try:
        trial = samples.run(wrapper.make_another, lambda tensor: tensor, updates=1)
    except TrialError as error:
        raise StrategyError(
            f"{wrapper.where}.optimizer: {kind} cannot update on the CPU, where state in files is updated ({error}); choose "
            'AdamW, or device="none"'
        ) from error
    counts = [0]
    for state in trial.states:
        alike = {key: v for key, v in state.items() if isinstance(v, Tensor) and tuple(v.shape) == (16,)}
        if odd := next((key for key, value in alike.items() if value.dtype is not torch.float32), None):
            raise StrategyError(
                f"{wrapper.where}.optimizer: {kind} keeps {odd} as {str(alike[odd].dtype).removeprefix('torch.')}, and "
                'DeepSpeed writes float32 files only; choose AdamW, or device="cpu"'
            )
        counts.append(len(alike))
    return max(counts)


def _check_locked(num_bytes: int) -> None:
    """Raise StrategyError if the system does not let this process lock so much memory; DeepSpeed would crash."""
    resource = importlib.import_module("resource")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or num_bytes <= limit or _may_lock_everything():
        return
    raise StrategyError(
        f"{WHERE}.zero_optimization: buffers for files need {num_bytes / 2**20:.0f} MiB of page-locked memory, and the limit is "
        f"{limit / 2**20:.0f} MiB; raise it (ulimit -l, in Docker --ulimit memlock=-1), or give smaller buffers: sub_group_size, "
        "offload_param.buffer_size"
    )


def _may_lock_everything() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(line.split()[1], 16) >> _MAY_LOCK & 1)
