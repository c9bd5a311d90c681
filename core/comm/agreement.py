"""Compare names and values over all processes: first by digests, and only if those differ by everything."""

from __future__ import annotations

import collections
import copy
import datetime
import hashlib
import json
import logging
import pickle
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..base.errors import FlexTrainError, LaunchError, counted
from ..torch_compat.torch_private import default_store, gradient_hooks, with_values
from .collectives import (
    all_reduce,
    broadcast_object,
    gather_object,
    gather_tensor,
    get_rank,
    get_world_size,
    is_alone,
    is_main,
    side_group,
)
from .rendezvous import await_key

# Exchange values that most processes have alike: each sends a hash, and one process of each kind its value.
#
# Gathering everything everywhere makes each process receive as much as there are processes, and all together the
# square of it.


T = TypeVar("T")


@dataclass(frozen=True)
class Kinds(Generic[T]):
    """The values of all processes.

    Attributes:
        values: the different ones, in the order of the first rank that has each.
        of_rank: number of the value of each rank.
    """

    values: Sequence[T]
    of_rank: Sequence[int]

    def by_rank(self) -> list[T]:
        """The value of each rank; ranks of one kind share the object."""
        return [self.values[number] for number in self.of_rank]


def all_same(digest: bytes, group: Any = None) -> bool:
    """Whether all processes give the same bytes, of which there are a multiple of 8; a collective of twice as many."""
    words = np.frombuffer(digest, dtype=np.int64)
    # Where the smallest is the largest too. The device is explicit, because the user may have set another default device.
    with with_values():
        box = torch.tensor(np.concatenate([words, ~words]), device="cpu")
        all_reduce(box, "min", group)
        return torch.equal(box[: len(words)], ~box[len(words) :])


def gather_digests(digest: bytes, group: Any = None) -> list[bytes] | None:
    """The bytes of every process, equally many, by rank; on rank 0 alone."""
    found = gather_tensor(torch.tensor(list(digest), dtype=torch.uint8, device="cpu"), group)
    return None if found is None else [bytes(one.numpy()) for one in found]


def gather_kinds(own: T, digest: bytes, group: Any = None) -> Kinds[T]:
    """The values of all processes, on each of them; a collective.

    Args:
        own: the value of this process; it must be picklable.
        digest: a hash of it, of a multiple of 8 bytes.
        group: a gloo group of all processes.
    """
    if all_same(digest, group):
        return Kinds([own], [0] * get_world_size())
    numbers: list[int] = []
    firsts: list[int] = []
    if (digests := gather_digests(digest, group)) is not None:
        known: dict[bytes, int] = {}
        for rank, one in enumerate(digests):
            if one not in known:
                known[one] = len(known)
                firsts.append(rank)
            numbers.append(known[one])
    kind = np.min_scalar_type(len(firsts))  # a byte for each process, mostly
    firsts, packed = broadcast_object((firsts, np.array(numbers, dtype=kind)), group=group)
    values = broadcast_object(collect(firsts, own, group), group=group)
    assert values is not None
    return Kinds(values, packed.tolist())


