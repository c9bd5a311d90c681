"""Rendezvous of a job's processes: open the store, and give every process group keys of its own in it."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.errors import LaunchError, counted

# Addresses of this machine: whether one is its own, how it reaches another machine, and by which interface.


_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_NAME_LENGTH = 16


def resolve(host: str) -> list[str]:
    """The addresses of ``host``, the preferred one first.

    Raises:
        OSError: there are none.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one of more than 63 letters
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_own(host: str) -> bool:
    """Whether one of the addresses of ``host`` belongs to this machine; False too if the name is unknown."""
    with contextlib.suppress(OSError):
        return any(_can_bind(address) for address in resolve(host))
    return False


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can be reached at ``address``."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(host: str) -> str | None:
    """The own address from which this machine would send to ``host``; None if it knows no way. Nothing is sent."""
    with contextlib.suppress(OSError):
        for address in resolve(host):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
    return None


def own_name_is_loopback() -> bool:
    """Whether gloo, which takes the address of the machine's own name, would take one that others cannot reach."""
    try:
        usable = [address for address in resolve(socket.gethostname()) if _can_bind(address)]
    except OSError:
        return True  # gloo takes 127.0.0.1 then
    return not usable or is_loopback(usable[0])


def interface_of(address: str) -> str | None:
    """Name of the network interface with this address; None where it cannot be found, as on other systems than Linux."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_LENGTH}s24x", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                if reply[_NAME_LENGTH + 4 : _NAME_LENGTH + 8] == wanted.packed:
                    return name
    return None


def _interface_of_ipv6(digits: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.split()[0] == digits), None)


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


# The network interface that gloo uses between machines.


_logger = logging.getLogger("flextrain")

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(store: Any, master: str, rank: int, world_size: int) -> None:
    """Set GLOO_SOCKET_IFNAME if gloo would give its peers an address that they cannot reach; a collective.

    gloo listens at the address of the machine's own name. Debian's /etc/hosts gives 127.0.1.1 for it, and processes on
    other machines would then look for this one on their own. Nothing changes where the variable is set, where the own
    name has an address that others reach, or where all processes are on one machine.

    Args:
        store: one whose keys no other process group uses.
        master: name or address of rank 0's machine.
    """
    address = own_address_towards(master) or ""
    # All tell, because on rank 0's machine the master's name may stand for 127.0.1.1 too: it needs another one's address.
    store.set(f"address/{rank}", address)
    if os.environ.get(VARIABLE) or not own_name_is_loopback():
        return
    if not address or is_loopback(address):
        others = (text.decode() for text in store.multi_get([f"address/{other}" for other in range(world_size)]))
        away = next((other for other in others if other and not is_loopback(other)), None)
        address = (away and own_address_towards(away)) or ""
    if not address or is_loopback(address) or (name := interface_of(address)) is None:
        return
    os.environ[VARIABLE] = name
    _logger.warning(
        "%s is set to %s (%s) for gloo, because this machine's own name stands for an address that other machines cannot "
        "reach; set the variable yourself to choose another interface",
        VARIABLE,
        name,
        address,
    )


# Variables that a process has once: ranks that are threads of one process exchange them when their turns change.
#
# Reading and writing such a variable costs nothing more than any other: a module only says, once, that it is one.


@dataclass(frozen=True)
class ProcessVariable:
    """An attribute of a module, class or object, or an item of a dict; ``initial`` is its value before any rank ran."""

    owner: Any
    name: str
    initial: Any

    def get(self) -> Any:
        """The value; a list or dict is copied, because the next rank shall not change this one's."""
        owner = self.owner
        return _copied(owner[self.name] if isinstance(owner, MutableMapping) else vars(owner)[self.name])

    def set(self, value: Any) -> None:
        """Put a value in its place."""
        if isinstance(self.owner, MutableMapping):
            self.owner[self.name] = _copied(value)
        else:
            setattr(self.owner, self.name, _copied(value))


PROCESS_VARIABLES: list[ProcessVariable] = []
"""Those of the modules that are imported so far."""


