"""The machines that are known by name, each figure with its source."""

from __future__ import annotations

import dataclasses

from .machine_kind import Link, MachineKind

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
