"""Over which axis and which links a collective goes, and how many bytes a process sends for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Network:
    """The processes of a job, by machine and by axis of the mesh.

    Attributes:
        world_size, nodes: see Job.
        axes: number of processes by axis, outermost first, whose product is ``world_size``; empty without a mesh.
        overlays: sizes of axes that divide the innermost processes anew, such as "ep".
    """

    world_size: int
    nodes: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    overlays: Mapping[str, int] = field(default_factory=dict)

    def axis_of(self, ranks: Sequence[int], collective: str) -> str:
        """Return the axes along which these processes differ."""
        if not self.axes:
            return "data" if len(ranks) > 1 else ""
        for name, size in self.overlays.items():
            # Its neighbours are nearest; the same processes may differ along another axis, which sends other messages.
            first = ranks[0] - ranks[0] % size
            if collective == "all_to_all" and list(ranks) == [*range(first, first + size)]:
                return name
        indices = [self._indices(rank) for rank in ranks]
        names = [name for i, name in enumerate(self.axes) if len({each[i] for each in indices}) > 1]
        return " x ".join(names)

    def _indices(self, rank: int) -> list[int]:
        found = []
        for size in reversed([*self.axes.values()]):
            found.append(rank % size)
            rank //= size
        return found[::-1]

    def node_of(self, rank: int) -> int:
        """The machine of a process."""
        return rank * self.nodes // self.world_size

    def sent(self, collective: str, ranks: Sequence[int], payload: int) -> tuple[float, float]:
        """Return the bytes that a process sends inside of its node and to other nodes, in the mean over the processes.

        Args:
            payload: bytes of the whole tensor, see Traffic.
        """
        count, nodes = len(ranks), [self.node_of(rank) for rank in ranks]
        whole = payload * (count - 1) / count * (2 if collective == "all_reduce" else 1)
        if collective == "all_to_all":
            pairs = count * (count - 1)
            same = sum(size * (size - 1) for size in (nodes.count(node) for node in set(nodes)))
            inside = whole * same / pairs
        else:  # a ring, each process sends to the next one
            crossing = sum(nodes[i] != nodes[i - 1] for i in range(count))
            inside = whole * (count - crossing) / count
        return inside, whole - inside

    def sent_to(self, sender: int, receiver: int, payload: int) -> tuple[float, float]:
        """Return the bytes of a message inside of a node and between nodes, one of which is 0."""
        return (float(payload), 0.0) if self.node_of(sender) == self.node_of(receiver) else (0.0, float(payload))


def check_nodes(world_size: int, nodes: int) -> str | None:
    """Say why so many processes cannot be on so many machines; None if they can."""
    if nodes < 1 or world_size < 1:
        return "give 1 or more"
    if world_size % nodes:
        lower = math.gcd(world_size, nodes)
        return f"{nodes} nodes do not share {world_size} processes evenly; {lower} do"
    return None