def each_process_has(owner: Any, *names: str) -> None:
    """Note that variables belong to a process, not to what it computes with; ``owner`` may be a module, class or dict."""
    for name in names:
        value = owner[name] if isinstance(owner, MutableMapping) else vars(owner)[name]
        PROCESS_VARIABLES.append(ProcessVariable(owner, name, _copied(value)))


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


_GO, _OVER, _LEFT, _ASKED = "go", "over", "left ", "asked "
_JOB = "flextrain/job"
_PATIENCE_S = 3.0
# How long the name of rank 0's machine may be unknown, while a name server is silent, and in a pod of Kubernetes.
_NAME_S, _NAME_IN_POD_S, _NAME_NAP_S = 15.0, 300.0, 0.5
# torchrun's agent serves its store before it starts processes: one that does not answer for so long has ended.
_AGENT_S = 120.0
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.05


class EndAskedError(LaunchError):
    """Another process was asked to end before it came to the process group; the text says by what."""


@dataclass(frozen=True)
class _Endpoint:
    """A store that this process has opened; rank 0 may serve it."""

    where: tuple[str, ...]
    store: Any


_endpoint: _Endpoint | None = None
each_process_has(sys.modules[__name__], "_endpoint")


def store_of_group(
    init_method: str, *, rank: int, world_size: int, timeout_s: float, job: str = "", is_derived: bool = False
) -> Any:
    """Wait for all processes, and return the job's store under a prefix for the process group that is made next.

    The store still holds the addresses of a group that was left, or whose processes were killed: torchrun's agent keeps
    it over restarts. A process would try those. Therefore every group has a number, and its keys start with it. Groups
    of each world size are counted apart: of a job that grows and shrinks, some processes miss groups of other sizes.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file://path``.
        job: an identifier that only the processes of this job have; empty if there is none.
        is_derived: True if nobody gave the address; it is then an error at once if it is not of rank 0's own machine.

    Raises:
        LaunchError: the store or a process was not there within ``timeout_s`` seconds, or belongs to another job; or a
            process left before it came to this call, and said why (``say_why_this_process_leaves``).
        EndAskedError: a process left because it was asked to.
    """
    store = _open(init_method, rank, world_size, timeout_s, is_derived)
    try:
        return _group_in(store, init_method, rank, world_size, timeout_s, job)
    except dist.DistNetworkError as error:
        keeper = "rank 0" if _is_served_by_rank_0(init_method) else "the launcher"
        raise LaunchError(
            f"launcher: {_said(init_method)} was closed while rank {rank} waited there, {keeper} has ended or no longer waits"
        ) from error


def _group_in(store: Any, init_method: str, rank: int, world_size: int, timeout_s: float, job: str) -> Any:
    _check_job(store, init_method, rank, world_size, timeout_s, job)
    home = _home(world_size)
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
        verdict = store.compare_set(state, "", _OVER).decode()
        if verdict == _GO:
            return dist.PrefixStore(f"{home}/{number}", store)  # type: ignore[attr-defined]
        if verdict.startswith(_LEFT):
            store.add(f"{home}/{number}/heard", 1)
            raise LaunchError(f"launcher: {verdict.removeprefix(_LEFT)}")
        if verdict.startswith(_ASKED):
            store.add(f"{home}/{number}/heard", 1)
            raise EndAskedError(verdict.removeprefix(_ASKED))
        if is_late:
            missing = [other for other in range(world_size) if store.add(f"{home}/groups/{other}", 0) < number]
            raise LaunchError(
                f"launcher: rank {', '.join(map(str, missing))} of {counted(world_size, 'process', 'processes')} did not "
                f"come to {_said(init_method)} within {timeout_s:g} s"
            )


def _home(world_size: int) -> str:
    """Where the keys of groups of this size begin."""
    return f"flextrain/of {world_size}"


