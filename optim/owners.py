"""Owners of matrices of which processes hold shards: who computes with which whole, and the messages there and back.

Optimizers that look at whole matrices cannot update shards. Here every matrix has one process that owns it. What the optimizer
needs of it comes to the owner from all that hold some of it, and the result goes back to them: one all-to-all each for many
matrices. All processes own matrices of about the same cost, and compute at the same time.

Each process works out alone who owns and sends what, from the layouts that the tensors have: a DTensor's mesh and placements, and the
ranges of a FlatShard. An ordinary tensor is a process's own, and nothing of it is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.checkpoint.chunks import FlatShard, Ranges, begins, chunks_of_range, cuts_of, own_spans
from ..core.comm.collectives import alone, group_among, index_among, start_exchange
from ..core.torch_compat.dtensor_private import laid_out_as, local_part, local_tensor
from ..core.torch_compat.torch_private import with_values

Spans = tuple[tuple[int, int], ...]
"""Begin and length in every dimension of a tensor."""

_AT_A_TIME = 5
"""What a process has of a round's size: what arrives, what it computes with and the results, what leaves now and since the last."""


def is_shard(parameter: Tensor) -> bool:
    """Whether a process holds a shard of it."""
    return isinstance(parameter, (DTensor, FlatShard))


def own_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor of what this process holds."""
    if isinstance(tensor, DTensor):
        return local_tensor(tensor)
    return tensor.to_local() if isinstance(tensor, FlatShard) else tensor


def own_gradient(parameter: Tensor) -> Tensor:
    """Return what this process holds of a parameter's gradient, which must be there."""
    assert parameter.grad is not None
    return local_part(parameter.grad, parameter) if isinstance(parameter, DTensor) else own_tensor(parameter.grad)


def held_as(parameter: Tensor, own: Tensor) -> Tensor:
    """Return the tensor of which this process holds ``own``, as it holds the parameter."""
    if isinstance(parameter, DTensor):
        return laid_out_as(parameter, own)
    return FlatShard(own, parameter.shape, parameter.start) if isinstance(parameter, FlatShard) else own


def _ranges(parameter: FlatShard) -> Ranges:
    assert parameter.ranges is not None, "what the other processes hold is known"
    return parameter.ranges


def _view(tensor: Tensor, spans: Spans) -> Tensor:
    for dim, (begin, length) in enumerate(spans):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


@dataclass(frozen=True)
class _Held:
    """A chunk of a parameter that a process holds: its indices in the whole, and in the process's own tensor.

    Attributes:
        begin: of a FlatShard, where the chunk begins in the process's own tensor, which is flat; the indices are in the chunk.
    """

    whole: Spans
    own: Spans
    begin: int | None = None


@dataclass(frozen=True)
class Chunk:
    """What a process holds of a matrix: the indices in the process's own tensor, and in the matrix.

    Attributes:
        within: of a FlatShard, where the chunk that ``own`` counts in begins in the process's own tensor, and its sizes.
    """

    own: Spans
    matrix: Spans
    within: tuple[int, tuple[int, ...]] | None = None

    def of(self, own: Tensor) -> Tensor:
        """Return the view of a process's own tensor."""
        if self.within is not None:
            begin, sizes = self.within
            own = own.narrow(0, begin, math.prod(sizes)).view(sizes)
        return _view(own, self.own)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(length for _, length in self.own)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(eq=False)
class Matrix:
    """What an optimizer looks at as a whole: a parameter, or a box of one.

    Attributes:
        parameter: as the optimizer has it.
        spans: the indices in the parameter.
        owner: index of the process that computes with it, among those that hold shards of the parameter.
        is_held: the owner has all of it, so that nothing comes to it.
        is_alone: nobody else has any of it, so that nothing leaves it either.
        chunks: by index, what a process has of it; of this process, and of all others if it is the owner.
        senders: of these processes, those that send it to the owner.
    """

    parameter: Tensor
    spans: Spans
    owner: int = 0
    is_held: bool = False
    is_alone: bool = False
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    senders: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(length for _, length in self.spans)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def cost(self) -> int:
        """About what it costs: the multiplications of its smaller square with it."""
        rows = self.shape[0] if self.spans else 1
        columns = self.numel // max(rows, 1)
        return min(rows, columns) ** 2 * max(rows, columns)


