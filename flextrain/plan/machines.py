"""Find a machine by its name, or in a file; and the nodes that a job needs of it."""

# No annotations as text: pydantic 2.5 reads those of a dataclass with the names of the module whose dataclass holds it.

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from ..core.base.config import Config, PositiveInt, validate
from ..core.base.errors import ConfigError, one_of, suggest

# MachineKind: how fast a device computes, reads its memory and sends, for the time of a step.


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


# The machines that are known by name, each figure with its source.


GB, TFLOP = 1e9, 1e12
MIB = 1024**2

# Vendors give links in both directions together, halved here, and products with sparsity, halved as well.

_H100 = "NVIDIA, H100 data sheet, nvidia.com/en-us/data-center/h100"
_H100_PCIE = (
    "NVIDIA, H100 PCIe product brief PB-11133-001; peaks as S. Bekman, Machine Learning Engineering, quotes NVIDIA"
)
_H200 = "NVIDIA, H200 data sheet 3367400, nvidia.com/en-us/data-center/h200"
_B200 = "NVIDIA, HGX B200, nvidia.com/en-us/data-center/hgx, an eighth of the board"
_A100 = "NVIDIA, A100 data sheet 2188504, nvidia.com/en-us/data-center/a100"
_AMPERE = "NVIDIA, A100 Tensor Core GPU architecture white paper"
_MI300X = "AMD, Instinct MI300X data sheet, amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_910B = "Huawei, Atlas 800T A2 user guide EDOC1100317202 (910B3), as others quote it"
_DGX_H100 = "NVIDIA, DGX H100/H200 user guide, docs.nvidia.com/dgx/dgxh100-user-guide"
_DGX_B200 = "NVIDIA, DGX B200, nvidia.com/en-us/data-center/dgx-b200"
_DGX_A100 = "NVIDIA, DGX A100 user guide, docs.nvidia.com/dgx/dgxa100-user-guide"
_SHOWN = "as nvidia-smi shows it"

_NVLINK3 = Link("NVLink 3", 300 * GB, source="A100 data sheet: 600 GB/s in both directions")
_NVLINK4 = Link("NVLink 4", 450 * GB, source="H100 data sheet: 900 GB/s in both directions")
_NVLINK5 = Link("NVLink 5", 900 * GB, source="HGX B200: 1.8 TB/s in both directions")
_NDR = Link(
    "InfiniBand NDR, 400 Gb/s per device",
    50 * GB,
    source="DGX H100/H200 user guide: eight ConnectX-7 for eight devices",
)
_A100_PEAK = {
    "float64": 19.5 * TFLOP,
    "float32": 19.5 * TFLOP,
    "tfloat32": 156 * TFLOP,
    "bfloat16": 312 * TFLOP,
    "float16": 312 * TFLOP,
}
_HOPPER_PEAK = {
    "float64": 67 * TFLOP,
    "float32": 67 * TFLOP,
    "tfloat32": 494.7 * TFLOP,
    "bfloat16": 989.4 * TFLOP,
    "float16": 989.4 * TFLOP,
    "float8": 1978.9 * TFLOP,
}


def _a100(name: str, size: int, bandwidth: float) -> MachineKind:
    return MachineKind(
        name,
        f"NVIDIA A100 SXM {size} GB",
        _A100_PEAK,
        size * 1024 * MIB,
        bandwidth,
        8,
        _NVLINK3,
        Link(
            "InfiniBand HDR, 200 Gb/s per device",
            25 * GB,
            source="DGX A100 user guide: eight ConnectX-6 for eight devices",
        ),
        {"peak": _A100, "memory": _SHOWN, "bandwidth": _A100 if size == 80 else _AMPERE, "devices": _DGX_A100},
    )


