"""Stage 3's state in files: DeepSpeed's swappers from inside, as in engine_internals written for and tested with 0.19.8.

Between updates a swapped sub-group's master and its optimizer state have no elements: their values are in one file each,
in the dtype of the tensor, padded to whole sectors. So are the shards of swapped parameters (``p.ds_tensor``) while they
are not gathered. Tensors mapped from these files take the place of values in memory: what reads or writes them, also
beyond a later update, reads and writes the files, and the system keeps only what it has memory for.

The swappers read and write past the page cache. Linux writes the cache's changes to the disk before such a read, and drops
what the cache has of the range after such a write, so both see the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.base.errors import StrategyError


def smallest_in_files(block_size: int) -> tuple[int, int]:
    """Return the bytes from which on DeepSpeed keeps a sub-group's state, and a parameter's shard, in a file."""
    state, param = (
        int(importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}").MIN_AIO_BYTES)
        for name in ("optimizer_utils", "partitioned_param_swapper")
    )
    return max(state, block_size), max(param, block_size)


def map_file(path: str | Path, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the first ``numel`` elements of a file as a tensor that shares them with the file."""
    return torch.from_file(os.fspath(path), shared=True, size=numel, dtype=dtype)


def _new_file(path: str | Path, num_bytes: int) -> None:
    Path(path).unlink(missing_ok=True)
    _reserve(path, num_bytes)


# Masters and optimizer state


def _swapper(engine: Any) -> Any | None:
    return getattr(engine.optimizer, "optimizer_swapper", None)


def has_files(engine: Any) -> bool:
    """Return whether the optimizer's state is in files."""
    return _swapper(engine) is not None


@contextlib.contextmanager
def mapped(engine: Any) -> Iterator[None]:
    """Inside, swapped masters and their optimizer state have values, which are mapped from the files.

    Views of them that are taken inside stay valid afterwards.
    """
    swapper = _swapper(engine)
    if swapper is None:
        yield
        return
    for info in swapper.swap_params_info.values():
        for kept in info.tensors:
            kept.compute_tensor.data = map_file(kept.swap_path, info.numel(), info.dtype())
    try:
        yield
    finally:
        for info in swapper.swap_params_info.values():
            info.release_memory()


class IncomingState:
    """Optimizer state of a checkpoint for swapped masters, in files beside theirs until it is adopted.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        self._swapper: Any = _swapper(engine)
        self._paths: dict[int, Path] = {}  # by address of the mapped tensor
        self._tensors: list[Tensor] = []  # so that no address is used twice

    def zeros(self, flat: Tensor, key: str, dtype: torch.dtype) -> Tensor:
        """Return zeros of the shape of the master ``flat``, mapped from a new file if the master is swapped."""
        info = self._info(flat)
        if info is None or not self._swapper.is_swappable_tensor(numel=info.numel()) or dtype is not info.dtype():
            return torch.zeros_like(flat, dtype=dtype, requires_grad=False)
        path = Path(info.swap_folder) / f"{key}-{info.param_id}.incoming.swp"
        _new_file(path, self._num_bytes(info))
        tensor = map_file(path, info.numel(), dtype)
        self._paths[tensor.data_ptr()] = path
        self._tensors.append(tensor)
        return tensor

    def adopt(self) -> None:
        """Make the values in the torch optimizer's state those of the swap files; inside ``mapped``."""
        if self._swapper is None:
            return
        for info in self._swapper.swap_params_info.values():
            master = info.tensors[0]
            info.tensors, info.has_state_tensors = [master], False
            self._swapper._update_param_state_info(info, master.compute_tensor)
            for kept in info.tensors[1:]:
                own = self._paths.get(kept.compute_tensor.data_ptr())
                if own is None:
                    own = Path(f"{kept.swap_path}.new")
                    _new_file(own, self._num_bytes(info))
                    map_file(own, info.numel(), info.dtype()).copy_(kept.compute_tensor)
                own.replace(kept.swap_path)
        self._paths, self._tensors = {}, []

    def _info(self, flat: Tensor) -> Any | None:
        infos = self._swapper.swap_params_info.values() if self._swapper else ()
        return next((info for info in infos if info.tensors[0].compute_tensor is flat), None)

    def _num_bytes(self, info: Any) -> int:
        return int(self._swapper._io_aligned_numel(info.numel())) * int(info.dtype().itemsize)


# Updates


