"""Compilation of DeepSpeed's C++ extensions: avoid the unneeded one, log the others, detect stale locks."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.base.errors import StrategyError
from ...core.torch_compat.torch_private import build_folder, build_lock_is_advisory

logger = logging.getLogger("flextrain")

# A running compiler writes a file more often than this.
STALE_S = 300.0
_SHARED_MEMORY = "deepspeed_shm_comm"


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """Keep ``init_distributed`` from compiling, on CPUs, an extension that only DeepSpeed's inference uses."""
    compatible: dict[str, bool] = importlib.import_module("deepspeed.ops").__compatible_ops__
    before = compatible.get(_SHARED_MEMORY)
    compatible[_SHARED_MEMORY] = False
    try:
        yield
    finally:
        compatible[_SHARED_MEMORY] = bool(before)


@contextlib.contextmanager
def announced(patience_s: float) -> Iterator[None]:
    """Log one line for every extension that DeepSpeed compiles inside, with its folder.

    Args:
        patience_s: seconds to wait for another process that compiles the same extension.

    Raises:
        StrategyError: a stopped compilation has left its lock behind; torch would wait for it without end.
    """
    builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    load = builder.jit_load

    def jit_load(self: Any, verbose: bool = True) -> Any:
        folder = build_folder(self.name)
        await_lock(folder, patience_s)
        if not (folder / f"{self.name}.so").exists():
            logger.info(
                "DeepSpeed compiles its extension %s with the C++ compiler, once on this machine, in %s; that may take minutes",
                self.name,
                folder,
            )
        return load(self, verbose)

    builder.jit_load = jit_load
    try:
        yield
    finally:
        builder.jit_load = load


def await_lock(folder: Path, patience_s: float) -> None:
    """Wait while another process compiles in ``folder``.

    Raises:
        StrategyError: the lock is still there, and nothing was written for long or the time is over.
    """
    lock, deadline, said = folder / "lock", time.monotonic() + patience_s, False
    while _is_locked(lock):
        is_stale = not build_lock_is_advisory() and _age(folder) > STALE_S
        if is_stale or time.monotonic() > deadline:
            raise StrategyError(
                f"{lock}: the lock of the compilation of a DeepSpeed extension is still there; if no process compiles it, remove "
                f"the file: rm {lock}"
            )
        if not said:
            logger.warning("Waiting for a process that compiles an extension of DeepSpeed: %s", lock)
            said = True
        time.sleep(0.2)


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return lock.exists()
    try:
        if not build_lock_is_advisory():
            return True
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _age(folder: Path) -> float:
    """Return the seconds since the last write in a folder."""
    times = [folder.stat().st_mtime]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times)


# The package deepspeed, which may not be installed.


def deepspeed() -> Any:
    """Import and return the package deepspeed.

    Raises:
        StrategyError: it is not installed, or cannot be imported.
    """
    try:
        import deepspeed as found
    except ModuleNotFoundError as error:
        missing = "" if error.name == "deepspeed" else f" ({error})"
        raise StrategyError(
            f'strategy.type: "DeepSpeedStrategy" needs DeepSpeed, pip install flextrain[deepspeed]{missing}'
        ) from None
    return found


def init_distributed(backend: str, device: str) -> None:
    """Let DeepSpeed join the process group that is there.

    Raises:
        StrategyError: an environment variable is missing.
    """
    try:
        with without_shared_memory():
            deepspeed().init_distributed(dist_backend=backend, verbose=False, dist_init_required=False)
    except KeyError as missing:  # of a variable that the accelerator needs
        raise StrategyError(
            f"strategy.device: DeepSpeed needs {missing} in the environment for {device}; flextrain doctor says where it comes from"
        ) from missing