def collect(ranks: Sequence[int], own: T, group: Any = None) -> list[T] | None:
    """The values of these processes, in their order, on rank 0; None elsewhere. The others send nothing.

    Args:
        ranks: the same on every process, which all call this.
        own: the value of this process; it must be picklable.
        group: a gloo group of all processes.
    """
    rank = get_rank()
    if rank != 0:
        if rank in ranks:
            data = pickle.dumps(own)
            for message in (torch.tensor([len(data)], device="cpu"), _as_tensor(data)):
                dist.send(message, 0, group=group)
        return None
    return [own if sender == 0 else _received(sender, group) for sender in ranks]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _received(sender: int, group: Any) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    dist.recv(size, sender, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.recv(data, sender, group=group)
    return pickle.loads(data.numpy().tobytes())


@dataclass(frozen=True)
class Difference:
    """The first item in which a process differs from the first process of its kind.

    Attributes:
        name: name of the first item that differs.
        rank: the first process that differs.
        first, other: the values on ``first_rank`` and on ``rank``; None: no item of this name.
        is_order: both have the same names in a different order; ``first`` and ``other`` are names then.
        first_rank: the process that ``rank`` is compared with.
    """

    name: str
    rank: int
    first: str | None
    other: str | None
    is_order: bool = False
    first_rank: int = 0

    def __str__(self) -> str:
        if self.is_order:
            return f"rank {self.rank} has {self.other} where rank {self.first_rank} has {self.first}"
        if self.first is None or self.other is None:
            there, lacking = (self.first_rank, self.rank) if self.other is None else (self.rank, self.first_rank)
            return f"{self.name}: is {self.first or self.other} on rank {there} and missing on rank {lacking}"
        return f"{self.name}: is {self.first} on rank {self.first_rank} and {self.other} on rank {self.rank}"


def first_difference(own: Mapping[str, str], kind: str = "") -> Difference | None:
    """Return the first difference between the processes, the same one on each; None without any. A collective.

    It sends 64 bytes, and items of two processes only if there is a difference.

    Args:
        own: the values of this process, by name.
        kind: processes are compared only with those of the same kind, each with the first of them.
    """
    if is_alone():
        return None
    items, group = list(own.items()), side_group()
    digest = _digest(kind) + _digest(items)
    if all_same(digest, group):
        return None
    pair = broadcast_object(_first_stray(gather_digests(digest, group)), group=group)
    if pair is None:
        return None
    found = collect(pair, items, group)
    return broadcast_object(
        None if found is None else _between(dict(found[0]), dict(found[1]), *reversed(pair)), group=group
    )


def _first_stray(digests: list[bytes] | None) -> tuple[int, int] | None:
    """The first process of a kind, and the first rank that differs from that of its kind; None: there is none."""
    firsts: dict[bytes, int] = {}
    for rank, digest in enumerate(digests or ()):
        first = firsts.setdefault(digest[:16], rank)
        if digests is not None and digest != digests[first]:
            return first, rank
    return None


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _between(first: dict[str, str], other: dict[str, str], rank: int, first_rank: int) -> Difference:
    for name, value in first.items():
        if other.get(name) != value:
            return Difference(name, rank, value, other.get(name), first_rank=first_rank)
    for name, value in other.items():
        if name not in first:
            return Difference(name, rank, None, value, first_rank=first_rank)
    names = next((a, b) for a, b in zip_longest(first, other) if a != b)
    return Difference(names[0], rank, *names, is_order=True, first_rank=first_rank)


def description(model: nn.Module, shape_of: Callable[[Tensor], Sequence[int]]) -> dict[str, str]:
    """Describe every parameter and buffer, by name and in order, by what must be the same on all processes.

    Args:
        shape_of: returns the shape of the whole parameter, of which a process may hold a shard.
    """
    found, names = {}, dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = names.setdefault(id(parameter), name)
        found[name] = _form(parameter, shape_of) if tied == name else f"tied to {tied}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        tied = names.setdefault(id(buffer), name)
        found[name] = f"buffer {_form(buffer, shape_of)}" if tied == name else f"tied to {tied}"
    return found


def _form(tensor: Tensor, shape_of: Callable[[Tensor], Sequence[int]]) -> str:
    if is_lazy(tensor):
        return "not initialised"
    shape = "x".join(map(str, shape_of(tensor))) or "scalar"
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    hooks = f", {counted(n, 'gradient hook')}" if (n := gradient_hooks(tensor)) else ""
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}{hooks}"


# Raise an error of one process on all processes, and gather values only where processes differ.