def keep_gradients_in_memory(engine: Any) -> None:
    """Keep the gradients of swapped sub-groups where they are, in host memory, until the update.

    DeepSpeed would write them too, and read them to any position of a buffer. The system reads to whole sectors of memory
    only; DeepSpeed does not look at the error, and trains with what the buffer held before.
    """
    swapper = _swapper(engine)
    if swapper is None:
        return

    def swap_out_gradients(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Tensor]) -> None:
        kept = swapper.swap_params_info[parameter.ds_id].unswapped_gradients
        kept.update(zip(gradient_offsets, gradient_tensors, strict=True))

    swapper.swap_out_gradients = swap_out_gradients


# Writing

_reserved: set[str] = set()
_WRITERS = (
    "utils", "async_swapper", "optimizer_utils", "partitioned_optimizer_swapper", "pipelined_optimizer_swapper",
    "partitioned_param_swapper",
)  # fmt: skip


def reserve_before_writing() -> None:
    """Make DeepSpeed's swappers reserve the room of a file before they write it; may be called again.

    They do not look at errors of writing: a full disk would be noticed by nobody.
    """
    first = importlib.import_module("deepspeed.runtime.swap_tensor.utils").swap_out_tensors
    if getattr(first, "reserves", False):
        return

    def swap_out_tensors(handle: Any, buffers: list[Tensor], paths: list[str]) -> Any:
        for buffer, path in zip(buffers, paths, strict=True):
            if path not in _reserved:
                _reserve(path, buffer.nbytes)
        return first(handle, buffers, paths)

    swap_out_tensors.reserves = True  # type: ignore[attr-defined]
    for name in _WRITERS:
        importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}").swap_out_tensors = swap_out_tensors  # type: ignore[attr-defined]


def _reserve(path: str | Path, num_bytes: int) -> None:
    try:
        with Path(path).open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise StrategyError(
            f"{path}: {num_bytes / 2**20:.1f} MiB of swapped state cannot be written, {error.strerror}"
        ) from error
    _reserved.add(os.fspath(path))


# Parameters


@contextlib.contextmanager
def param_files_in(dtype: torch.dtype) -> Iterator[None]:
    """Make the files of parameters that are sharded inside have ``dtype``: 0.19.8 takes bfloat16 for float32.

    Their buffers are taken from parameters that were read ahead, or are gathered, when there are none left. 0.19.8 ends
    with an AssertionError, as in an evaluation after training: it reads ahead what a backward would need.
    """
    module: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    swapper = module.AsyncPartitionedParameterSwapper
    module.AsyncPartitionedParameterSwapper = lambda config, _: _with_room(swapper)(config, dtype)
    try:
        yield
    finally:
        module.AsyncPartitionedParameterSwapper = swapper


