"""Processes of one machine that see one device each, as Slurm's --gpus-per-task=1 and Kubernetes show them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .simulated import SIMULATED, python
from .test_strategies import FSDP, NPU, zero
from .training import train, train_on_cpu

pytestmark = [pytest.mark.npu, pytest.mark.distributed]


_VISIBLE = """import os, sys
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = sys.argv[3].split(",")[int(os.environ["LOCAL_RANK"])]
from tests.npu.test_one_visible import main
main(*sys.argv[1:3])
"""


def main(folder: str, strategy: str) -> None:
    """In a process of the job: train, and write down the losses, the devices, and LOCAL_RANK afterwards."""
    losses, devices = train(Path(folder), json.loads(strategy))
    local_rank = os.environ["LOCAL_RANK"]
    Path(folder, f"{local_rank}.json").write_text(json.dumps([losses, sorted(devices), local_rank]))


def launched(folder: Path, strategy: Any, visible: str) -> subprocess.CompletedProcess[str]:
    """Two processes of torchrun, and in ``visible`` the device that each of them sees."""
    script = folder / "script.py"
    script.write_text(_VISIBLE)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    root = str(Path(__file__).parents[2])
    return python(*torchrun, str(script), str(folder), json.dumps(strategy), visible, PYTHONPATH=f"{SIMULATED}:{root}")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(NPU, id="npu", marks=pytest.mark.full),
        pytest.param(FSDP, id="fsdp", marks=pytest.mark.full),
        pytest.param(*zero(2).values, id="zero2", marks=[*zero(2).marks, pytest.mark.full]),
    ],
)
def test_each_takes_the_one_that_it_sees(simulated_npu: Path, tmp_path: Path, strategy: Any) -> None:
    ended = launched(tmp_path, strategy, "0,1")
    assert ended.returncode == 0, ended.stderr
    expected = train_on_cpu(tmp_path / "cpu")
    for rank in "01":
        losses, devices, local_rank = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (devices, local_rank) == (["npu"], rank)
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_device_of_two_processes_is_named(simulated_npu: Path, tmp_path: Path) -> None:
    ended = launched(tmp_path, NPU, "1,1")
    assert ended.returncode == 1
    assert (
        "StrategyError: strategy.device: ranks 0 and 1 have the same npu device (chip 1), start one process per device; to let "
        "processes share one, name a strategy.backend that can"
    ) in ended.stderr


@pytest.mark.full
def test_processes_share_a_device_on_request(simulated_npu: Path, tmp_path: Path) -> None:
    ended = launched(tmp_path, {**NPU, "backend": "hccl"}, "1,1")
    assert ended.returncode == 0, ended.stderr
    losses, devices, _ = json.loads((tmp_path / "1.json").read_text())
    assert devices == ["npu"]
    assert losses == pytest.approx(train_on_cpu(tmp_path / "cpu"), rel=1e-5)


def test_groups_are_left_on_the_device_of_the_process(simulated_npu: Path) -> None:
    """At exit a thread leaves them, and every thread begins with device 0."""
    ended = python(
        "-c",
        "import torch\n"
        "from flextrain.core.comm import collectives\n"
        "collectives.destroy_process_group = lambda: print('left on', torch.npu.current_device(), flush=True)\n"
        "collectives.leave_at_exit(torch.device('npu', 1))\n",
    )
    assert ended.stdout.splitlines() == ["left on 1"], ended.stderr