@contextmanager
def raising_together() -> Iterator[None]:
    """A context in which all processes raise if one raises a FlexTrainError; every process must enter it.

    The code inside must not wait for another process, because that process may have failed.

    Raises:
        FlexTrainError: on every process, with class and text of the first failed process.
    """
    if is_alone():
        yield
        return
    failure: FlexTrainError | None = None
    try:
        yield
    except FlexTrainError as error:
        failure = error
    reports = gather_object(_report(failure), side_group())
    first = None if reports is None else next((report for report in reports if report is not None), None)
    _raise(broadcast_object(first, group=side_group()), failure)
    if failure is not None:
        raise failure


def told_by_rank_0(read: Callable[[], T], *, at: str = "rank 0", waits_long: bool = False) -> T:
    """The result of ``read``, which only rank 0 calls, on every process; it must be picklable. A collective.

    Args:
        at: who failed, for messages on the other processes.
        waits_long: it may take as long as the strategy's ``timeout_s``.

    Raises:
        FlexTrainError: on every process, if rank 0 raised one; another error of rank 0 becomes one on the others.
    """
    result: T | None = None
    report: _Report | None = None
    failure: Exception | None = None
    if is_main():
        try:
            result = read()
        except Exception as error:  # raised below, when the others know of it
            failure = error
            report = _report(error if isinstance(error, FlexTrainError) else FlexTrainError(f"{at}: {error!r}"))
    answer, report = broadcast_object((result, report), group=None if waits_long else side_group())
    if failure is not None:
        raise failure
    _raise(report, None)
    return cast(T, answer)


_Report = tuple[type[FlexTrainError], str]


def _report(failure: FlexTrainError | None) -> _Report | None:
    return None if failure is None else (type(failure), str(failure))


def _raise(report: _Report | None, own: FlexTrainError | None) -> None:
    """Raise the reported error, if there is one: this process's own one, if that says the same."""
    if report is not None:
        kind, text = report
        raise own if own is not None and str(own) == text else kind(text)


def gather_differing(own: T) -> list[T]:
    """The values of all processes, by rank; values must be JSON-able.

    32 bytes are sent if all are equal. Otherwise one process of each kind sends its value, and equal ones share the object.
    """
    if is_alone():
        return [own]
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=16).digest()
    return gather_kinds(own, digest, side_group()).by_rank()


# Check that all processes make the same call: every process learns which others make another call or do not come.


_logger = logging.getLogger("flextrain")

SILENT_S = 60.0
"""Seconds after which a waiting process logs that it waits; the others may still have work to do."""
_ASKING_S = 10.0
"""Seconds that a process has to make the list of the missing ranks for all; then the others make their own."""
_QUESTIONS_PER_S = 1000.0
"""How many questions of all waiting processes the store gets in a second, when they have waited for long."""

_numbers: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def roll_call(call: str, timeout_s: float) -> str | None:
    """Wait until every process has made this call. Return None, or a text that says which ranks did not.

    All processes make the same calls in the same order. Processes in different calls learn of it at once. A process
    that does not come is waited for at most ``timeout_s`` seconds; it is told if it comes later. Every process gets
    the result: dist.monitored_barrier reports on rank 0 only, and blocks the others for minutes.

    Args:
        call: name of the call, for messages.
    """
    if is_alone():
        return None
    counter = _numbers.setdefault(dist.group.WORLD, collections.Counter())
    counter["calls"] += 1
    try:
        return _Call(call, counter["calls"], get_rank(), get_world_size(), default_store()).wait(timeout_s)
    except RuntimeError as lost:
        return (
            f"the store of the job, which rank 0 or the launcher keeps, was lost ({' '.join(str(lost).split())[:200]})"
        )


