"""Nothing depends on importing a device package, and importing flextrain makes no call into one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.npu

# Every look into it is written down; torch's own at its import, for the entry point, comes before flextrain's.
SPY = """
import sys, types
class Spy(types.ModuleType):
    looks = []
    def __getattribute__(self, name):
        if not name.startswith("__") and name not in ("looks", "_autoload"):
            Spy.looks.append(name)
        return super().__getattribute__(name)
def _autoload():
    pass
sys.modules[__name__].__class__ = Spy
"""
PROGRAM = """
import importlib, pkgutil, sys
import torch
assert "torch_npu" in sys.modules or {alone}
looks = getattr(sys.modules.get("torch_npu"), "looks", [])
del looks[:]
import flextrain
for name in flextrain.__all__:
    getattr(flextrain, name)
for module in pkgutil.walk_packages(flextrain.__path__, "flextrain."):
    # MMEngine imports DeepSpeed, which looks for itself.
    if not module.name.endswith("__main__") and "mmengine" not in module.name:
        importlib.import_module(module.name)
from flextrain import OPTIMIZERS, STRATEGIES, NPUStrategy, OptimWrapper
from flextrain.core.device.device import DEVICES
assert "NpuFusedAdamW" in list(OPTIMIZERS) and "NPUStrategy" in list(STRATEGIES) and "npu" in DEVICES
NPUStrategy(compile_mode="jit", matmul_hf32=True)
OptimWrapper(dict(type="AdamW"))
print("torch_npu" in sys.modules, looks)
"""


@pytest.mark.processes
@pytest.mark.parametrize("autoload", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_importing_flextrain_makes_no_call_into_torch_npu(tmp_path: Path, autoload: str) -> None:
    (tmp_path / "torch_npu.py").write_text(SPY)
    info = tmp_path / "torch_npu-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 9\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(alone=autoload == "0")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == [f"{autoload == '1'} []"], done.stdout + done.stderr
