"""Devices: which one this process uses, what it is called in torch, and moving data to it."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.metadata
import resource
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .comm.collectives import carries_cpu_tensors
from .errors import ConfigError, StrategyError, one_of, suggest


@dataclass(frozen=True)
class DeviceSpec:
    """What flextrain must know of a kind of device.

    Attributes:
        type: torch's name of it ("cuda").
        backend: the process-group back end for its tensors ("nccl").
        autocast_dtype: what ``AmpOptimWrapper(dtype=None)`` computes in.
        package: the package whose import adds the type to torch; None when torch has it built in.
        install: what to install when that package is missing; default: its name.
    """

    type: str
    backend: str
    autocast_dtype: torch.dtype = torch.float16
    package: str | None = None
    install: str | None = None

    @property
    def module(self) -> ModuleType:
        """``torch.cuda`` and its like."""
        return getattr(torch, self.type)  # type: ignore[no-any-return]

    def is_available(self) -> bool:
        """Whether a device of this kind can be used in this process, as far as its package is imported."""
        if self.type == "cpu":
            return True
        # torch answers for mps in torch.backends, for the others at its top.
        places: list[Any] = [getattr(torch.backends, self.type, None), getattr(torch, self.type, None)]
        return any(place.is_available() for place in places if hasattr(place, "is_available"))

    def load(self, where: str = "strategy.device") -> None:
        """Import the package that adds the type to torch, if torch has not done so at its own import.

        Raises:
            StrategyError: it is not installed, or cannot be imported.
        """
        if self.package is None or hasattr(torch, self.type):
            return
        try:
            importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.package}.".startswith(f"{error.name}."):
                raise
            advice = f"install {self.install or self.package}"
            raise StrategyError(f'{where}: "{self.type}" is not usable on this machine, {advice}') from None
        except (ImportError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise StrategyError(
                f'{where}: "{self.type}" is not usable on this machine, {self.package} is installed and cannot be imported '
                f"({reason[:200]}); `flextrain doctor` says more"
            ) from error

    @property
    def group_backend(self) -> str:
        """The back end for a group that also carries CPU tensors (checkpoints, metrics, objects)."""
        return self.backend if self.type == "cpu" else f"cpu:gloo,{self.type}:{self.backend}"

    def complete_backend(self, asked: str | None, where: str = "strategy.backend") -> str:
        """The back end that was asked for, with gloo beside it if it carries none of the CPU's tensors; None: the device's.

        Raises:
            ConfigError: one for accelerators only was asked for on the CPU.
        """
        if asked is None:
            return self.group_backend
        if self.type != "cpu" and asked.lower() == self.backend:
            return self.group_backend
        if carries_cpu_tensors(asked):
            return asked
        if ":" in asked:
            return f"cpu:gloo,{asked}"
        if self.type == "cpu":
            raise ConfigError(f'{where}: "{asked}" sends no tensors that are on the CPU, choose "gloo" or leave it out')
        return f"cpu:gloo,{self.type}:{asked}"


class Devices(Mapping[str, DeviceSpec]):
    """The kinds of devices by type: the built-in ones, those that were registered, and those of installed packages.

    A package adds one by an entry point whose name is the type and which leads to a DeviceSpec; it is imported when
    somebody asks for that type.
    """

    def __init__(self, *specs: DeviceSpec, entry_points: str | None = None) -> None:
        self._specs = {spec.type: spec for spec in specs}
        self._entry_points = entry_points

    def register(self, spec: DeviceSpec) -> DeviceSpec:
        """Add a kind of device, or replace what is known of one; returned for convenience."""
        self._specs[spec.type] = spec
        return spec

    def __getitem__(self, kind: str) -> DeviceSpec:
        if kind not in self._specs:
            for entry_point in self._offered():
                if entry_point.name == kind:
                    return self.register(_checked(entry_point))
        return self._specs[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._specs or any(entry_point.name == kind for entry_point in self._offered())

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._specs, *(entry_point.name for entry_point in self._offered())]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _offered(self) -> list[importlib.metadata.EntryPoint]:
        return list(importlib.metadata.entry_points(group=self._entry_points)) if self._entry_points else []


def _checked(entry_point: importlib.metadata.EntryPoint) -> DeviceSpec:
    spec = entry_point.load()
    if not isinstance(spec, DeviceSpec) or spec.type != entry_point.name:
        raise ConfigError(
            f'entry point "{entry_point.name}" in {entry_point.group}: {entry_point.value} is {spec!r}, it must be a '
            f'DeviceSpec of type "{entry_point.name}"'
        )
    return spec


DEVICES = Devices(
    DeviceSpec("cpu", "gloo", torch.bfloat16),
    DeviceSpec("cuda", "nccl"),
    DeviceSpec("npu", "hccl", package="torch_npu", install="torch_npu (pip install flextrain[npu]) and Ascend's CANN"),
    DeviceSpec("xpu", "xccl"),
    DeviceSpec("mps", "gloo"),
    entry_points="flextrain.devices",
)


VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The environment variables that say which of a machine's devices a process sees; its LOCAL_RANK chooses among those."""