class _Holders:
    """The processes that hold shards of a parameter, and what each of them has.

    Attributes:
        ranks: the processes, ascending.
        held: what each has.
        replicas: of each, its number along the axes of the mesh that replicate; equal for the processes of one replica.
    """

    def __init__(self, parameter: Tensor) -> None:
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            whole = tuple((0, size) for size in shape)
            self.ranks: tuple[int, ...] = alone()
            self.replicas: list[tuple[int, ...]] = [()]
            self.held = [[_Held(whole, whole)]]
            if isinstance(parameter, FlatShard):
                self.held = [_in_order(shape, *ends) for ends in _ranges(parameter).ends]
                self.ranks, self.replicas = tuple(range(len(self.held))), [()] * len(self.held)
            return
        mesh, cuts = parameter.device_mesh, cuts_of(parameter.placements)
        with with_values():
            ranks = mesh.mesh.flatten().tolist()
        at = dict(sorted(zip(ranks, itertools.product(*map(range, mesh.shape)), strict=True)))
        self.ranks = tuple(at)
        self.replicas = [tuple(i for i, cut in zip(own, cuts, strict=True) if cut is None) for own in at.values()]
        sizes = tuple(mesh.shape)
        self.held = [
            _chunks([own_spans(size, dim, cuts, sizes, own) for dim, size in enumerate(shape)]) for own in at.values()
        ]

    def find_owners(self, matrix: Matrix) -> list[int]:
        """Return who may own a matrix: those that have all of it, if there are such."""
        whole = [i for i, held in enumerate(self.held) if any(_covers(each.whole, matrix.spans) for each in held)]
        matrix.is_held = bool(whole)
        matrix.is_alone = len(whole) == 1 and not any(
            _cut(held, matrix.spans) for i, held in enumerate(self.held) if i != whole[0]
        )
        return whole or [*range(len(self.ranks))]

    def sends(self, index: int, matrix: Matrix) -> bool:
        """Whether a process sends what it has to the owner: all of one replica do."""
        return not matrix.is_held and self.replicas[index] == self.replicas[matrix.owner]


def _chunks(spans: list[list[tuple[int, int]]]) -> list[_Held]:
    """Return what a process holds, given the spans of indices that it has in each dimension."""
    found = []
    for chunk in itertools.product(*(zip(own, begins(own), strict=True) for own in spans)):
        whole = tuple((begin, end - begin) for (begin, end), _ in chunk)
        found.append(_Held(whole, tuple((at, end - begin) for (begin, end), at in chunk)))
    return found


def _in_order(shape: tuple[int, ...], start: int, end: int) -> list[_Held]:
    """Return what a process holds that has a range of the flattened parameter: in two dimensions at most three chunks."""
    found, begin = [], 0
    for offsets, sizes in chunks_of_range(shape, start, end):
        found.append(_Held(tuple(zip(offsets, sizes, strict=True)), tuple((0, size) for size in sizes), begin))
        begin += math.prod(sizes)
    return found


def _covers(outer: Spans, inner: Spans) -> bool:
    return all(a <= b and b + m <= a + n for (a, n), (b, m) in zip(outer, inner, strict=True))


def _cut(held: Sequence[_Held], matrix: Spans) -> list[Chunk]:
    """Return what of a matrix is in these chunks of its parameter."""
    found = []
    for each in held:
        own, inside = [], []
        for (begin, length), (at, _), (first, size) in zip(each.whole, each.own, matrix, strict=True):
            low, high = max(begin, first), min(begin + length, first + size)
            if low < high:
                own.append((at + low - begin, high - low))
                inside.append((low - first, high - low))
        if len(own) == len(matrix):
            within = None if each.begin is None else (each.begin, tuple(length for _, length in each.whole))
            found.append(Chunk(tuple(own), tuple(inside), within))
    return found