class _Call:
    """One call of this process, to be matched with the calls of the same number on the other processes.

    A process sends a fixed number of requests to the store, besides asking again and again whether there is a verdict.
    A list of the missing ranks takes two requests for each rank of the job: one process makes it for all.

    Args:
        name: name of the call, for messages.
        number: how many calls this process has made.
        rank, world_size: of this process, and how many there are.
        store: the store of the job.
    """

    def __init__(self, name: str, number: int, rank: int, world_size: int, store: Any) -> None:
        self.name, self.number, self.rank, self.world_size, self.store = name, number, rank, world_size, store
        self._key = f"flextrain call {number}"
        self._verdict = f"{self._key} verdict"

    def wait(self, timeout_s: float) -> str | None:
        """Return the text for ``roll_call``: the first verdict that any process put into the store, for this rank."""
        store = self.store
        store.set(_whereabouts(self.rank), json.dumps([self.number, self.name]))
        first = json.loads(store.compare_set(self._key, "", json.dumps([self.rank, self.name])))
        if first[1] != self.name:
            self._decide("apart", [first, [self.rank, self.name]])
        elif store.add(f"{self._key} here", 1) == self.world_size:
            self._decide("together", [])
        if not self._is_decided(timeout_s):
            self._decide("late", [self.rank, self.name, timeout_s, *self._missing("end")])
        verdict, facts = json.loads(store.get(self._verdict))
        if verdict == "together":
            return None
        if verdict == "apart":
            others = [f"rank {rank} is in {name}" for rank, name in facts if name != self.name]
            return " and ".join(others)
        waiting, name, seconds, missing, seen = facts
        if self.rank in missing:
            return f"came too late, rank {waiting} waited in {name} for {seconds:g} s"
        ranks = ", ".join(map(str, missing))
        return f"rank {ranks} did not come within {seconds:g} s" + (f", last seen in {', '.join(seen)}" if seen else "")

    def _is_decided(self, timeout_s: float) -> bool:
        """Whether there is a verdict within ``timeout_s``; after SILENT_S seconds a warning names the missing ranks."""
        if self._await(self._verdict, min(timeout_s, SILENT_S)):
            return True
        if timeout_s > SILENT_S:
            ranks = ", ".join(map(str, self._missing("warning")[0]))
            _logger.warning("%s: waiting for rank %s, for %g s at most", self.name, ranks, timeout_s)
        return self._await(self._verdict, timeout_s - SILENT_S)

    def _await(self, key: str, timeout_s: float) -> bool:
        return await_key(self.store, key, timeout_s, self.world_size / _QUESTIONS_PER_S)

    def _missing(self, moment: str) -> tuple[list[int], list[str]]:
        """The ranks that have not come, and the calls in which they were last seen; the same for all that ask."""
        key = f"{self._key} missing at the {moment}"
        if self.store.add(f"{key}, asked", 1) == 1 or not self._await(key, _ASKING_S):
            last = {rank: self._last_call(rank) for rank in range(self.world_size)}
            late = {rank: call for rank, (number, call) in last.items() if number < self.number}
            self.store.set(key, json.dumps([list(late), list(dict.fromkeys(filter(None, late.values())))]))
        ranks, calls = json.loads(self.store.get(key))
        return ranks, calls

    def _decide(self, verdict: str, facts: list[Any]) -> None:
        """Put a verdict into the store for all processes; only the first one is kept."""
        self.store.compare_set(self._verdict, "", json.dumps([verdict, facts]))

    def _last_call(self, rank: int) -> tuple[int, str]:
        """Number and name of the last call of ``rank``; (0, "") if there is none."""
        if not self.store.check([_whereabouts(rank)]):
            return 0, ""
        number, name = json.loads(self.store.get(_whereabouts(rank)))
        return number, name


def _whereabouts(rank: int) -> str:
    return f"flextrain call of rank {rank}"


# Bulletin: short texts that the processes of a job leave for each other in the job's store.


class StoreLostError(LaunchError):
    """The store of the job cannot be reached: the process that keeps it has ended, or its machine is cut off."""


