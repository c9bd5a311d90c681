"""A device that flextrain has never heard of: the simulated one under another name."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from flextrain.doctor.machine import Machine
from flextrain.doctor.package_probe import strategy_facts, torch_facts, torch_npu_facts
from flextrain.doctor.report import examine

from .simulated import VARIABLES, NpuWorkers, environment, python

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


@pytest.mark.full
def test_the_example_trains_on_it_as_on_the_cpu(simulated_npu: Path, tmp_path: Path) -> None:
    found = run(tmp_path, *TOY).stdout
    expected = run(tmp_path, "--type", "cpu", "--backend", "gloo", "--package", "torch").stdout
    assert "DDPStrategy on 1 process" in found
    assert "toy" in found
    assert len(losses(found)) > 4
    assert losses(found) == losses(expected)


@pytest.mark.full
def test_the_example_shards_over_two_of_them(simulated_npu: Path, tmp_path: Path) -> None:
    found = run(tmp_path, *TOY, "--strategy", "FSDPStrategy", "--amp", "--autocast", "bfloat16", processes=2).stdout
    assert float(re.findall(r"accuracy: (\d+\.\d+)", found)[-1]) > 80


ENTRY_POINT = """
import sys
from flextrain import DDPStrategy, DeviceSpec
from flextrain.core.device.device import DEVICES
assert "my_package" not in sys.modules
for device in ("toy", None):
    strategy = DDPStrategy(device=device)
    strategy.join()
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


def doctor(**variables: str) -> tuple[dict[str, tuple[bool, str]], list[str]]:
    """What it says of each strategy, and what it found."""
    report = json.loads(python("-m", "flextrain", "doctor", "--json", **variables).stdout)
    strategies = {status["name"]: (status["usable"], status["reason"]) for status in report["strategies"]}
    return strategies, [f"{finding['level']}: {finding['what']}; {finding['advice']}" for finding in report["findings"]]


def asked() -> dict[str, str]:
    """What the doctor concludes from the facts that its questions give in a process with the device."""
    versions = dict(torch="2.15.0", torch_npu="own", deepspeed=None)
    probes = {"torch": torch_facts(), "torch_npu": torch_npu_facts()}
    report = examine(Machine(versions, probes, strategy_facts()["strategies"]))
    return {status.name: status.reason for status in report.strategies if status.usable}


def test_the_doctor_sees_the_simulated_npu(npu1: NpuWorkers) -> None:
    (usable,) = npu1.run(asked)
    assert usable["NPUStrategy"] == usable["FSDPStrategy"] == "on 2 x npu, one per process"


@pytest.mark.full
def test_the_doctors_command_sees_the_simulated_npu(simulated_npu: Path) -> None:
    strategies, _ = doctor()
    assert strategies["NPUStrategy"] == (True, "on 2 x npu, one per process")
    assert strategies["FSDPStrategy"] == (True, "on 2 x npu, one per process")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.deepspeed
@pytest.mark.full
def test_the_doctor_sees_what_deepspeed_lacks_on_an_npu(simulated_npu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    can, text = doctor()[0]["DeepSpeedStrategy"]
    assert can
    assert text.partition(";")[0] == "on npu"  # behind it, what state in files would need of the machine
    monkeypatch.delitem(VARIABLES, "ASCEND_HOME_PATH")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    strategies, found = doctor()
    assert not strategies["DeepSpeedStrategy"][0]
    assert "error: DeepSpeed needs ASCEND_HOME_PATH, which is not set; source CANN's set_env.sh" in found


@pytest.mark.full
def test_the_doctor_sees_a_device_that_nobody_registered(simulated_npu: Path) -> None:
    _, found = doctor(NPU_SIM_TYPE="toy")
    assert any(line.startswith("warning: torch finds a device of type toy, which flextrain") for line in found)