TABLE = (
    MachineKind(
        "h100",
        "NVIDIA H100 SXM 80 GB",
        _HOPPER_PEAK,
        81559 * MIB,
        3350 * GB,
        8,
        _NVLINK4,
        _NDR,
        {"peak": _H100, "memory": _SHOWN, "bandwidth": _H100, "devices": _DGX_H100},
    ),
    MachineKind(
        "h100-pcie",
        "NVIDIA H100 PCIe 80 GB",
        {
            "float64": 51 * TFLOP,
            "float32": 51 * TFLOP,
            "tfloat32": 378 * TFLOP,
            "bfloat16": 756 * TFLOP,
            "float16": 756 * TFLOP,
            "float8": 1513 * TFLOP,
        },
        80 * 10**9,
        2000 * GB,
        8,
        Link(
            "PCIe 5 x16",
            63 * GB,
            source="S. Bekman, Machine Learning Engineering, network; a bridge of NVLink between pairs is left out",
        ),
        Link("InfiniBand NDR, 400 Gb/s per device", 50 * GB, source="assumed, servers differ"),
        {"peak": _H100_PCIE, "memory": _H100_PCIE, "bandwidth": _H100_PCIE, "devices": "assumed, servers differ"},
    ),
    MachineKind(
        "h200",
        "NVIDIA H200 SXM 141 GB",
        _HOPPER_PEAK,
        143771 * MIB,
        4800 * GB,
        8,
        dataclasses.replace(_NVLINK4, source="H200 data sheet: 900 GB/s in both directions"),
        _NDR,
        {"peak": _H200, "memory": _SHOWN, "bandwidth": _H200, "devices": _DGX_H100},
    ),
    MachineKind(
        "b200",
        "NVIDIA B200 SXM 180 GB",
        {
            "float64": 37 * TFLOP,
            "float32": 75 * TFLOP,
            "tfloat32": 1125 * TFLOP,
            "bfloat16": 2250 * TFLOP,
            "float16": 2250 * TFLOP,
            "float8": 4500 * TFLOP,
        },
        183359 * MIB,
        8000 * GB,
        8,
        _NVLINK5,
        dataclasses.replace(_NDR, source="DGX B200: eight ConnectX-7 for eight devices"),
        {"peak": _B200, "memory": _SHOWN, "bandwidth": f"{_DGX_B200}: 64 TB/s of eight", "devices": _DGX_B200},
    ),
    _a100("a100", 80, 2039 * GB),
    _a100("a100-40gb", 40, 1555 * GB),
    MachineKind(
        "mi300x",
        "AMD Instinct MI300X 192 GB",
        {
            "float64": 163.4 * TFLOP,
            "float32": 163.4 * TFLOP,
            "tfloat32": 653.7 * TFLOP,
            "bfloat16": 1307.4 * TFLOP,
            "float16": 1307.4 * TFLOP,
            "float8": 2614.9 * TFLOP,
        },
        206_141_652_992,
        5300 * GB,
        8,
        Link(
            "Infinity Fabric, a link to each of seven",
            448 * GB,
            64 * GB,
            "MI300X data sheet: 128 GB/s in both directions, each",
        ),
        Link(
            "InfiniBand NDR, 400 Gb/s per device",
            50 * GB,
            source="Microsoft, Azure ND-MI300X-v5: eight for eight devices",
        ),
        {
            "peak": _MI300X,
            "memory": "as rocm-smi shows it",
            "bandwidth": _MI300X,
            "devices": "AMD, Instinct MI300X platform",
        },
    ),
    MachineKind(
        "910b",
        "Huawei Ascend 910B3 64 GB",
        {"float32": 82 * TFLOP, "bfloat16": 313 * TFLOP, "float16": 313 * TFLOP},
        65536 * MIB,
        1600 * GB,
        8,
        Link(
            "HCCS, a link to each of seven",
            196 * GB,
            28 * GB,
            "the same user guide: seven links, 392 GB/s in both directions",
        ),
        Link("RoCE, 200 Gb/s per device", 25 * GB, source="the same user guide: 200GE from each processor"),
        {
            "peak": f"{_910B}; bfloat16 assumed as fast as float16",
            "memory": "as npu-smi shows it",
            "bandwidth": _910B,
            "devices": _910B,
        },
    ),
    MachineKind(
        "cpu",
        "Intel Xeon Platinum 8480C, one socket with its cores is a device",
        {"float64": 6.8 * TFLOP, "float32": 13.6 * TFLOP, "bfloat16": 217.9 * TFLOP},
        10**12,
        307.2 * GB,
        2,
        Link("memory of the node", 100 * GB, source="assumed"),
        Link("Ethernet, 100 Gb/s per device", 12.5 * GB, source="assumed"),
        {
            "peak": "56 cores at 3.8 GHz at most (NVIDIA, DGX H100 data sheet 2795800), times 1024 operations per cycle in "
            "bfloat16 (Intel, Advanced Matrix Extensions), 64 in float32 and 32 in float64 (assumed, two AVX-512 units)",
            "memory": "NVIDIA, DGX H100 data sheet 2795800: 2 TB for two",
            "bandwidth": "assumed, eight channels of DDR5-4800",
            "devices": "NVIDIA, DGX H100 data sheet 2795800",
        },
    ),
)