class Bulletin:
    """Short texts under keys, which every process of the job may set and read at any time.

    It has a connection of its own, so that a thread may use it while the main thread waits for the store or in a
    collective; two threads must not share one. No method waits for another process. But a call does not return while
    the process that keeps the store is stopped: a second thread has to watch over the one that uses a bulletin.

    All processes make their bulletins in the same order, after the process group exists; each starts empty.

    Args:
        timeout_s: seconds until a store that cannot be connected to counts as lost.

    Raises:
        StoreLostError: by every method, if the connection is broken.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.rank, self.world_size = get_rank(), get_world_size()
        counter = _numbers.setdefault(dist.group.WORLD, collections.Counter())
        counter["bulletins"] += 1
        self._lost: list[str] = []
        with _store_errors():
            shared = default_store()
            # Named by chance, because a store may outlive the processes: that of torchrun's agent does.
            name = shared.compare_set(f"flextrain bulletin {counter['bulletins']}", "", uuid.uuid4().hex)
            self._timeout = datetime.timedelta(seconds=timeout_s)
            self._prefix = f"flextrain/bulletin/{name.decode()}"
            own = _own_connection(shared, self._timeout)
            self._store: Any = dist.PrefixStore(self._prefix, own)  # type: ignore[attr-defined]

    def for_another_thread(self) -> Bulletin:
        """Return the same bulletin with a connection of its own."""
        other = copy.copy(self)
        other._lost = []
        with _store_errors():
            other._store = dist.PrefixStore(self._prefix, _own_connection(self._store, self._timeout))  # type: ignore[attr-defined]
        return other

    @property
    def pace_s(self) -> float:
        """Seconds between two questions of a process, with which all processes together ask about 1000 in a second."""
        return self.world_size / _QUESTIONS_PER_S

    def put(self, key: str, text: str) -> None:
        """Set ``key``, whatever it was before."""
        with _store_errors(self._lost):
            self._store.set(key, text)

    def put_first(self, key: str, text: str) -> str:
        """Set ``key`` if no process has set it yet; return its text, which is then the same for all."""
        with _store_errors(self._lost):
            # An empty text would count as none.
            return str(self._store.compare_set(key, "", f"={text}").decode()[1:])

    def read_first(self, key: str) -> str | None:
        """Return what ``put_first`` has set, or None."""
        text = self.read([key])[0]
        return None if text is None else text[1:]

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """Return the text of every key, None for those that nobody has set; two messages if all are set."""
        with _store_errors(self._lost):
            if not keys:
                return []
            if self._store.check(list(keys)):
                return [text.decode() for text in self._store.multi_get(list(keys))]
            if len(keys) == 1:
                return [None]
            present = [key for key in keys if self._store.check([key])]
            texts = dict(zip(present, self._store.multi_get(present), strict=True)) if present else {}
            return [texts[key].decode() if key in texts else None for key in keys]

    def count(self, key: str, add: int = 1) -> int:
        """Add to a number that begins with 0, and return the sum; ``add=0`` reads it."""
        with _store_errors(self._lost):
            return int(self._store.add(key, add))


@contextmanager
def _store_errors(lost: list[str] | None = None) -> Iterator[None]:
    """Context of calls of a store.

    Args:
        lost: of the connection: what was said when it broke. It is not used again, because torch would write a stack of
            C++ functions to stderr for each call.
    """
    if lost:
        raise StoreLostError(lost[0])
    try:
        yield
    except RuntimeError as error:  # torch's DistError and its kind
        said = " ".join(str(error).split()) or type(error).__name__
        text = f"the store of the job, which rank 0 or the launcher keeps, was lost ({said[:200]})"
        if lost is not None:
            lost.append(text)
        raise StoreLostError(text) from error


def _own_connection(store: Any, timeout: datetime.timedelta) -> Any:
    """Return another connection to ``store``; Store.clone came after torch 2.6."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    if isinstance(store, dist.FileStore):  # type: ignore[attr-defined]
        return dist.FileStore(store.path)  # type: ignore[attr-defined]
    return store.clone() if hasattr(store, "clone") else store
