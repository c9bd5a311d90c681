"""Where the processes of a job find each other: a store, and in it a place of its own for every group they form."""

from __future__ import annotations

import datetime
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import LaunchError, counted

_GO, _OVER = "go", "over"
_PATIENCE_S = 3.0
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.05


@dataclass(frozen=True)
class _Endpoint:
    """A store that this process has opened; rank 0 may be the one that serves it."""

    where: tuple[str, ...]
    store: Any


_endpoint: _Endpoint | None = None


def meet(init_method: str, *, rank: int, world_size: int, timeout_s: float, job: str = "") -> Any:
    """The part of the job's store that belongs to the group which is formed next, as soon as all processes are here.

    Addresses of a group that was left are still in the store, and whoever is early would try those. Therefore every group
    has a number, and what it keeps stands under it.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file://path``.
        job: what processes of this job have in common and others have not; where it is known.

    Raises:
        LaunchError: the store or a process did not come within ``timeout_s`` seconds, or belongs to another job.
    """
    store = _open(init_method, rank, world_size, timeout_s)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    _check_job(store, init_method, rank, timeout_s, job)
    own = f"flextrain/groups/{rank}"
    while True:
        # Counted in the store, so that a process which was started again does not begin from the first.
        number = store.add(own, 1)
        if number > 1:  # nobody waits for this process there any more
            store.compare_set(f"flextrain/{number - 1}/state", "", _OVER)
        state = f"flextrain/{number}/state"
        if store.add(f"flextrain/{number}/here", 1) == world_size:
            store.compare_set(state, "", _GO)
        is_late = not await_key(store, state, timeout_s)
        if store.compare_set(state, "", _OVER).decode() == _GO:
            return dist.PrefixStore(f"flextrain/{number}", store)  # type: ignore[attr-defined]
        if is_late:
            missing = [other for other in range(world_size) if store.add(f"flextrain/groups/{other}", 0) < number]
            raise LaunchError(
                f"launcher: rank {', '.join(map(str, missing))} of {counted(world_size, 'process', 'processes')} did not "
                f"come to {_said(init_method)} within {timeout_s:g} s"
            )


def await_key(store: Any, key: str, timeout_s: float) -> bool:
    """Whether somebody has set ``key`` within ``timeout_s`` seconds.

    Store.wait would keep signals, Ctrl-C too, until it ends, and print two lines of its own when it does in vain.
    """
    began = time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return False
        time.sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, waited / 20), timeout_s - waited))
    return True


def _check_job(store: Any, init_method: str, rank: int, timeout_s: float, job: str) -> None:
    """Raise LaunchError if the store is rank 0's of another job, which happens to have chosen the same port."""
    if not job:
        return
    if rank == 0:
        store.set("flextrain/job", job)
        return
    if not await_key(store, "flextrain/job", timeout_s):
        return  # rank 0 will be missed
    if (here := store.get("flextrain/job").decode()) != job:
        raise LaunchError(
            f"launcher: {_said(init_method)} is where {here} meets, this process belongs to {job}; set MASTER_PORT"
        )


def _open(init_method: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """The store at ``init_method``, kept until another is asked for: a process that is late needs rank 0's."""
    global _endpoint
    where: tuple[str, ...] = (str(os.getpid()), init_method, str(rank), str(world_size))
    if init_method.startswith("env://"):
        where += (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    if _endpoint is None or _endpoint.where != where:
        _endpoint = None  # the old one goes before the new one comes, which may have its port
        timeout = datetime.timedelta(seconds=timeout_s)
        if rank > 0 and init_method.startswith(("env://", "tcp://")):
            _await_server(_said(init_method).removeprefix("tcp://"), min(timeout_s, _PATIENCE_S))
        try:
            store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise LaunchError(
                f"launcher: rank {rank} did not find the others at {_said(init_method)}, {reason}"
            ) from error
        _endpoint = _Endpoint(where, store)
    return _endpoint.store


def _await_server(address: str, patience_s: float) -> None:
    """Return as soon as rank 0 listens, or after a while: torch, when it comes too early, tries again after most of a second."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s).close()
            return
        except (OSError, ValueError):  # torch has the words for what is wrong for good
            time.sleep(0.01)


def _said(init_method: str) -> str:
    if init_method.startswith("env://"):
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return init_method