@functools.cache
def _with_room(base: Any) -> Any:
    """Return a subclass of DeepSpeed's swapper of parameters that takes buffers back."""

    class SwapperWithRoom(base):  # type: ignore[misc]
        def __init__(self, config: Any, dtype: torch.dtype) -> None:
            super().__init__(config, dtype)
            self._holders: dict[int, Any] = {}

        def swap_in(self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
            # What is read ahead may name a parameter twice, for forward and for backward.
            params = list({parameter.ds_id: parameter for parameter in params}.values())
            if swap_in_buffers is None and len(params) > self.available_swap_in_buffers():
                self._take_back(len(params) - self.available_swap_in_buffers())
            self._holders |= {parameter.ds_id: parameter for parameter in params}
            super().swap_in(params, async_op, swap_in_buffers)

        def _take_back(self, count: int) -> None:
            self.synchronize_reads()
            holders = [self._holders[number] for number in self.param_id_to_buffer_id if number in self._holders]
            ahead = [p for p in holders if p.ds_status.name == "NOT_AVAILABLE"]
            # A gathered parameter has its values elsewhere, unless it is whole in its only shard.
            gathered = [p for p in holders if p.ds_status.name == "AVAILABLE" and p.ds_tensor.ds_numel < p.ds_numel]
            taken = [*reversed(ahead), *gathered][:count]
            if len(taken) < count:
                raise StrategyError(
                    f"strategy.zero_optimization.offload_param.buffer_count: {self.param_buffer_count} is not enough for the "
                    f"parameters that are in use at a time, give {self.param_buffer_count + count - len(taken)} or more"
                )
            self.remove_partition_and_release_buffers(taken)

    return SwapperWithRoom


def is_in_file(parameter: Any) -> bool:
    """Return whether the shard of a parameter of stage 3 is kept in a file."""
    return getattr(getattr(parameter, "ds_tensor", None), "final_location", None) == "nvme"


def shard_in_file(parameter: Any) -> Tensor:
    """Return this process's shard of a parameter, padding included, mapped from its file."""
    swapper = parameter.nvme_swapper
    return map_file(swapper.get_path(parameter, must_exist=True), int(parameter.ds_tensor.ds_numel), swapper.dtype)


def param_swapper(parameters: Iterable[Any]) -> Any | None:
    """Return the swapper of a model's parameters; None if none is swapped."""
    found = (getattr(parameter, "nvme_swapper", None) for parameter in parameters)
    return next((swapper for swapper in found if swapper is not None), None)


def drop_buffers(parameters: Iterable[Any]) -> None:
    """Drop shards that were read ahead: DeepSpeed would update them and not their files."""
    parameters = list(parameters)
    swapper = param_swapper(parameters)
    if swapper is None:
        return
    swapper.synchronize_reads()
    held = swapper.param_id_to_buffer_id
    if held:
        swapper.remove_partition_and_release_buffers([p for p in parameters if p.ds_id in held])


def renew_buffers(parameters: Iterable[Any], dtype: torch.dtype, count: int, size: int) -> list[Path]:
    """Give a swapper that a model was built with other buffers, and write the shards again in ``dtype``.

    Args:
        count: number of buffers.
        size: elements of a buffer.

    Returns:
        The folder of the shards in the former dtype, which is of no use any more once their values are elsewhere.
    """
    parameters = [parameter for parameter in parameters if is_in_file(parameter)]
    swapper = param_swapper(parameters)
    if swapper is None:
        return []
    drop_buffers(parameters)
    before = {parameter.ds_id: (shard_in_file(parameter), parameter.ds_tensor.ds_numel) for parameter in parameters}
    # The constructor empties the folder of its dtype; mapped files live on in any other.
    former = Path(swapper.swap_folder)
    kept = former.with_name(f"{former.name}_{str(swapper.dtype).removeprefix('torch.')}_former")
    former.rename(kept)
    swapper.aio_read_handle.free_cpu_locked_tensor(swapper.buffers)
    options = swapper.swap_config.model_copy(update={"buffer_count": count, "buffer_size": size})
    config = SimpleNamespace(zero_config=SimpleNamespace(offload_param=options), aio_config=swapper.aio_config)
    swapper.__init__(config, dtype)
    for parameter in parameters:
        values, numel = before[parameter.ds_id]
        path = swapper.get_path(parameter)
        _new_file(path, int(swapper._io_aligned_numel(numel)) * dtype.itemsize)
        map_file(path, numel, dtype).copy_(values)
        swapper.param_id_to_numel[parameter.ds_id] = numel
    return [kept]


def free_buffers(parameters: Iterable[Any]) -> None:
    """Free the page-locked buffers of a model's parameters, whose values are lost; the process would keep them."""
    parameters = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
    swapper = param_swapper(parameters)
    if swapper is None:
        return
    drop_buffers(parameters)
    for buffer in (swapper.buffers, swapper.partitioned_swap_buffer):
        if buffer is not None:
            swapper.aio_read_handle.free_cpu_locked_tensor(buffer)
    swapper.buffers = swapper.partitioned_swap_buffer = swapper.partitioned_swap_pool = None


def forget(folder: Path) -> None:
    """Forget that files in a folder, which is removed, have their room."""
    _reserved.difference_update([path for path in _reserved if Path(path).is_relative_to(folder)])


def discard(folders: Iterable[Path]) -> None:
    """Remove folders of ``renew_buffers``; tensors mapped from them stay valid."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def shard_numel(parameter: Any, world_size: int) -> int:
    """Return the elements of a process's shard of a parameter, which is sharded or will be; padding included."""
    numel = int(getattr(parameter, "ds_numel", parameter.numel()))
    return -(-numel // world_size)


def buffers_at_once(model: nn.Module, swapped: set[int]) -> tuple[int, str]:
    """Return how many of the ``swapped`` parameters (by id) a forward needs at one time at most, and in which module.

    A module's own parameters stay gathered while its submodules run.
    """

    def needed(module: nn.Module, name: str) -> tuple[int, str]:
        own = sum(id(parameter) in swapped for parameter in module.parameters(recurse=False))
        below = [needed(child, f"{name}.{key}" if name else key) for key, child in module.named_children()]
        most, where = max(below, default=(0, name))
        return own + most, where if most else name

    return needed(model, "")