def await_key(store: Any, key: str, timeout_s: float, pace_s: float = 0.0) -> bool:
    """Whether a process sets ``key`` within ``timeout_s`` seconds.

    Store.wait would delay signals, also Ctrl-C, until it returns, and it prints two lines when it times out.

    Args:
        pace_s: seconds between two questions after a long wait, if many processes ask; each question comes within 5 % of
            the time that was waited before it.
    """
    began, longest = time.monotonic(), max(_LONGEST_NAP_S, pace_s)
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return False
        time.sleep(min(longest, max(_SHORTEST_NAP_S, waited / 20), timeout_s - waited))
    return True


def say_why_this_process_leaves(
    init_method: str, *, rank: int, world_size: int, why: str, timeout_s: float, job: str = "", was_asked: bool = False
) -> bool:
    """Tell processes that wait in ``store_of_group`` that this one will not come; they raise LaunchError with ``why``.

    With ``was_asked`` they raise EndAskedError, with ``why`` as its text.

    Rank 0, which serves the store, stays until all have heard it. Return whether all or, on other ranks, rank 0 was
    there within ``timeout_s`` seconds; there is no other error.
    """
    try:
        if rank > 0 and not _await_server(init_method, timeout_s):
            return False
        store = _open(init_method, rank, world_size, timeout_s)
        _check_job(store, init_method, rank, world_size, timeout_s, job)
        home = _home(world_size)
        number = store.add(f"{home}/groups/{rank}", 1)
        if number > 1:
            store.compare_set(f"{home}/{number - 1}/state", "", _OVER)
        said = f"{_ASKED}{why}" if was_asked else f"{_LEFT}rank {rank} has ended: {why}"
        store.compare_set(f"{home}/{number}/state", "", said)
        # Another one that leaves for its own reason needs not hear this one's.
        heard, deadline = f"{home}/{number}/heard", time.monotonic() + timeout_s
        while store.add(heard, int(rank > 0)) < world_size - 1 and rank == 0 and time.monotonic() < deadline:
            time.sleep(_LONGEST_NAP_S)
    except (LaunchError, RuntimeError):  # it leaves for a reason of its own, which is what the user has to see
        return False
    return True


def _check_job(store: Any, init_method: str, rank: int, world_size: int, timeout_s: float, job: str) -> None:
    """Raise LaunchError if the store belongs to another job, or to one of another size, that uses the same address."""
    if init_method.startswith("file://") and not job:
        return
    mine = f"{world_size} {job}"
    if rank == 0:
        there = store.compare_set(_JOB, "", mine).decode()
        if there != mine and _is_of_job(there, job) and _store_outlives(init_method):
            store.set(_JOB, there := mine)  # what torchrun restarts may have another size
    else:
        deadline = time.monotonic() + timeout_s
        if not await_key(store, _JOB, timeout_s):
            return  # store_of_group then reports that rank 0 is missing
        while (there := store.get(_JOB).decode()) != mine:
            if not (_is_of_job(there, job) and _store_outlives(init_method)) or time.monotonic() > deadline:
                break
            time.sleep(_LONGEST_NAP_S)
    if there != mine:
        raise LaunchError(
            f"launcher: {_said(init_method)} is used by {_named(there)}, this process belongs to {_named(mine)}; set "
            "MASTER_PORT"
        )


def _is_of_job(there: str, job: str) -> bool:
    return there.partition(" ")[2] == job


def _named(token: str) -> str:
    size, _, job = token.partition(" ")
    return f"{job or 'a job'} of {counted(int(size), 'process', 'processes')}"


def _store_outlives(init_method: str) -> bool:
    """Whether somebody else keeps the store when all processes of the job have ended: torchrun's agent, or a file."""
    return not _is_served_by_rank_0(init_method)


def _is_served_by_rank_0(init_method: str) -> bool:
    if init_method.startswith("env://"):
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return init_method.startswith("tcp://")


