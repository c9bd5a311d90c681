"""Fast axes: those that send within every layer, and which of them have processes on several nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ...core.errors import counted


def across_nodes(
    sizes: Mapping[str, int], overlays: Mapping[str, int], fast: Sequence[str], nodes: Sequence[str]
) -> list[str]:
    """Return a line for each fast axis that has to send between nodes, with the size that does not.

    Args:
        sizes, overlays: of the axes, as Layout has them.
        fast: the axes that send within every layer.
        nodes: by rank, the name of the node that the process is on.
    """
    counts = [len(list(same)) for _, same in itertools.groupby(nodes)]
    alternate = len(counts) > len(set(nodes))
    lines = []
    for axis in fast:
        size = overlays[axis] if axis in overlays else sizes[axis]
        # An overlay has neighbouring ranks, whatever is inside of it.
        nearer = {} if axis in overlays else dict([*sizes.items()][[*sizes].index(axis) + 1 :])
        spanned = _spanned(nodes, size, math.prod(nearer.values()))
        if spanned == 1:
            continue
        if alternate:
            advice = "start the processes so that those of a node have consecutive ranks"
        else:
            dp_shard = None if axis in overlays else sizes["dp_shard"]
            advice = _other_size(axis, size, nearer, counts, dp_shard)
        lines.append(
            f"strategy.{axis}: its {size} processes, which send within every layer, are on {spanned} nodes, {advice}"
        )
    return lines


def _spanned(nodes: Sequence[str], size: int, stride: int) -> int:
    """Return the largest number of nodes with processes that differ along one axis only.

    Args:
        size: number of processes along the axis.
        stride: difference of rank between two neighbours along it.
    """
    lines: dict[tuple[int, int], set[str]] = {}
    for rank, node in enumerate(nodes):
        lines.setdefault((rank // (size * stride), rank % stride), set()).add(node)
    return max(len(names) for names in lines.values())


def _other_size(axis: str, size: int, nearer: Mapping[str, int], counts: Sequence[int], dp_shard: int | None) -> str:
    """Return the advice to give the axis a size that fits a node, and the rest to dp_shard unless it is None."""
    of_a_node, stride = math.gcd(*counts), math.prod(nearer.values())
    divisors = (s for s in range(1, size + 1) if size % s == 0)
    fits = max(s for s in divisors if s == 1 or of_a_node % (s * stride) == 0)
    held = counted(counts[0], "process", "processes") if len({*counts}) == 1 else f"{min(counts)} to {max(counts)}"
    inside = " and ".join(f"{name}={number}" for name, number in nearer.items() if number > 1)
    nearest = f", the nearest are for {inside}" if inside else ""
    rest = "" if dp_shard is None else f" and dp_shard={dp_shard * size // fits}"
    return f"a node has {held}{nearest}; give {axis}={fits}{rest}"
