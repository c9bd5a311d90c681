"""MachineKind: how fast a device computes, reads its memory and sends, for the time of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
"""Dtypes of ``MachineKind.peak``. "tfloat32": float32 that torch allows to be rounded to TF32 for a product; machines without it
compute in float32. "float8" is for all kinds of it."""


@dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        name: such as "NVLink 4".
        bytes_per_s: what a device can send at the same time over all of it, in one direction.
        to_one: what it can send to one other device, if each pair has links of its own; None: as much as to all.
        source: where these figures are from.
    """

    name: str
    bytes_per_s: float
    to_one: float | None = None
    source: str = ""

    def speed(self, others: int) -> float:
        """Bytes per second that a device can send to ``others`` devices."""
        return self.bytes_per_s if self.to_one is None else min(self.bytes_per_s, self.to_one * others)


@dataclass(frozen=True)
class MachineKind:
    """A kind of node, all of whose devices are alike.

    Attributes:
        name: its name on the command line.
        device: what one device is, in words.
        peak: floating-point operations per second of dense products, by dtype, see ``DTYPES``.
        memory: bytes of a device's memory.
        bandwidth: bytes per second that a device reads from and writes to its memory.
        devices: number of devices in a node.
        inside, between: the links inside of a node, and between nodes.
        sources: where the figures are from, by attribute; what no source was found for begins with "assumed".
    """

    name: str
    device: str
    peak: dict[str, float]
    memory: int
    bandwidth: float
    devices: int
    inside: Link
    between: Link
    sources: dict[str, str] = field(default_factory=dict)

    def rate(self, dtype: str) -> float | None:
        """Floating-point operations per second in a dtype of torch's; None if there is no figure for it."""
        if dtype.startswith("float8"):
            dtype = "float8"
        if dtype == "tfloat32" and dtype not in self.peak:
            dtype = "float32"
        return self.peak.get(dtype)
