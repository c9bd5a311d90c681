"""SwapFiles: the part of DeepSpeedStrategy that keeps state in files: folders, buffers, and whether all of it fits."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.base.errors import LaunchError, StrategyError, counted
from ...core.checkpoint.folders import FolderLock, OccupiedError
from ...core.comm.agreement import raising_together
from ...core.comm.collectives import all_gather_object, side_group
from ...core.torch_compat.torch_private import build_folder
from ...optim.trial import Samples, TrialError
from ...optim.wrapper import OptimWrapper
from ..launchers import detect_launch
from . import swapping
from .compiling import announced
from .config import WHERE, Aio, DeepSpeedConfig, Offload

# SwapFolder: a process's own sub-folder for swap files, which is removed at the end, or by the next run after a kill.


logger = logging.getLogger("flextrain")

_PREFIX = "flextrain_swap_"
_ATTEMPTS = 20


class SwapFolder:
    """A new sub-folder that no other process uses, locked until ``remove`` or the end of this process.

    Sub-folders of processes that were killed are removed first; the locks tell them from those in use.

    Args:
        parent: the folder that the user gave.

    Raises:
        StrategyError: no sub-folder can be created.
    """

    def __init__(self, parent: Path) -> None:
        remove_left_over(parent)
        self._process = os.getpid()
        self.path, self._lock = _locked_folder(parent)
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove the folder with all files; may be called again. A forked process leaves it alone."""
        atexit.unregister(self.remove)
        if os.getpid() == self._process:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()


def remove_left_over(parent: Path) -> None:
    """Remove the sub-folders of processes that have ended without doing so."""
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = FolderLock(folder)
        except (OccupiedError, OSError):  # in use, just removed by another process, or of another user
            continue
        # Without locks, as on some network file systems, nobody knows whether it is in use.
        if lock.is_held:
            shutil.rmtree(folder, ignore_errors=True)
            logger.info("Removed %s, the swap files of a process that ended without removing them", folder)
        lock.release()


def _locked_folder(parent: Path) -> tuple[Path, FolderLock]:
    for _ in range(_ATTEMPTS):
        path = parent / f"{_PREFIX}{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"
        try:
            path.mkdir(mode=0o700)
            return path, FolderLock(path)
        except (OccupiedError, FileNotFoundError):
            continue  # another process that starts now took it for left over before it was locked
        except OSError as error:
            raise StrategyError(f"{path}: cannot be created for swap files, {error.strerror}") from error
    raise StrategyError(f"{parent}: swap files need a sub-folder, and other processes remove every new one at once")


# DeepSpeed's asynchronous input and output: what its compilation lacks on this machine, and the compilation itself.


_EXTENSION = "async_io"
_TRIAL = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"


def what_is_missing() -> list[str]:
    """Return what this machine lacks to compile the extension, each with the command that installs it.

    Needs the package deepspeed.
    """
    builder = _builder()
    if importlib.util.find_spec(builder.absolute_name()) is not None:  # compiled when DeepSpeed was installed
        return []
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    # torch asks both before it loads what is compiled already.
    missing = [] if compiler else ["a C++ compiler (apt-get install g++)"]
    if shutil.which("ninja") is None and _own_ninja() is None:
        missing.append("ninja (pip install ninja)")
    if (build_folder(_EXTENSION) / f"{_EXTENSION}.so").exists():
        return missing
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("the headers of Python (apt-get install python3-dev)")
    if compiler and not _links_libaio(compiler):
        missing.append("the headers of libaio (apt-get install libaio-dev)")
    if _accelerator() == "cuda" and importlib.import_module("torch.utils.cpp_extension").CUDA_HOME is None:
        missing.append("the CUDA toolkit (install it, and set CUDA_HOME)")
    return missing


def check_async_io() -> None:
    """Raise StrategyError if the extension is not compiled and cannot be."""
    if missing := what_is_missing():
        raise StrategyError(
            f'strategy.zero_optimization: device="nvme" needs DeepSpeed\'s asynchronous input and output, whose compilation '
            f'lacks {" and ".join(missing)}; or choose device="cpu"'
        )


def load_async_io(patience_s: float) -> None:
    """Load the extension, compiled if it is not yet.

    Args:
        patience_s: seconds to wait for another process that compiles it.

    Raises:
        StrategyError: it cannot be compiled or loaded.
    """
    with announced(patience_s), ninja_on_path():
        try:
            _builder().load(verbose=False)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            if isinstance(error, StrategyError):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StrategyError(
                f'strategy.zero_optimization: device="nvme" needs DeepSpeed\'s asynchronous input and output, which cannot be '
                f"compiled: {reason[:300]}"
            ) from error


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """Let torch use the ninja of this Python's packages, also when its virtual environment is not activated.

    Another version of ninja would compile everything again.
    """
    before, folder = os.environ.get("PATH", ""), _own_ninja()
    if folder is not None:
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _own_ninja() -> Path | None:
    """Return the folder of a ninja that pip has installed for this Python; None if there is none."""
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    if importlib.util.find_spec("ninja") is not None:
        folders.append(Path(importlib.import_module("ninja").BIN_DIR))
    return next((folder for folder in folders if (folder / "ninja").exists()), None)


def _builder() -> Any:
    return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()


def _accelerator() -> str:
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    return str(accelerator.device_name())


def _links_libaio(compiler: str) -> bool:
    command = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    return subprocess.run(command, input=_TRIAL, capture_output=True, text=True, check=False).returncode == 0


_SUB_GROUP = 50_000_000
# DeepSpeed's own defaults.
_PARAM_BUFFERS, _STATE_BUFFERS = 5, 4
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
        self._param_buffers, self._param_elements, self._state_buffers = _PARAM_BUFFERS, 1, _STATE_BUFFERS
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

    def prepare(self, model: nn.Module, world_size: int) -> None:
        """Choose the buffers for a model whose parameters are about to be sharded in float32, see ``fit``."""
        param = self._zero.offload_param
        if param is not None and param.on_files:
            self._fit_param_buffers(model, world_size, torch.float32)

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
        check_room(all_gather_object(rooms, side_group()))
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
