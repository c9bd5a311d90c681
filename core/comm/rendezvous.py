"""Rendezvous of a job's processes: open the store, and give every process group keys of its own in it."""

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
    """A store that this process has opened; rank 0 may serve it."""

    where: tuple[str, ...]
    store: Any


_endpoint: _Endpoint | None = None


def store_of_group(init_method: str, *, rank: int, world_size: int, timeout_s: float, job: str = "") -> Any:
    """Wait for all processes, and return the job's store under a prefix for the process group that is made next.

    The store still holds the addresses of a group that was left, or whose processes were killed: torchrun's agent keeps
    it over restarts. A process would try those. Therefore every group has a number, and its keys start with it. Groups
    of each world size are counted apart: of a job that grows and shrinks, some processes miss groups of other sizes.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file://path``.
        job: an identifier that only the processes of this job have; empty if there is none.

    Raises:
        LaunchError: the store or a process was not there within ``timeout_s`` seconds, or belongs to another job.
    """
    store = _open(init_method, rank, world_size, timeout_s)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    _check_job(store, init_method, rank, timeout_s, job)
    home = f"flextrain/of {world_size}"
    own = f"{home}/groups/{rank}"
    while True:
        # Counted in the store, because a restarted process must not begin with number 1 again.
        number = store.add(own, 1)
        if number > 1:  # no process shall wait for this one in its previous group
            store.compare_set(f"{home}/{number - 1}/state", "", _OVER)
        state = f"{home}/{number}/state"
        if store.add(f"{home}/{number}/here", 1) == world_size:
            store.compare_set(state, "", _GO)
        is_late = not await_key(store, state, timeout_s)
        if store.compare_set(state, "", _OVER).decode() == _GO:
            return dist.PrefixStore(f"{home}/{number}", store)  # type: ignore[attr-defined]
        if is_late:
            missing = [other for other in range(world_size) if store.add(f"{home}/groups/{other}", 0) < number]
            raise LaunchError(
                f"launcher: rank {', '.join(map(str, missing))} of {counted(world_size, 'process', 'processes')} did not "
                f"come to {_said(init_method)} within {timeout_s:g} s"
            )


def await_key(store: Any, key: str, timeout_s: float) -> bool:
    """Whether a process sets ``key`` within ``timeout_s`` seconds.

    Store.wait would delay signals, also Ctrl-C, until it returns, and it prints two lines when it times out.
    """
    began = time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return False
        time.sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, waited / 20), timeout_s - waited))
    return True


def _check_job(store: Any, init_method: str, rank: int, timeout_s: float, job: str) -> None:
    """Raise LaunchError if the store belongs to another job that uses the same port."""
    if not job:
        return
    if rank == 0:
        store.set("flextrain/job", job)
        return
    if not await_key(store, "flextrain/job", timeout_s):
        return  # meet() then reports that rank 0 is missing
    if (here := store.get("flextrain/job").decode()) != job:
        raise LaunchError(
            f"launcher: {_said(init_method)} is used by {here}, this process belongs to {job}; set MASTER_PORT"
        )


def _open(init_method: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """The store at ``init_method``, kept open until another one is needed: late processes need that of rank 0."""
    global _endpoint
    where: tuple[str, ...] = (str(os.getpid()), init_method, str(rank), str(world_size))
    if init_method.startswith("env://"):
        where += (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    if _endpoint is None or _endpoint.where != where:
        _endpoint = None  # close the old store first: the new one may need its port
        timeout = datetime.timedelta(seconds=timeout_s)
        if rank > 0 and init_method.startswith(("env://", "tcp://")):
            _await_server(_said(init_method).removeprefix("tcp://"), min(timeout_s, _PATIENCE_S))
        try:
            store = _agents_store(timeout) if init_method.startswith("env://") else None
            if store is None:
                store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise LaunchError(
                f"launcher: rank {rank} did not find the others at {_said(init_method)}, {reason}"
            ) from error
        _endpoint = _Endpoint(where, store)
    return _endpoint.store


def _agents_store(timeout: datetime.timedelta) -> Any:
    """The store that torchrun's agent keeps; None if it keeps none.

    ``rendezvous`` of some versions of torch puts the number of restarts before every key. Agents of several machines
    need not have counted alike, because a change of members is no restart to them, and their workers would never meet.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


def _await_server(address: str, patience_s: float) -> None:
    """Return as soon as rank 0 listens, or after ``patience_s``: torch would retry only after almost a second."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s).close()
            return
        except (OSError, ValueError):  # torch reports an error that lasts
            time.sleep(0.01)


def _said(init_method: str) -> str:
    if init_method.startswith("env://"):
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return init_method
