"""What one package can do here, found out in a process of its own: importing it may fail, print, or end the process.

As a script with a package's name it prints the facts as one line of JSON behind a mark; it imports nothing else of flextrain.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MARK = "flextrain-probe:"

Facts = dict[str, Any]


def ask(package: str, variables: Mapping[str, str], timeout_s: float) -> Facts:
    """The facts about ``package`` in a process with these environment variables.

    Returns:
        ``{"error": why}`` where the import or a question failed.
    """
    command = [sys.executable, __file__, package]
    try:
        done = subprocess.run(command, env=dict(variables), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            answer: Facts = json.loads(line.removeprefix(MARK))
            return answer
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return {"error": f"the process was ended by signal {-done.returncode}: {said[-1] if said else 'nothing said'}"}
    return {"error": said[-1] if said else f"exit status {done.returncode}"}


def torch_facts() -> Facts:
    """Versions that torch was built with, and the devices that it finds."""
    import torch

    devices = {}
    if torch.cuda.is_available():
        devices["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices["mps"] = ["Apple GPU"]
    if torch.xpu.is_available():
        devices["xpu"] = [torch.xpu.get_device_name(i) for i in range(torch.xpu.device_count())]
    # Any other, which a package has added to torch.
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None and other.type not in devices:
        devices[other.type] = [f"{other.type}:{i}" for i in range(torch.accelerator.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl(torch),
        "distributed": torch.distributed.is_available(),
        "devices": devices,
    }


def _nccl(torch: Any) -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def torch_npu_facts() -> Facts:
    """The devices that torch_npu finds."""
    module = importlib.import_module("torch_npu")
    count = module.npu.device_count() if module.npu.is_available() else 0
    return {"version": module.__version__, "devices": {"npu": [module.npu.get_device_name(i) for i in range(count)]}}


def deepspeed_facts() -> Facts:
    """Which device DeepSpeed works on."""
    module = importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    # What DeepSpeed does first of all with a process group; on an NPU that is where it misses ASCEND_HOME_PATH.
    accelerator.create_op_builder("ShareMemCommBuilder")
    return {"version": module.__version__, "accelerator": accelerator.device_name()}


PROBES: dict[str, Callable[[], Facts]] = {
    "torch": torch_facts,
    "torch_npu": torch_npu_facts,
    "deepspeed": deepspeed_facts,
}

if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).parent):
        del sys.path[0]  # a script's own folder comes first, and the modules in this one would be taken for others
    try:
        found = PROBES[sys.argv[1]]()
    except Exception as error:  # whatever a package's import raises is the answer
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    print(f"{MARK}{json.dumps(found)}", flush=True)  # noqa: T201