Give = Callable[[Matrix, Chunk], Sequence[Tensor]]
"""Returns what the owner needs of a chunk that this process has: tensors of the chunk's shape."""
Compute = Callable[[list[tuple[Matrix, list[Tensor]]]], list[Tensor]]
"""Returns the result for each of some matrices, of its shape, from what was given of it, whole."""
Take = Callable[[Matrix, Chunk, Tensor], None]
"""Uses what of a result belongs to a chunk that this process has."""


class OwnerExchange:
    """Brings matrices to their owners, and what these compute back.

    The memory that this takes on a process is about ``bucket_bytes``, whatever the size of the model: matrices come in rounds, and
    while a process computes with those of one, those of the next arrive and the results of the last leave. A matrix that is
    larger comes alone.

    Args:
        matrices: on every process the same, in the same order; the parameters have the same holders.
        dtype: of what is sent.
        bucket_bytes: of whole matrices on a process at a time.
        given: how many tensors the owner gets of each matrix.
    """

    def __init__(self, matrices: Sequence[Matrix], dtype: torch.dtype, bucket_bytes: int, given: int = 1) -> None:
        self._matrices, self._dtype, self._given = matrices, dtype, given
        self._room = bucket_bytes // (_AT_A_TIME * given * dtype.itemsize)
        layouts: dict[Any, _Holders] = {}
        for matrix in matrices:
            layout = _layout(matrix.parameter)
            if layout not in layouts:
                layouts[layout] = _Holders(matrix.parameter)
        self._ranks = next(iter(layouts.values())).ranks
        self._own = index_among(self._ranks)
        self._group = _group(matrices[0].parameter, self._ranks)
        self._device = device_of(matrices[0].parameter)
        self._wanted: list[Matrix] = []
        self._rounds: list[list[Matrix]] = []
        self._choose_owners(lambda matrix: layouts[_layout(matrix.parameter)])

    def _choose_owners(self, holders_of: Callable[[Matrix], _Holders]) -> None:
        """Give each process matrices of about the same cost; the most expensive ones are dealt first."""
        may = {id(m): holders_of(m).find_owners(m) for m in self._matrices}
        load = [0] * len(self._ranks)

        def order(matrix: Matrix) -> tuple[bool, bool, int]:
            # Frozen ones cost nothing until they are thawed, and those that are somewhere as a whole have less choice.
            return not matrix.parameter.requires_grad, not matrix.is_held, -matrix.cost

        for matrix in sorted(self._matrices, key=order):
            matrix.owner = min(may[id(matrix)], key=lambda index: (load[index], index))
            load[matrix.owner] += matrix.cost
            holders = holders_of(matrix)
            known = range(len(self._ranks)) if self.owns(matrix) else (self._own,)
            matrix.chunks = {index: _cut(holders.held[index], matrix.spans) for index in known}
            matrix.senders = [index for index in known if holders.sends(index, matrix)]

    def owns(self, matrix: Matrix) -> bool:
        """Whether this process is the owner."""
        return matrix.owner == self._own

    @property
    def owned(self) -> list[Matrix]:
        """The matrices of this process."""
        return [matrix for matrix in self._matrices if self.owns(matrix)]

    def run(self, is_wanted: Callable[[Matrix], bool], give: Give, compute: Compute, take: Take) -> None:
        """Bring the wanted matrices to their owners, compute, and bring the results back; a collective of all holders."""
        wanted = [m for m in self._matrices if is_wanted(m)]
        if wanted != self._wanted:
            self._wanted, self._rounds = wanted, self._in_rounds(wanted)
        rounds = self._rounds
        arrived = self._send_to_owners(rounds[0], give) if rounds else None
        left: Callable[[], None] | None = None
        for number in range(len(rounds)):
            assert arrived is not None
            matrices = arrived()
            arrived = self._send_to_owners(rounds[number + 1], give) if number + 1 < len(rounds) else None
            results = compute(matrices)
            leaves = self._send_back(
                rounds[number], [(m, r) for (m, _), r in zip(matrices, results, strict=True)], take
            )
            del matrices, results
            if left is not None:
                left()
            left = leaves
        if left is not None:
            left()

    def _in_rounds(self, wanted: Sequence[Matrix]) -> list[list[Matrix]]:
        """Return the matrices of each round: for every owner as many as there is room for, large ones first."""
        rounds: list[list[Matrix]] = []
        for owner in range(len(self._ranks)):
            number, room = -1, 0
            for matrix in sorted((m for m in wanted if m.owner == owner), key=lambda m: -m.numel):
                if room < matrix.numel or number < 0:
                    number, room = number + 1, self._room
                    if number == len(rounds):
                        rounds.append([])
                rounds[number].append(matrix)
                room -= matrix.numel
        return rounds

    def _send_to_owners(
        self, matrices: Sequence[Matrix], give: Give
    ) -> Callable[[], list[tuple[Matrix, list[Tensor]]]]:
        """Start to send; return a function that waits, and returns this process's matrices with what was given of them."""
        own = [m for m in matrices if self.owns(m)]
        if all(m.is_held for m in matrices):
            return lambda: [(m, self._gathered(m, {}, give)) for m in own]
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        received = [0] * len(self._ranks)
        for matrix in matrices:
            if not self.owns(matrix) and matrix.senders:
                for chunk in matrix.chunks[self._own]:
                    sent[matrix.owner] += [self._flat(tensor) for tensor in give(matrix, chunk)]
        for matrix in own:
            for index in matrix.senders:
                if index != self._own:
                    received[index] += self._given * sum(chunk.numel for chunk in matrix.chunks[index])
        wait = self._start(sent, received)

        def finish() -> list[tuple[Matrix, list[Tensor]]]:
            came = dict(enumerate(map(_Reader, wait())))
            return [(m, self._gathered(m, {i: came[i] for i in m.senders}, give)) for m in own]

        return finish

    def _gathered(self, matrix: Matrix, came: Mapping[int, _Reader], give: Give) -> list[Tensor]:
        own = matrix.chunks[self._own] if matrix.is_held or self._own in came else []
        if len(own) == 1 and own[0].shape == matrix.shape:
            return [self._sendable(tensor) for tensor in give(matrix, own[0])]
        wholes = [torch.empty(matrix.shape, dtype=self._dtype, device=self._device) for _ in range(self._given)]
        for index, reader in came.items():
            for chunk in matrix.chunks[index]:
                given = give(matrix, chunk) if index == self._own else [reader.take(chunk) for _ in wholes]
                for whole, values in zip(wholes, given, strict=True):
                    _view(whole, chunk.matrix).copy_(values)
        return wholes

    def _send_back(
        self, matrices: Sequence[Matrix], results: Sequence[tuple[Matrix, Tensor]], take: Take
    ) -> Callable[[], None]:
        """Start to send results; return a function that waits, and uses what came."""
        sent: list[list[Tensor]] = [[] for _ in self._ranks]
        for matrix, result in results:
            for index, chunks in matrix.chunks.items():
                if index != self._own and not matrix.is_alone:
                    sent[index] += [self._flat(_view(result, chunk.matrix)) for chunk in chunks]
            for chunk in matrix.chunks[self._own]:
                take(matrix, chunk, _view(result, chunk.matrix))
        if all(m.is_alone for m in matrices):
            return lambda: None
        theirs = [m for m in matrices if not (m.is_alone or self.owns(m))]
        received = [0] * len(self._ranks)
        for matrix in theirs:
            received[matrix.owner] += sum(chunk.numel for chunk in matrix.chunks[self._own])
        wait = self._start(sent, received)

        def finish() -> None:
            came = [*map(_Reader, wait())]
            for matrix in theirs:
                for chunk in matrix.chunks[self._own]:
                    take(matrix, chunk, came[matrix.owner].take(chunk))

        return finish

    def _start(self, sent: list[list[Tensor]], received: list[int]) -> Callable[[], Sequence[Tensor]]:
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        flat = [tensor for tensors in sent for tensor in tensors]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=self._dtype, device=self._device)
        return start_exchange(message, sizes, received, self._group)

    def _sendable(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)

    def _flat(self, tensor: Tensor) -> Tensor:
        return self._sendable(tensor).reshape(-1)


