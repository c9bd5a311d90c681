"""SimulatedGroup: a process group whose ranks are threads that take turns."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.torch_compat.torch_private import has_values
from .group_private import PROCESS_GROUP, without_modes
from .turns import SimulationError, Turns

# What collectives compute, given the tensors of all ranks.


_BITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_ELEMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    **_BITS,
}


def operation_name(operation: Any) -> str:
    """Name of a ReduceOp, such as "SUM"."""
    return str(getattr(operation, "op", operation).name)


def combined(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    """The tensors combined as ReduceOp ``operation`` says, in their order."""
    name = operation_name(operation)
    if name == "PREMUL_SUM":
        factor = operation.factor
        tensors, name = [tensor * factor for tensor in tensors], "SUM"
    if name not in _ELEMENTS:
        raise SimulationError(f"ReduceOp.{name} is not simulated")
    result = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        result = _ELEMENTS[name](result, tensor.detach())
    return result.div_(len(tensors)) if name == "AVG" else result


def all_reduce(given: list[list[Tensor]], operation: dist.ReduceOp) -> None:
    """Combine the tensors of each position, for all."""
    for tensors in zip(*given, strict=True):
        result = combined(tensors, operation)
        for tensor in tensors:
            tensor.detach().copy_(result.view_as(tensor))


def reduce(given: list[list[Tensor]], operation: dist.ReduceOp, root: int) -> None:
    """Combine the tensors of each position, for one rank."""
    for tensors in zip(*given, strict=True):
        tensors[root].detach().copy_(combined(tensors, operation))


def broadcast(given: list[list[Tensor]], root: int) -> None:
    """Copy the tensors of one rank to all others."""
    for number, tensors in enumerate(given):
        if number != root:
            for own, theirs in zip(tensors, given[root], strict=True):
                own.detach().copy_(theirs.detach().view_as(own))


def all_gather(given: list[list[tuple[Sequence[Tensor], Tensor]]]) -> None:
    """Copy the tensor of every rank into a list of each rank, for several tensors."""
    for inputs in zip(*given, strict=True):
        sent = [own.detach().clone() for _, own in inputs]  # an input may be a chunk of its own output
        for outputs, _ in inputs:
            for output, one in zip(outputs, sent, strict=True):
                output.detach().copy_(one.view_as(output))


def reduce_scatter(given: list[list[tuple[Tensor, Sequence[Tensor]]]], operation: dist.ReduceOp) -> None:
    """Combine the lists of all ranks, and copy one tensor of the result to each rank, for several lists."""
    for lists in zip(*given, strict=True):
        results = [combined([parts[number] for _, parts in lists], operation) for number in range(len(lists))]
        for (output, _), result in zip(lists, results, strict=True):
            output.detach().copy_(result.view_as(output))


def all_to_all(given: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
    """Copy tensor i of rank j's list into place j of rank i's list."""
    sent = [[one.detach().clone() for one in inputs] for _, inputs in given]
    for target, (outputs, _) in enumerate(given):
        for source, output in enumerate(outputs):
            found = sent[source][target]
            if found.numel() != output.numel():
                raise SimulationError(
                    f"all_to_all: rank {source} of the group sends {found.numel()} elements to rank {target}, which expects "
                    f"{output.numel()}"
                )
            output.detach().copy_(found.view_as(output))


def gather(given: list[tuple[Sequence[Tensor], Tensor]], root: int) -> None:
    """Copy the tensor of every rank into the list of one rank."""
    for output, (_, one) in zip(given[root][0], given, strict=True):
        output.detach().copy_(one.detach().view_as(output))


def scatter(given: list[tuple[Tensor, Sequence[Tensor]]], root: int) -> None:
    """Copy one tensor of the list of one rank to every rank."""
    for (output, _), one in zip(given, given[root][1], strict=True):
        output.detach().copy_(one.detach().view_as(output))


Compute = Callable[[list[Any]], None]


@dataclass
class _Meeting:
    """A collective that not all ranks have called yet."""

    name: str
    facts: tuple[Any, ...]
    first: int
    given: dict[int, Any] = field(default_factory=dict)
    is_over: bool = False


@dataclass
class _Mail:
    """What one rank sends to another with one tag."""

    sent: collections.deque[Tensor] = field(default_factory=collections.deque)
    asked: collections.deque[Tensor] = field(default_factory=collections.deque)
    received: int = 0


@dataclass
class SharedGroup:
    """What the ranks of one group share."""

    meetings: dict[int, _Meeting] = field(default_factory=dict)
    mail: collections.defaultdict[tuple[int, int, int], _Mail] = field(
        default_factory=lambda: collections.defaultdict(_Mail)
    )


@dataclass
class CallCounts:
    """What all ranks of a simulation have sent: collectives by rank and by name, and bytes given to them and got, by rank."""

    calls: collections.Counter[int] = field(default_factory=collections.Counter)
    names: collections.Counter[str] = field(default_factory=collections.Counter)
    nbytes: collections.Counter[int] = field(default_factory=collections.Counter)


class _Work(dist.Work):
    """A collective under way; ``wait`` lets other ranks run."""

    def __init__(self, turns: Turns, is_over: Callable[[], bool], what: str, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._turns, self._is_over, self._what, self._tensors = turns, is_over, what, list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until all ranks have come, and the result is there."""
        self._turns.wait_until(self._is_over, self._what)
        return True

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return self._is_over()

    def get_future(self) -> Any:
        """A future that is done: C++ code, which waits for it, cannot let other ranks run, so this call waits."""
        self.wait()
        found: Any = torch.futures.Future()
        found.set_result(self._tensors)
        return found