MACHINES: dict[str, MachineKind] = {machine.name: machine for machine in TABLE}
"""The machines that are known by name."""
_ALIASES = {"h100-sxm": "h100", "h200-sxm": "h200", "a100-80gb": "a100", "ascend-910b": "910b", "ascend910b": "910b"}

_Rate = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class _LinkConfig(Config):
    name: str
    bytes_per_s: _Rate
    to_one: _Rate | None = None
    source: str = ""


class _PeakConfig(Config):
    float64: _Rate | None = None
    float32: _Rate | None = None
    tfloat32: _Rate | None = None
    bfloat16: _Rate | None = None
    float16: _Rate | None = None
    float8: _Rate | None = None


class _MachineConfig(Config):
    """A machine in a file; with ``like``, what is left out is as that machine has it."""

    like: str | None = None
    name: str | None = None
    device: str | None = None
    peak: _PeakConfig | None = None
    memory: PositiveInt | None = None
    bandwidth: _Rate | None = None
    devices: PositiveInt | None = None
    inside: _LinkConfig | None = None
    between: _LinkConfig | None = None
    sources: dict[str, str] | None = None


def machine_named(given: str, where: str = "plan.machine") -> MachineKind:
    """Return the machine of a name, whatever its case, or the one that a JSON file describes.

    Raises:
        ConfigError: there is none, or the file has a wrong key or value.
    """
    name = given.strip().lower().replace("_", "-").replace(" ", "-")
    if name in MACHINES or name in _ALIASES:
        return MACHINES[_ALIASES.get(name, name)]
    if name.endswith(".json"):
        return _in_file(Path(given), where)
    hint = suggest(name, (*MACHINES, *_ALIASES))
    raise ConfigError(f'{where}: "{given}" is not known, choose {one_of(MACHINES)}, or give a file .json{hint}')


def _in_file(path: Path, where: str) -> MachineKind:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read, {error.strerror}") from None
    except ValueError as error:  # no JSON, or no text
        raise ConfigError(f"{where}: {path} is no JSON, {error}") from None
    return machine_of(found, path.stem, f"{where} {path}")


def machine_of(values: Mapping[str, Any], name: str, where: str) -> MachineKind:
    """Return the machine with these values, the fields of ``MachineKind``, or with ``like`` those that differ from another one's.

    Args:
        name: its name, unless the values have one.

    Raises:
        ConfigError: a value is missing or wrong.
    """
    config = validate(_MachineConfig, values, where)
    given = {key: value for key, value in config.model_dump(exclude_none=True).items() if key != "like"}
    for link in ("inside", "between"):
        if link in given:
            given[link] = Link(**given[link])
    if config.like is None:
        known = {"name": name, "device": name, "sources": {}}
    else:
        other = machine_named(config.like, f"{where}.like")
        known = {each.name: getattr(other, each.name) for each in dataclasses.fields(other)} | {"name": name}
        kept = {key: source for key, source in other.sources.items() if key not in given}
        given["sources"] = kept | given.get("sources", {})
    missing = [each.name for each in dataclasses.fields(MachineKind) if each.name not in {**known, **given}]
    if missing:
        raise ConfigError(f'{where}.{missing[0]}: missing, give it, or "like" with the name of a machine')
    if not given.get("peak", {"": 0}):
        raise ConfigError(f"{where}.peak: is empty, give operations per second for {one_of(DTYPES)}")
    return MachineKind(**{**known, **given})


def nodes_for(machine: MachineKind, world_size: int) -> int:
    """Return how many nodes have this number of devices.

    Raises:
        ConfigError: the last one would not be full.
    """
    if world_size <= machine.devices:
        return 1
    if world_size % machine.devices:
        raise ConfigError(
            f"plan.nodes: missing, {world_size} processes do not fill nodes of {machine.devices} devices ({machine.name}); "
            "give --nodes"
        )
    return world_size // machine.devices


def check_devices(machine: MachineKind, world_size: int, nodes: int) -> None:
    """Raise if a node would have more processes than devices.

    Raises:
        ConfigError: it would.
    """
    each = world_size // nodes
    if each > machine.devices:
        least = -(-world_size // machine.devices)
        raise ConfigError(
            f"plan.nodes: {nodes} with {each} processes each is not allowed, a node of {machine.name} has {machine.devices} "
            f"devices; give {least} or more"
        )
