"""torch.npu, simulated: the names and meanings of torch_npu.npu."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import _sim, _source, device_type

if _source:
    __path__.append(str(Path(_source) / "npu"))

TOTAL_MEMORY = 64 << 30  # bytes of each device
DeviceLike = torch.device | int | str | None

# Devices


def _index(device: DeviceLike = None) -> int:
    if device is None:
        return _sim.current_device()
    if isinstance(device, int):
        return _sim.current_device() if device < 0 else device
    device = torch.device(device)
    if device.type != device_type:
        raise ValueError(f"Expected a {device_type} device, but got: {device}")
    return _sim.current_device() if device.index is None else device.index


def is_available() -> bool:
    return _sim.device_count() > 0


def device_count() -> int:
    return _sim.device_count()


def current_device() -> int:
    return _sim.current_device()


def set_device(device: DeviceLike) -> None:
    _sim.set_device(_index(device))


_initialized = True  # torch.utils.checkpoint looks at it


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is left to do."""


_lazy_init = init


def _lazy_call(callback) -> None:
    callback()


def _is_in_bad_fork() -> bool:
    return _sim.in_bad_fork()


def get_device_name(device: DeviceLike = None) -> str:
    return "Ascend910B (simulated)"


def get_device_capability(device: DeviceLike = None) -> None:
    return None


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    index = _index(device)
    uuid = f"chip {visible.split(',')[index] if visible else index}"
    return SimpleNamespace(name=get_device_name(device), total_memory=TOTAL_MEMORY, uuid=uuid)


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_index(device))


class device:
    """Makes a device current for the time of a ``with``."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.prev = _sim.current_device()
        if self.idx >= 0:
            _sim.set_device(self.idx)

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> bool:
        _sim.set_device(self.prev)
        return False


class device_of(device):
    """Makes the device of a tensor current."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == device_type else None)


# Start-up switches: kept so that a test can look at them

options: dict[str, str] = {}


def set_option(option: dict[str, Any]) -> None:
    level = option.get("ACL_OP_DEBUG_LEVEL", 0)
    if str(level) not in {"0", "1", "2", "3", "4"}:  # one that stands for the values that Ascend's refuses
        raise ValueError(f"value of ACL_OP_DEBUG_LEVEL should be from 0 to 4\nbut got {level}")
    options.update({name: str(value) for name, value in option.items()})


def set_compile_mode(jit_compile: bool = False) -> None:
    options["jitCompile"] = "enable" if jit_compile else "disable"


class _Switches:
    """Attributes that set an option each."""

    def __init__(self, **names: str) -> None:
        object.__setattr__(self, "names", names)

    def __setattr__(self, name: str, value: bool) -> None:
        options[self.names[name]] = "enable" if value else "disable"


config = _Switches(allow_internal_format="ALLOW_INTERNAL_FORMAT")
matmul = _Switches(allow_hf32="ALLOW_MATMUL_HF32")
conv = _Switches(allow_hf32="ALLOW_CONV_HF32")

# Memory


def memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_accumulated_memory_stats = reset_peak_memory_stats


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": memory_allocated(device),
        "allocated_bytes.all.peak": max_memory_allocated(device),
        "num_alloc_retries": 0,
    }


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    return TOTAL_MEMORY - memory_allocated(device), TOTAL_MEMORY


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    return f"allocated {memory_allocated(device)} peak {max_memory_allocated(device)}"


def empty_cache() -> None:
    """Nothing is kept for later."""


def ipc_collect() -> None:
    """Nothing is shared between processes."""


# Random numbers


def manual_seed(seed: int) -> None:
    _sim.default_generator(_sim.current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _sim.default_generator(index).manual_seed(int(seed))


def seed() -> int:
    return _sim.default_generator(_sim.current_device()).seed()


def seed_all() -> None:
    manual_seed_all(seed())


def initial_seed() -> int:
    return _sim.default_generator(_sim.current_device()).initial_seed()


def get_rng_state(device: DeviceLike = device_type) -> Tensor:
    return _sim.default_generator(_index(device)).get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = device_type) -> None:
    _sim.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Sequence[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


default_generators = tuple(_sim.default_generator(index) for index in range(device_count()))

# Streams and events


class Stream(torch.Stream):
    def __new__(cls, device: DeviceLike = None, priority: int = 0, **_: Any):
        return super().__new__(cls, device=torch.device(device_type, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        return super().__new__(cls, device=device_type, enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        self.time = time.perf_counter()
        super().record(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event) -> float:
        """Milliseconds."""
        return (end_event.time - self.time) * 1e3


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(device_type, _index(device)))


def default_stream(device_: DeviceLike = None) -> torch.Stream:
    index = _index(device_)
    with device(index):
        return torch.Stream(stream_id=0, device_index=index, device_type=20)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes a stream current for the time of a ``with``."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.prev = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.stream is not None:
            set_stream(self.prev)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


# Mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = False) -> bool:
    return True


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled(device_type)


def set_autocast_enabled(enable: bool) -> None:
    torch.set_autocast_enabled(device_type, enable)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(device_type)


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype(device_type, dtype)


class utils:
    """What Ascend's GradScaler asks for."""

    @staticmethod
    def is_support_inf_nan() -> bool:
        return True

    @staticmethod
    def npu_check_overflow(grad: Tensor) -> bool:
        return not bool(torch.isfinite(grad).all())


def _tensor_type(dtype: torch.dtype):
    def make(*args: Any) -> Tensor:
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args, dtype=dtype, device=device_type)
        return torch.tensor(*args, dtype=dtype, device=device_type)

    return make


FloatTensor, HalfTensor, BFloat16Tensor, DoubleTensor = map(
    _tensor_type, (torch.float32, torch.float16, torch.bfloat16, torch.float64)
)
LongTensor, IntTensor, ByteTensor, BoolTensor = map(_tensor_type, (torch.int64, torch.int32, torch.uint8, torch.bool))