def register_device(spec: DeviceSpec) -> DeviceSpec:
    """Let ``device=spec.type`` name a kind of device that flextrain does not know; returned for convenience.

    An installed package needs no call: its entry point in the group ``flextrain.devices``, with the type for a name, leads
    to the DeviceSpec.
    """
    return DEVICES.register(spec)


def accelerator_type() -> str:
    """The kind of device that torch sees here: an accelerator's type, or "cpu"."""
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        if current is not None and current.type in DEVICES:
            return current.type
    return "cpu"


def device_spec(name: str | None, where: str = "strategy.device") -> DeviceSpec:
    """The spec of the device kind ``name``; of the accelerator that is here when None.

    A kind that is asked for by name has its package imported.

    Raises:
        ConfigError: an unknown name.
        StrategyError: the device was asked for by name and is not usable here; the CPU is never taken instead.
    """
    if name is None:
        return DEVICES[accelerator_type()]
    kind, _, index = name.partition(":")
    if kind in DEVICES and index:
        several = f", and choose among several by {VISIBLE[kind]}" if kind in VISIBLE else ""
        raise ConfigError(f'{where}: "{name}" is not allowed, give "{kind}"{several}')
    if kind not in DEVICES:
        raise ConfigError(f'{where}: "{name}" is not allowed, choose {one_of(DEVICES)}{suggest(kind, DEVICES)}')
    spec = DEVICES[kind]
    spec.load(where)
    if not spec.is_available():
        raise StrategyError(f'{where}: "{name}" is not usable on this machine, no such device was found')
    return spec


def select_device(spec: DeviceSpec, local_rank: int) -> torch.device:
    """The device of the process with number ``local_rank`` on this machine, made current.

    Raises:
        StrategyError: more processes on this machine than devices.
    """
    if spec.type in ("cpu", "mps"):
        return torch.device(spec.type)
    count = spec.module.device_count()
    if local_rank >= count:
        raise StrategyError(
            f"strategy.device: process {local_rank} of this machine has no {spec.type}, there are {count}"
        )
    device = torch.device(spec.type, local_rank)
    spec.module.set_device(device)
    return device


def to_device(data: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """``data`` with every tensor in it on ``device``; dicts, lists, tuples, named tuples and dataclasses keep their type.

    Anything with a ``to`` method of its own (a batch encoding, a packed sequence) is asked to move itself.
    ``non_blocking`` is for the way to an accelerator; on the way to the CPU the values are waited for.
    """
    kind = type(data)
    if kind is list or kind is tuple:  # first, and without the abstract types below: this runs for every batch
        return kind(
            [
                value if type(value) is Tensor and value.device == device else to_device(value, device, non_blocking)
                for value in data
            ]
        )
    if isinstance(data, Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking and device.type != "cpu")
    if callable(getattr(data, "to", None)) and not isinstance(data, type):
        return data.to(device)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in data.items()}
        if kind is dict:
            return moved
        if isinstance(data, MutableMapping):  # a default dict and its like are more than their items
            same = copy.copy(data)
            same.update(moved)
            return same
        return type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, non_blocking) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, non_blocking) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {
            f.name: to_device(getattr(data, f.name), device, non_blocking) for f in dataclasses.fields(data) if f.init
        }
        return dataclasses.replace(data, **fields)
    return data


def memory_mb(device: torch.device) -> float:
    """Peak memory in MiB (2**20 bytes): what the allocator held at most, or the process's peak resident set on the CPU."""
    if device.type == "cpu":
        # Linux counts in KiB, macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform != "darwin" else 2**20)
    module = DEVICES[device.type].module
    return float(module.max_memory_allocated(device)) / 2**20 if hasattr(module, "max_memory_allocated") else 0.0


def overflows_to_inf(device_type: str) -> bool:
    """Whether float16 arithmetic beyond the largest number gives inf; some Ascend NPUs stop at that number."""
    utils = getattr(getattr(torch, device_type, None), "utils", None)
    ask = getattr(utils, "is_support_inf_nan", None)
    return True if ask is None else bool(ask())


def synchronize(device: torch.device) -> None:
    """Wait until everything that was started on ``device`` is done."""
    if device.type != "cpu":
        DEVICES[device.type].module.synchronize()


def empty_cache(device: torch.device) -> None:
    """Give memory that the allocator keeps for later back to the device."""
    if device.type != "cpu":
        DEVICES[device.type].module.empty_cache()
