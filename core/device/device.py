"""Kinds of devices that flextrain knows, selection of this process's device, and moving data to it."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.metadata
import inspect
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError, StrategyError, one_of, suggest
from ..base.registry import entry_points
from ..comm.collectives import carries_cpu_tensors, tensors_of


@dataclass(frozen=True)
class DeviceSpec:
    """Description of a kind of device.

    Attributes:
        type: torch's name for it ("cuda").
        backend: the process group back end for its tensors ("nccl").
        autocast_dtype: dtype in which ``AmpOptimWrapper(dtype=None)`` computes; None: bfloat16 if the device has it, else
            float16.
        package: the package whose import adds the type to torch; None if it is part of torch.
        install: what to install if that package is missing; default: its name.
    """

    type: str
    backend: str
    autocast_dtype: torch.dtype | None = None
    package: str | None = None
    install: str | None = None

    @property
    def module(self) -> ModuleType:
        """torch's module for the device, such as ``torch.cuda``."""
        return getattr(torch, self.type)  # type: ignore[no-any-return]

    def is_available(self) -> bool:
        """Whether this process can use a device of this kind; False before its package is imported."""
        if self.type == "cpu":
            return True
        # torch has is_available() of mps in torch.backends.mps, that of the others in torch.<type>.
        owners: list[Any] = [getattr(torch.backends, self.type, None), getattr(torch, self.type, None)]
        return any(owner.is_available() for owner in owners if hasattr(owner, "is_available"))

    def load(self, where: str = "strategy.device") -> None:
        """Import the package that adds the type to torch, if torch has not imported it itself.

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
        """The back end ``asked``, with gloo added if it cannot send CPU tensors; None: the device's ``group_backend``.

        Raises:
            ConfigError: the back end cannot send the device's tensors.
        """
        if asked is None:
            return self.group_backend
        if self.type != "cpu" and asked.lower() == self.backend:
            return self.group_backend
        if carries_cpu_tensors(asked):
            if self.type not in tensors_of(asked, default=[self.type]):
                raise ConfigError(
                    f'{where}: "{asked}" cannot send {self.type} tensors, choose "{self.backend}" or leave it out'
                )
            return asked
        if ":" in asked:
            return f"cpu:gloo,{asked}"
        if self.type == "cpu":
            raise ConfigError(f'{where}: "{asked}" cannot send CPU tensors, choose "gloo" or leave it out')
        return f"cpu:gloo,{self.type}:{asked}"


class Devices(Mapping[str, DeviceSpec]):
    """DeviceSpec by type: built-in ones, registered ones, and those of installed packages.

    A package adds one by an entry point with the type as its name and a DeviceSpec as its value. The entry point is
    loaded when its type is looked up.
    """

    def __init__(self, *specs: DeviceSpec, entry_points: str | None = None) -> None:
        self._specs = {spec.type: spec for spec in specs}
        self._entry_points = entry_points

    def register(self, spec: DeviceSpec) -> DeviceSpec:
        """Add a DeviceSpec, or replace that of the same type; return it."""
        self._specs[spec.type] = spec
        return spec

    def __getitem__(self, kind: str) -> DeviceSpec:
        if kind not in self._specs:
            for entry_point in entry_points(self._entry_points):
                if entry_point.name == kind:
                    return self.register(_checked(entry_point))
        return self._specs[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._specs or any(entry_point.name == kind for entry_point in entry_points(self._entry_points))

    def __iter__(self) -> Iterator[str]:
        return iter(
            dict.fromkeys([*self._specs, *(entry_point.name for entry_point in entry_points(self._entry_points))])
        )

    def __len__(self) -> int:
        return len(list(iter(self)))


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
"""Environment variables that limit the devices a process sees; its LOCAL_RANK selects one, if there are several."""


def register_device(spec: DeviceSpec) -> DeviceSpec:
    """Register a kind of device, so that ``device=spec.type`` is allowed; return the spec.

    An installed package needs no call: it has an entry point in the group ``flextrain.devices``, with the type as its
    name and the DeviceSpec as its value.

    Args:
        spec: the description of the kind.
    """
    return DEVICES.register(spec)


def accelerator_type() -> str:
    """Type of the accelerator that torch finds on this machine, or "cpu"."""
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        if current is not None and current.type in DEVICES:
            return current.type
    return "cpu"


def device_spec(name: str | None, where: str = "strategy.device") -> DeviceSpec:
    """The spec of the device type ``name``; None: that of this machine's accelerator, or the CPU's.

    The package of a type given by name is imported.

    Raises:
        ConfigError: the name is unknown.
        StrategyError: the named device is not usable here; the CPU never replaces it.
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
    """Return the device of the process with this ``local_rank``, and make it current.

    A process that sees one device takes it: Slurm's ``--gpus-per-task=1`` and Kubernetes show each process its own.

    Raises:
        StrategyError: this process sees fewer devices than its machine has processes, and more than one.
    """
    if spec.type in ("cpu", "mps"):
        return torch.device(spec.type)
    count = spec.module.device_count()
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise StrategyError(
            f"strategy.device: local rank {local_rank} has no {spec.type} device, this machine has {count}"
        )
    _set_allocator(spec.type)
    device = torch.device(spec.type, index)
    spec.module.set_device(device)
    return device