class SimulatedGroup(PROCESS_GROUP):  # type: ignore[misc]
    """The collectives of one rank. They compute what gloo computes, adding in the order of the ranks.

    No call waits: the last rank that comes to a collective computes it for all, and the others wait in the ``wait`` of
    its work. Tensors without values, of models that are traced, are left alone.

    Args:
        name: of the group, the same on all of its ranks.
        shared: shared with the other ranks of the group.
    """

    def __init__(self, name: str, rank: int, size: int, shared: SharedGroup, turns: Turns, counts: CallCounts) -> None:
        super().__init__(rank, size)
        self._name, self._number, self._count = name, rank, size
        self._shared, self._turns, self._counts = shared, turns, counts
        self._calls = 0

    def size(self) -> int:
        """Number of ranks."""
        return self._count

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Name of the group, for C++ code."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the back end."""
        return "simulated"

    # The collectives, with torch's names and arguments

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        """Add up each tensor in place, or combine it otherwise."""
        operation: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._meet(
            "all_reduce",
            (operation_name(operation), *map(_facts, tensors)),
            tensors,
            lambda all_: all_reduce(all_, operation),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        """See ``allreduce``."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        """Combine each tensor in place, on one rank."""
        operation, root = opts.reduceOp, opts.rootRank
        return self._meet(
            "reduce",
            (root, operation_name(operation), *map(_facts, tensors)),
            tensors,
            lambda all_: reduce(all_, operation, root),
        )

    def barrier(self, opts: Any = None) -> _Work:
        """Wait for all ranks."""
        return self._meet("barrier", (), [], lambda all_: None)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        """Overwrite the tensors with those of one rank."""
        root = opts.rootRank
        return self._meet("broadcast", (root, *map(_facts, tensors)), tensors, lambda all_: broadcast(all_, root))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:
        """Give each rank the tensors of all, in a list for each input."""
        given = [(parts, one) for parts, one in zip(outputs, inputs, strict=True)]
        return self._meet("all_gather", tuple(map(_facts, inputs)), given, all_gather)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        """Give each rank the tensors of all, joined."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        """Give each rank the tensors of all, joined, for each input."""
        given = [(self._divided(whole), one.reshape(-1)) for whole, one in zip(outputs, inputs, strict=True)]
        return self._meet("all_gather", tuple(map(_facts, inputs)), given, all_gather)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Work:
        """Combine the tensors of all ranks, and give each rank its one of the list."""
        operation: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        given = list(zip(outputs, inputs, strict=True))
        facts = (operation_name(operation), *(_facts(one) for parts in inputs for one in parts))
        return self._meet("reduce_scatter", facts, given, lambda all_: reduce_scatter(all_, operation))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        """Combine the tensors of all ranks, and give each rank its chunk."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        """Combine the tensors of all ranks, and give each rank its chunk, for each input."""
        return self.reduce_scatter(
            [one.reshape(-1) if one.is_contiguous() else one for one in outputs],
            [self._divided(one) for one in inputs],
            opts,
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        """Send each rank its tensor of the list, and get one of each."""
        return self._meet("all_to_all", (), (outputs, inputs), all_to_all)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        received: Sequence[int] | None,
        sent: Sequence[int] | None,
        opts: Any = None,
    ) -> _Work:
        """Send each rank its rows, and get rows of each."""
        return self.alltoall(self._rows(output, received), self._rows(input, sent), opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        """Give one rank the tensors of all."""
        root = opts.rootRank
        given = (outputs[0] if outputs else [], inputs[0])
        return self._meet("gather", (root, *map(_facts, inputs)), given, lambda all_: gather(all_, root))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Work:
        """Give each rank its tensor of the list of one rank."""
        root = opts.rootRank
        given = (outputs[0], inputs[0] if inputs else [])
        return self._meet("scatter", (root, *map(_facts, outputs)), given, lambda all_: scatter(all_, root))

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Work:
        """Send a tensor, whose values are copied now."""
        self._count_call("send", tensors)
        mail = self._shared.mail[self._number, target, tag]
        mail.sent.extend(tensor.detach().clone() for tensor in tensors)
        self._deliver(mail, self._number, target)
        return _Work(self._turns, lambda: True, "send")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        """Receive a tensor: what was sent first goes to who asked first, whoever waits first."""
        self._count_call("recv", tensors)
        mail = self._shared.mail[source, self._number, tag]
        mail.asked.extend(tensors)
        expected = mail.received + len(mail.asked)
        self._deliver(mail, source, self._number)
        what = f"recv of {_facts(tensors[0])} from rank {source} of group {self._name}"
        return _Work(self._turns, lambda: mail.received >= expected, what)

    def _deliver(self, mail: _Mail, source: int, target: int) -> None:
        while mail.sent and mail.asked:
            found, tensor = mail.sent.popleft(), mail.asked.popleft()
            if _facts(found) != _facts(tensor):
                raise SimulationError(
                    f"rank {target} of group {self._name} receives {_facts(tensor)} where rank {source} has sent "
                    f"{_facts(found)}"
                )
            with torch.no_grad(), without_modes():
                tensor.detach().copy_(found.view_as(tensor))
            mail.received += 1
            self._turns.happened()

    def _meet(self, name: str, facts: tuple[Any, ...], given: Any, compute: Compute) -> _Work:
        if not all(map(has_values, _tensors_of(given))):
            return _Work(self._turns, lambda: True, name)
        self._count_call(name, _tensors_of(given))
        self._calls += 1
        meeting = self._shared.meetings.setdefault(self._calls, _Meeting(name, facts, self._number))
        if (name, facts) != (meeting.name, meeting.facts):
            raise SimulationError(
                f"rank {self._number} of group {self._name} calls {_call(name, facts)} where rank {meeting.first} has called "
                f"{_call(meeting.name, meeting.facts)}"
            )
        meeting.given[self._number] = given
        if len(meeting.given) == self._count:
            with torch.no_grad(), without_modes():
                compute([meeting.given[number] for number in range(self._count)])
            del self._shared.meetings[self._calls]
            meeting.given.clear()
            meeting.is_over = True
            self._turns.happened()
        what = f"{_call(name, facts)} of {self._count} ranks"
        return _Work(self._turns, lambda: meeting.is_over, what, given if name == "all_reduce" else ())

    def _count_call(self, name: str, tensors: Iterable[Tensor]) -> None:
        self._counts.calls[self._turns.number] += 1
        self._counts.nbytes[self._turns.number] += sum(tensor.nbytes for tensor in tensors)
        self._counts.names[name] += 1

    def _divided(self, whole: Tensor) -> list[Tensor]:
        return list(whole.detach().view(self._count, -1).unbind())

    def _rows(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        sizes = list(sizes or [tensor.size(0) // self._count] * self._count)
        return list(torch.split(tensor.detach(), sizes))


def _facts(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _call(name: str, facts: tuple[Any, ...]) -> str:
    of = ", ".join(map(str, facts[:4])) + (f" and {len(facts) - 4} more" if len(facts) > 4 else "")
    return f"{name} of {of}" if of else name


def _tensors_of(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors_of(part)]
