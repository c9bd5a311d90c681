"""DeepSpeed's C++ extensions: not compiled where training does not need them, announced where it does, and never waited for in vain."""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import StrategyError
from ...core.torch_private import build_folder

logger = logging.getLogger("flextrain")

# A compiler that is at work writes a file more often than this.
STALE_S = 300.0
_SHARED_MEMORY = "deepspeed_shm_comm"


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """Around the start of DeepSpeed's communication, which on CPUs compiles an extension that only its inference uses."""
    compatible: dict[str, bool] = importlib.import_module("deepspeed.ops").__compatible_ops__
    before = compatible.get(_SHARED_MEMORY)
    compatible[_SHARED_MEMORY] = False
    try:
        yield
    finally:
        compatible[_SHARED_MEMORY] = bool(before)


@contextlib.contextmanager
def announced(patience_s: float) -> Iterator[None]:
    """Have one line say what DeepSpeed is about to compile, and where.

    Args:
        patience_s: how long another process, which compiles the same, is waited for.

    Raises:
        StrategyError: a process that was compiling it has left its lock behind, for which torch would wait for ever.
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
        StrategyError: nobody does, or not in time, and the lock is still there.
    """
    lock, deadline, said = folder / "lock", time.monotonic() + patience_s, False
    while lock.exists():
        holder = _who_has_open(lock)
        if (holder is None and _age(folder) > STALE_S) or time.monotonic() > deadline:
            who = f"process {holder} holds it" if holder else "no process here holds it"
            raise StrategyError(
                f"{lock}: a process was to compile an extension of DeepSpeed and its lock is still there, {who}; remove the "
                f"file if nobody compiles on another machine: rm {lock}"
            )
        if not said:
            who = f"process {holder}" if holder else "another process, of which nothing is seen here,"
            logger.warning("Waiting for %s, which compiles an extension of DeepSpeed: %s", who, lock)
            said = True
        time.sleep(0.2)


def _age(folder: Path) -> float:
    """Seconds since anything was written in a folder."""
    times = [folder.stat().st_mtime]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times)


def _who_has_open(lock: Path) -> int | None:
    """A process of this machine that has the file open, as torch's has while it compiles; None if none is seen."""
    target = lock.resolve()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
            if link.readlink() == target:
                return int(link.parts[2])
    return None
