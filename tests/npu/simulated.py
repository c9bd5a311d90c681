"""Processes in which torch has a device called npu: the simulated one in sim/.

Registering a device cannot be undone and makes it the one that torch.accelerator finds, so it never happens in this process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

from flextrain.testing import WorkerGroup

T = TypeVar("T")
BUILD_TIMEOUT_S = 400.0  # half a minute on an idle machine
SIMULATED = Path(__file__).parent / "sim"
# DeepSpeed reads the first without asking whether it is set.
VARIABLES = {"ASCEND_HOME_PATH": "/nowhere", "OMP_NUM_THREADS": "1", "FLEXTRAIN_TEST_DEVICE": "npu"}


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that finds the simulated device."""
    path = os.pathsep.join(filter(None, [str(SIMULATED), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **VARIABLES, "PYTHONPATH": path, **more}


def python(
    *arguments: str, timeout_s: float = 120.0, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python of its own that finds the simulated device."""
    command = [sys.executable, *arguments]
    env = environment(**variables)
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)


def built() -> Path:
    """Build the device's library where it is not there yet; return the folder to put on the path. Skips where it cannot be had."""
    if shutil.which("g++") is None:
        pytest.skip("the simulated device needs g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("the simulated device needs Python's headers (python3-dev)")
    if TorchVersion(torch.__version__) < "2.9":
        pytest.skip(f"the simulated device needs c10::DeviceAllocator of torch 2.9, this is {torch.__version__}")
    cache = Path(os.environ.get("NPU_SIM_CACHE", Path(__file__).parents[2] / "build" / "npu_sim"))
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # sessions beside this one would build it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = python("-c", "import torch; print(torch.npu.device_count())", timeout_s=BUILD_TIMEOUT_S)
    assert built.stdout.split()[-1:] == ["2"], f"the simulated device cannot be built\n{built.stdout}{built.stderr}"
    return SIMULATED


def on_host(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """In a worker: what the function returns, with tensors that processes without the device can read."""
    return cast(T, tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*args, **kwargs)))


class NpuWorkers:
    """A WorkerGroup whose processes find the simulated device.

    Args:
        world_size: number of processes; each takes a device of its own.
        variables: further environment variables.
        imports: see WorkerGroup.
    """

    def __init__(
        self, world_size: int, variables: Mapping[str, str] | None = None, imports: Sequence[str] = ()
    ) -> None:
        self.group = WorkerGroup(world_size, timeout_s=240.0, accelerators=True, imports=imports)
        self._variables = {**VARIABLES, "NPU_SIM_DEVICE_COUNT": str(max(2, world_size)), **(variables or {})}

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """See WorkerGroup."""
        with self.visible():
            return self.group.run(on_host, function, *args, **kwargs)

    def close(self) -> None:
        """See WorkerGroup."""
        self.group.close()

    @contextmanager
    def visible(self) -> Iterator[WorkerGroup]:
        """The group, for what calls it itself; its processes take the path and variables of this one."""
        before = dict(os.environ)
        sys.path.insert(0, str(SIMULATED))
        os.environ.update(self._variables)
        try:
            yield self.group
        finally:
            sys.path.remove(str(SIMULATED))
            os.environ.clear()
            os.environ.update(before)