def _open(init_method: str, rank: int, world_size: int, timeout_s: float, is_derived: bool = False) -> Any:
    """The store at ``init_method``, kept open until another one is needed: late processes need that of rank 0."""
    global _endpoint
    where: tuple[str, ...] = (str(os.getpid()), init_method, str(rank), str(world_size))
    if init_method.startswith("env://"):
        where += (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    if _endpoint is None or _endpoint.where != where:
        _endpoint = None  # close the old store first: the new one may need its port
        if not init_method.startswith("file://"):
            _await_name(host_of(init_method), timeout_s)
        elsewhere = rank == 0 and _is_served_by_rank_0(init_method) and not is_own(host_of(init_method))
        if elsewhere and is_derived:
            raise LaunchError(
                f"launcher: rank 0 runs on {socket.gethostname()}, and the others look for it at {host_of(init_method)}, set "
                "MASTER_ADDR to the address of rank 0's machine"
            )
        if rank > 0:
            _await_server(init_method, min(timeout_s, _PATIENCE_S))
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store = _agents_store(timeout_s) if init_method.startswith("env://") else None
            if store is None:
                store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if "EADDRINUSE" in reason:
                reason = "another program of this machine uses the port, set MASTER_PORT to a free one"
            elif elsewhere:
                reason = f"{host_of(init_method)} is no address of {socket.gethostname()}, where rank 0 runs ({reason})"
            elif init_method.startswith("env://") and not _is_served_by_rank_0(init_method):
                reason = f"the launcher has ended, or cannot be reached ({reason})"
            raise LaunchError(
                f"launcher: rank {rank} did not find the others at {_said(init_method)}, {reason}"
            ) from error
        _endpoint = _Endpoint(where, store)
    _endpoint.store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return _endpoint.store


def _agents_store(timeout_s: float) -> Any:
    """The store that torchrun's agent keeps; None if it keeps none.

    ``rendezvous`` of some versions of torch puts the number of restarts before every key. Agents of several machines
    need not have counted alike, because a change of members is no restart to them, and their workers would never meet.
    """
    if _is_served_by_rank_0("env://"):
        return None
    limit_s = min(timeout_s, _AGENT_S)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    came: list[Any] = []

    def connect() -> None:
        timeout = datetime.timedelta(seconds=limit_s)
        try:
            came.append(dist.TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timeout))  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            came.append(error)

    # torch waits without end, and without hearing signals, for one that takes the connection and says nothing.
    thread = threading.Thread(target=connect, name="flextrain-store", daemon=True)
    thread.start()
    thread.join(limit_s + _PATIENCE_S)
    found = came[0] if came else RuntimeError(f"no answer within {limit_s:g} s")
    if isinstance(found, Exception):
        raise found
    return found


def _await_name(host: str, timeout_s: float) -> None:
    """Return once ``host`` has an address: torch would ask for it until the time is over, with a warning each time.

    Raises:
        LaunchError: it has none. A name that nobody knows is an error at once, except in a pod: the names of other pods
            become known when these have started.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    deadline = time.monotonic() + min(timeout_s, _NAME_IN_POD_S if in_pod else _NAME_S)
    while True:
        try:
            resolve(host)
            return
        except OSError as error:
            may_come = in_pod or error.errno == socket.EAI_AGAIN  # the name server does not answer
            if not may_come or time.monotonic() > deadline:
                raise LaunchError(
                    f"launcher: MASTER_ADDR={host} has no address on {socket.gethostname()} ({error.strerror or error}), set "
                    "MASTER_ADDR to a name or an address of rank 0's machine that all machines know"
                ) from None
        time.sleep(_NAME_NAP_S)


def _await_server(init_method: str, patience_s: float) -> bool:
    """Whether somebody listens within ``patience_s`` seconds: torch would retry only after almost a second."""
    if init_method.startswith("file://"):
        return True
    host, _, port = _said(init_method).removeprefix("tcp://").rpartition(":")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(patience_s, _SHORTEST_NAP_S)).close()
            return True
        except (OSError, ValueError):  # torch reports an error that lasts
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def host_of(init_method: str) -> str:
    """Name or address of the machine with the store, as it was given."""
    return _said(init_method).removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _said(init_method: str) -> str:
    if init_method.startswith("env://"):
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return init_method