def _set_allocator(kind: str) -> None:
    from .accelerator import let_segments_grow

    let_segments_grow(kind)


def device_uuid(device: torch.device) -> str | None:
    """What tells the device from all others, also of other machines; None where torch does not say."""
    ask = None if device.type == "cpu" else getattr(DEVICES[device.type].module, "get_device_properties", None)
    uuid = None if ask is None else getattr(ask(device), "uuid", None)
    return None if uuid is None else str(uuid)


def to_device(data: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """``data`` with all of its tensors on ``device``; dicts, lists, (named) tuples and dataclasses keep their type.

    An object with a ``to`` method (a batch encoding, a packed sequence) is moved by that method. ``non_blocking``
    applies to copies to an accelerator only, which then run beside its work; copies to the CPU always block.
    """
    kind = type(data)
    if kind is list or kind is tuple:  # first, for speed: this runs for every batch
        return kind(
            [
                value if type(value) is Tensor and value.device == device else to_device(value, device, non_blocking)
                for value in data
            ]
        )
    if isinstance(data, Tensor):
        return data if data.device == device else _copied(data, device, non_blocking)
    if callable(getattr(data, "to", None)) and not isinstance(data, type):
        return _moved(data, device, non_blocking)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in data.items()}
        return moved if kind is dict else _with_items(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, non_blocking) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, non_blocking) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        own = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{name: to_device(getattr(data, name), device, non_blocking) for name in own})
    return data


