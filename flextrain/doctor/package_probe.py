"""Ask a package for facts about this machine, in a separate process: its import may fail, print, or end the process.

Run as a script with the name of a package, this file prints the facts as one line of JSON after a mark.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

MARK = "flextrain-probe:"
STRATEGIES = "flextrain.strategies"

Facts = dict[str, Any]


def ask(package: str, variables: Mapping[str, str], timeout_s: float) -> Facts:
    """The facts about ``package`` in a process with these environment variables.

    Returns:
        ``{"error": why}`` if the import or a call failed.
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
        return {"error": f"the process was ended by signal {-done.returncode}: {said[-1] if said else 'no message'}"}
    return {"error": said[-1] if said else f"exit status {done.returncode}"}


def torch_facts() -> Facts:
    """The versions with which torch was built, and the devices that it finds."""
    import torch

    devices = {}
    if torch.cuda.is_available():
        devices["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices["mps"] = ["Apple GPU"]
    if torch.xpu.is_available():
        devices["xpu"] = [torch.xpu.get_device_name(i) for i in range(torch.xpu.device_count())]
    # Any other accelerator, which a package added to torch.
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
    """The type of device that DeepSpeed uses, and what it cannot do here."""
    module = importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    # DeepSpeed's first step with a process group; on an NPU it fails here without ASCEND_HOME_PATH.
    accelerator.create_op_builder("ShareMemCommBuilder")
    missing = importlib.import_module("flextrain.strategies.deepspeed.swap_files").what_is_missing()
    notes = [f'offloading to device="nvme" lacks {" and ".join(missing)}'] if missing else []
    return {"version": module.__version__, "accelerator": accelerator.device_name(), "notes": notes}


def package_facts(name: str) -> Facts:
    """The version of a package that a strategy of a third party needs."""
    return {"version": getattr(importlib.import_module(name), "__version__", None)}


def strategy_facts() -> Facts:
    """The declarations of every registered strategy: its short names and its needs."""
    # By absolute name: as a script this file belongs to no package.
    registry = importlib.import_module("flextrain.core.base.registry").STRATEGIES
    needs_nothing = importlib.import_module("flextrain.strategies.config").Needs()
    expanded = registry.short_names()
    found: dict[str, Facts] = {}
    for name in registry:
        try:
            needs = getattr(registry.resolve(name), "needs", needs_nothing)
        except Exception as error:  # an entry point of a third party may fail in any way
            found[name] = {"error": one_line(error)}
            continue
        short = [short for short, meant in expanded.items() if meant["type"] == name]
        found[name] = {"needs": str(needs), "short_names": short, **asdict(needs)}
    return {"strategies": found}


def one_line(error: Exception) -> str:
    """The type and the message of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


PROBES: dict[str, Callable[[], Facts]] = {
    "torch": torch_facts,
    "torch_npu": torch_npu_facts,
    "deepspeed": deepspeed_facts,
    STRATEGIES: strategy_facts,
}

if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).parent):
        del sys.path[0]  # the script's folder comes first, and its modules would hide others of the same name
    sys.path.append(str(Path(__file__).parents[3]))  # the folder of flextrain, if it is not on the path
    asked = sys.argv[1]
    try:
        found = PROBES[asked]() if asked in PROBES else package_facts(asked)
    except Exception as error:  # any error of a package is the answer
        found = {"error": one_line(error)}
    print(f"{MARK}{json.dumps(found)}", flush=True)  # noqa: T201