class _Reader:
    """Takes chunk after chunk from a message."""

    def __init__(self, message: Tensor) -> None:
        self._message, self._at = message, 0

    def take(self, chunk: Chunk) -> Tensor:
        self._at += chunk.numel
        return self._message[self._at - chunk.numel : self._at].view(chunk.shape)


def _group(parameter: Tensor, ranks: tuple[int, ...]) -> Any:
    """The process group of those that hold a parameter: one of its mesh if one axis has all of them; None for one process."""
    if len(ranks) == 1:
        return None
    if not isinstance(parameter, DTensor):
        return group_among(ranks)
    mesh = parameter.device_mesh
    axis = next((axis for axis, size in enumerate(mesh.shape) if size == len(ranks)), None)
    return group_among(ranks) if axis is None else mesh.get_group(axis)


def _layout(parameter: Tensor) -> Any:
    shape = tuple(parameter.shape)
    if isinstance(parameter, FlatShard):
        return _ranges(parameter), shape
    return (parameter.device_mesh, parameter.placements, shape) if isinstance(parameter, DTensor) else shape


def device_of(parameter: Tensor) -> torch.device:
    """The device to compute on: that of the mesh or the group, also where shards are kept on the host."""
    if isinstance(parameter, FlatShard):
        return _ranges(parameter).device
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type:
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device


