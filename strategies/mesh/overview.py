"""Overview: a table of what each axis of a mesh divides, for the log."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from ...core.comm.joint_errors import gather_differing
from ...core.errors import counted

_WIDTH = 54  # of the column with text; the table is 96 columns wide
_MEGABYTE = 1e6


@dataclass
class _Row:
    axis: str
    size: str
    divides: str
    parameters: int
    size_in_bytes: int


class Overview:
    """Collects, while a model is divided, how many parameters a process has left after each axis.

    Args:
        model: the whole model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows = [_Row("", "", "the whole model", *_held(model))]

    def add(self, axis: str, size: int, divides: str, model: nn.Module) -> None:
        """Note what an axis has done to the model.

        Args:
            axis: its name, or the names of several.
            size: number of processes along it.
            divides: what it divides, in words.
            model: as it is after the axis has changed it.
        """
        self._rows.append(_Row(axis, str(size), divides, *_held(model)))

    def table(self, world_size: int) -> str:
        """Return the table; numbers are the largest of all processes. A collective."""
        everyones = gather_differing([[row.parameters, row.size_in_bytes] for row in self._rows])
        largest = [[max(numbers) for numbers in zip(*rows, strict=True)] for rows in zip(*everyones, strict=True)]
        title = f"Mesh of {counted(world_size, 'process', 'processes')}, and what each axis leaves to one of them:"
        lines = [title, _line("axis", "size", "divides", "parameters", "MB")]
        for row, (parameters, size) in zip(self._rows, largest, strict=True):
            text = textwrap.wrap(row.divides, _WIDTH) or [""]
            lines.append(_line(row.axis, row.size, text[0], f"{parameters:,}", f"{size / _MEGABYTE:,.1f}"))
            lines += [_line("", "", more, "", "") for more in text[1:]]
        return "\n".join(line.rstrip() for line in lines)


def _line(axis: str, size: str, divides: str, parameters: str, megabytes: str) -> str:
    return f"  {axis:<14}{size:>4}  {divides:<{_WIDTH}}{parameters:>15}{megabytes:>10}"


def _held(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters that this process holds, and their bytes."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() for p in local), sum(p.numel() * p.element_size() for p in local)