def _with_items(data: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same class with other values."""
    if isinstance(data, MutableMapping):  # a defaultdict, for example, has more than its items
        same = copy.copy(data)
        same.update(items)
        return same
    return type(data)(items)  # type: ignore[call-arg]


def _copied(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    if device.type == "cpu" or tensor.device.type != "cpu" or not non_blocking:
        return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")
    from .accelerator import upload

    return upload(tensor, device)


def _moved(data: Any, device: torch.device, non_blocking: bool) -> Any:
    """What an object's own ``to`` gives, which need not know ``non_blocking``."""
    if non_blocking and device.type != "cpu":
        # What it holds may have another ``to``, and compiled ones do not say what they take.
        with suppress(TypeError, ValueError):
            known = inspect.signature(data.to).parameters
            if "non_blocking" in known or any(each.kind is each.VAR_KEYWORD for each in known.values()):
                return data.to(device, non_blocking=True)
    return data.to(device)


def memory_mb(device: torch.device) -> float:
    """Peak memory in MiB (2**20 bytes): allocated by torch on the device; on the CPU, the process's resident set."""
    if device.type == "cpu":
        # Linux counts in KiB, macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform != "darwin" else 2**20)
    module = DEVICES[device.type].module
    return float(module.max_memory_allocated(device)) / 2**20 if hasattr(module, "max_memory_allocated") else 0.0


def counts_memory(device: torch.device) -> bool:
    """Whether torch counts what it allocates on this device, and can begin to count anew."""
    names = ("max_memory_allocated", "reset_peak_memory_stats")
    return device.type != "cpu" and all(hasattr(DEVICES[device.type].module, name) for name in names)


def begin_peak(device: torch.device) -> None:
    """Let ``memory_mb`` count from now on, on a device for which ``counts_memory`` is true; the device need not wait."""
    DEVICES[device.type].module.reset_peak_memory_stats(device)


@contextmanager
def peak_apart(device: torch.device) -> Iterator[None]:
    """Context whose memory ``memory_mb`` does not count; a device that it drove to a new peak counts from then on anew."""
    before = memory_mb(device)
    try:
        yield
    finally:
        reset = None if device.type == "cpu" else getattr(DEVICES[device.type].module, "reset_peak_memory_stats", None)
        if reset is not None and memory_mb(device) > before:
            reset(device)


def memory_source(device: torch.device) -> str:
    """What ``memory_mb`` measures, in words."""
    if device.type == "cpu":
        return "largest resident set of the process"
    if not hasattr(DEVICES[device.type].module, "max_memory_allocated"):
        return f"not measured on {device.type}"
    return f"most that torch has allocated on {device}"


def overflows_to_inf(device_type: str) -> bool:
    """Whether float16 overflow gives inf; some Ascend NPUs give the largest finite number instead."""
    utils = getattr(getattr(torch, device_type, None), "utils", None)
    ask = getattr(utils, "is_support_inf_nan", None)
    return True if ask is None else bool(ask())


def synchronize(device: torch.device) -> None:
    """Wait until all work that was started on ``device`` is complete."""
    if device.type != "cpu":
        DEVICES[device.type].module.synchronize()


def empty_cache(device: torch.device) -> None:
    """Release the memory that the allocator caches for later use."""
    if device.type != "cpu":
        DEVICES[device.type].module.empty_cache()


# Buffers in page-locked (pinned) host memory, for asynchronous copies from an accelerator.


_ALIGNMENT = 64  # bytes; enough for a view in any dtype


class HostBuffer:
    """Host memory for copies of tensors; every call of ``copy`` uses it again.

    For tensors of an accelerator the memory is page-locked if the device supports it. Copies are then several times as
    fast, and they run on the device's stream, in order with the work before and after them.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._device = torch.device("cpu")  # of the tensors that the blocks are for
        self._locks = False
        self._arrival: torch.Event | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start contiguous copies on the host. Read them after ``wait``; the next call overwrites them.

        Later work on the device's current stream may change the tensors.
        """
        self.wait()  # a copy of a host tensor is immediate, and would overtake the copies under way
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
        sizes = [-(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if device != self._device or (begins := _fill([block.numel() for block in self._blocks], sizes)) is None:
            self._blocks = []  # free the old blocks before the new ones are allocated
            self._device = device
            self._blocks, self._locks = _allocate(sizes, device)
            begins = _fill([block.numel() for block in self._blocks], sizes)
            assert begins is not None
        copies = []
        for tensor, (number, begin) in zip(tensors, begins, strict=True):
            view = self._blocks[number][begin : begin + tensor.numel() * tensor.itemsize]
            copies.append(view.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=self._locks))
        if self._locks:
            self._arrival = torch.accelerator.current_stream(device).record_event()
        return copies

    def wait(self) -> None:
        """Wait until the copies are complete; may be called from any thread."""
        if self._arrival is not None:
            # A new thread has another current device, and waiting there would allocate memory on it.
            DEVICES[self._device.type].module.set_device(self._device)
            self._arrival.synchronize()
            self._arrival = None


_SLICE_BYTES = 2**26


def host_slices(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the tensor, slice of its elements on the host), in order; tensors of the host as they are.

    What comes from a device goes through two page-locked buffers of at most 64 MiB: one is filled while the caller uses the
    other. A slice is valid until the next one is asked for.
    """
    buffers = HostBuffer(), HostBuffer()
    ready: list[tuple[int, Tensor]] = []
    for number, batch in enumerate(chain(_batches(tensors), ([],))):
        own = [one for _, one in batch if one.device.type != "cpu"]
        copies = iter(buffers[number % 2].copy(own) if own else ())
        started = [(index, one if one.device.type == "cpu" else next(copies)) for index, one in batch]
        buffers[number % 2 - 1].wait()
        yield from ready
        ready = started


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield numbered slices in lists that fit into a buffer."""
    batch: list[tuple[int, Tensor]] = []
    room = _SLICE_BYTES
    for index, tensor in enumerate(tensors):
        on_host = tensor.device.type == "cpu"
        flat = tensor if on_host else tensor.detach().contiguous().view(-1)
        for one in (flat,) if on_host else torch.split(flat, _SLICE_BYTES // flat.itemsize):
            size = 0 if on_host else one.numel() * one.itemsize
            if size > room:
                yield batch
                batch, room = [], _SLICE_BYTES
            batch.append((index, one))
            room -= size
    yield batch


def _allocate(sizes: Sequence[int], device: torch.device) -> tuple[list[Tensor], bool]:
    """Allocate blocks that hold tensors of these sizes (bytes); also return whether they are page-locked."""
    if device.type in ("cpu", "mps") or not any(sizes):
        return [torch.empty(sum(sizes), dtype=torch.uint8)], False
    try:
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in _powers_of_two(sizes)]
    except RuntimeError:  # page-locked memory is not supported, or there is no more of it
        return [torch.empty(sum(sizes), dtype=torch.uint8)], False
    return blocks, True


def _powers_of_two(sizes: Sequence[int]) -> list[int]:
    """Sizes of page-locked blocks: powers of two, because torch rounds up to those and never frees them."""
    left, blocks, room = sum(sizes), [], 0
    for size in sizes:
        if size > room:
            room = max(1 << left.bit_length() - 1, 1 << (size - 1).bit_length())
            blocks.append(room)
        room -= size
        left -= size
    return blocks


def _fill(blocks: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """(index of the block, offset in it) for each size, placed one after the other; None if they do not fit."""
    begins: list[tuple[int, int]] = []
    number = begin = 0
    for size in sizes:
        while number < len(blocks) and begin + size > blocks[number]:
            number, begin = number + 1, 0
        if number == len(blocks):
            return None
        begins.append((number, begin))
        begin += size
    return begins