def exchanges(
    matrices: Iterable[Matrix], dtype_of: Callable[[Matrix], torch.dtype], bucket_bytes: int, given: int = 1
) -> list[OwnerExchange]:
    """Return an exchange for the matrices of each dtype that the same processes hold; a collective of the holders.

    Args:
        dtype_of: returns the dtype in which a matrix is sent.
        bucket_bytes, given: as in ``OwnerExchange``.
    """
    found: dict[Any, list[Matrix]] = {}
    for matrix in matrices:
        mesh = matrix.parameter.device_mesh if isinstance(matrix.parameter, DTensor) else None
        with with_values():
            ranks = None if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
        if isinstance(matrix.parameter, FlatShard):
            ranks = tuple(range(len(_ranges(matrix.parameter).ends)))
        key = ranks, dtype_of(matrix), device_of(matrix.parameter)
        found.setdefault(key, []).append(matrix)
    return [OwnerExchange(own, dtype, bucket_bytes, given) for (_, dtype, _), own in found.items()]


class Plans:
    """The exchanges of each set of parameters that an optimizer steps with: of all, or of one after the other under ZeRO."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[OwnerExchange]] = {}
        self.owned: set[int] = set()
        """The parameters (``id``) of which this process owns some."""

    def of(self, parameters: Sequence[Tensor], make: Callable[[], list[OwnerExchange]]) -> list[OwnerExchange]:
        """Return the exchanges of these parameters, made the first time; they replace those of other sets with one of them."""
        key = tuple(map(id, parameters))
        if key not in self._known:
            self._known = {other: found for other, found in self._known.items() if set(other).isdisjoint(key)}
            self._known[key] = make()
            all_of_them = (exchange for found in self._known.values() for exchange in found)
            self.owned = {id(matrix.parameter) for exchange in all_of_them for matrix in exchange.owned}
        return self._known[key]
