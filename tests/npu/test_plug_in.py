"""A device that flextrain has never heard of: the simulated one under another name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .conftest import environment, python

pytestmark = [pytest.mark.npu, pytest.mark.distributed]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "custom_device.py")
TOY = ("--type", "toy", "--backend", "hccl", "--package", "torch_npu")


def run(folder: Path, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = (
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)) if processes > 1 else ()
    )
    done = python(*launcher, EXAMPLE, *arguments, cwd=folder, NPU_SIM_TYPE="toy")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def losses(output: str) -> list[str]:
    return re.findall(r"Epoch\(train\).* loss: (\d+\.\d+)", output)


def test_the_example_trains_on_it_as_on_the_cpu(simulated_npu: Path, tmp_path: Path) -> None:
    found = run(tmp_path, *TOY).stdout
    expected = run(tmp_path, "--type", "cpu", "--backend", "gloo", "--package", "torch").stdout
    assert "DDPStrategy on 1 process" in found
    assert "toy" in found
    assert len(losses(found)) > 4
    assert losses(found) == losses(expected)


def test_the_example_shards_over_two_of_them(simulated_npu: Path, tmp_path: Path) -> None:
    found = run(tmp_path, *TOY, "--strategy", "FSDPStrategy", "--amp", "--autocast", "bfloat16", processes=2).stdout
    assert float(re.findall(r"accuracy: (\d+\.\d+)", found)[-1]) > 80


ENTRY_POINT = """
import sys
from flextrain import DDPStrategy, DeviceSpec
from flextrain.core.device import DEVICES
assert "my_package" not in sys.modules
for device in ("toy", None):
    strategy = DDPStrategy(device=device)
    strategy.setup_environment()
    print(strategy.device, DEVICES["toy"].group_backend)
"""


def test_an_entry_point_is_enough(simulated_npu: Path, tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text(
        "from flextrain import DeviceSpec\nTOY = DeviceSpec('toy', 'hccl', package='torch_npu')\n"
    )
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flextrain.devices]\ntoy = my_package:TOY\n")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = python("-c", ENTRY_POINT, PYTHONPATH=path, NPU_SIM_TYPE="toy")
    assert done.stdout.split() == ["toy:0", "cpu:gloo,toy:hccl"] * 2, done.stderr


def test_the_doctor_sees_the_simulated_npu(simulated_npu: Path) -> None:
    done = python("-m", "flextrain", "doctor", "--json")
    assert '"npu": [' in done.stdout
    assert '"reason": "on 2 x npu"' in done.stdout
