"""Options of offloading: where optimizer state and parameters are kept while they are not needed, and how files are read."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pydantic

from ...core.config import Config, PositiveInt
from ...core.errors import ConfigError

WHERE = "strategy"


def _whole(value: float) -> int:
    if value != int(value):
        raise ConfigError(f"{value} is not allowed, give a whole number")
    return int(value)


# JSON files often give numbers of elements as 5e8, a float.
Elements = Annotated[int | float, pydantic.Field(ge=1), pydantic.AfterValidator(_whole)]
Threshold = Annotated[int | float, pydantic.Field(ge=0), pydantic.AfterValidator(_whole)]

# Direct input and output is in whole sectors of a disk.
_SECTOR = 512
_UNIT = 1024  # AIO_ALIGNED_BYTES of DeepSpeed


class Offload(Config):
    """Where a part of the state is kept while it is not needed."""

    key: ClassVar[str]
    _of_files: ClassVar[tuple[str, ...]]

    device: Literal["none", "cpu", "nvme"] = "none"
    """ "none" leaves it on the device, "cpu" moves it to host memory, "nvme" to files in ``nvme_path``."""
    pin_memory: bool = True
    """Use page-locked host memory, which is copied faster."""
    nvme_path: str | Path | None = None
    """A folder on a local disk; every process uses a sub-folder of its own, and removes it at the end."""
    buffer_count: PositiveInt | None = None
    """Buffers in memory that files are read to and written from; None: as many as are needed."""

    @property
    def on_files(self) -> bool:
        """Whether the state is kept in files."""
        return self.device == "nvme"

    @pydantic.model_validator(mode="after")
    def _fits_device(self) -> Offload:
        where = f"{WHERE}.zero_optimization.{self.key}"
        if not self.on_files:
            for key in self._of_files:
                if key in self.model_fields_set and getattr(self, key):
                    raise ConfigError(
                        f'{where}.{key}: has no effect with device="{self.device}", give device="nvme" or leave it out'
                    )
        elif self.nvme_path is None:
            raise ConfigError(f'{where}.nvme_path: missing, device="nvme" needs a folder on a local disk')
        elif problem := why_not_usable(Path(self.nvme_path)):
            raise ConfigError(f'{where}.nvme_path: "{self.nvme_path}" {problem}')
        return self


class OffloadOptimizer(Offload):
    """Optimizer state and float32 masters; they are updated on the CPU."""

    key = "offload_optimizer"
    _of_files = ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")

    ratio: float | int | None = pydantic.Field(None, ge=0, le=1)
    """Share of the optimizer that is updated on the CPU; stage 3."""
    pipeline_read: bool = False
    """Read the state of the next sub-group during the update of one; nvme."""
    pipeline_write: bool = False
    """Write the state of a sub-group during the update of the next; nvme."""
    fast_init: Literal[False] = False
    """Only False: masters begin with the float32 weights."""

    @pydantic.model_validator(mode="after")
    def _whole_on_files(self) -> OffloadOptimizer:
        if self.on_files and self.ratio not in (None, 1):
            raise ConfigError(
                f'{WHERE}.zero_optimization.{self.key}.ratio: {self.ratio} is not allowed with device="nvme", where all of '
                "the optimizer is updated on the CPU; leave it out"
            )
        return self


class OffloadParam(Offload):
    """Parameters, in the dtype that the model computes in."""

    key = "offload_param"
    _of_files = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")

    buffer_size: Elements | None = None
    """Elements of a buffer; None: the largest shard of a parameter, and 1e8 while a model is built in shards."""
    max_in_cpu: Threshold | None = None
    """Elements that stay in host memory; None: 0. DeepSpeed's own default is 1e9, with which files are rarely used."""


class Aio(Config):
    """How DeepSpeed reads and writes files, with ``device="nvme"``."""

    block_size: Annotated[int, pydantic.Field(ge=_SECTOR)] = 2**20
    """Bytes of one request; a multiple of 512. Tensors below 1 MiB, or below this, stay in memory."""
    queue_depth: PositiveInt = 8
    """Requests that are under way at a time."""
    intra_op_parallelism: PositiveInt = 1
    """Threads that share a tensor."""
    single_submit: bool = False
    """Submit one request at a time."""
    overlap_events: bool = True
    """Submit requests while others are under way."""
    use_gds: Literal[False] = False
    """Only False: GPUDirect Storage is not supported."""

    @pydantic.field_validator("block_size")
    @classmethod
    def _sectors(cls, size: int) -> int:
        if size % _SECTOR:
            raise ConfigError(f"{size} is not allowed, give a multiple of {_SECTOR}")
        return size


def why_not_usable(folder: Path) -> str | None:
    """Return why a folder cannot hold files that are read and written past the page cache; None if it can."""
    if not folder.is_dir():
        return "is no folder, create it on a local disk"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    probe = folder / f".flextrain_probe_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, flags, 0o600))
    except OSError as error:
        return f"is not writable, {error.strerror}"
    try:
        return _why_not_direct(probe)
    finally:
        probe.unlink(missing_ok=True)


def _why_not_direct(probe: Path) -> str | None:
    """Return why DeepSpeed cannot read and write a file past the page cache; it does not look at such errors itself."""
    try:
        file = os.open(probe, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return "is on a file system without direct input and output (O_DIRECT), choose a folder on a local disk"
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwritev(file, [memoryview(page)[:_UNIT]], 0)
    except OSError:
        return f"is on a disk with sectors of more than {_UNIT} bytes, DeepSpeed writes multiples of so many; choose another"
    finally:
        os.close(file)
    return None
