"""The job files of examples/clusters, as far as they can be read without a cluster; tests/cluster/test_job_files.py runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flextrain.core.base.config import validate
from flextrain.elastic.command_line import read_options
from flextrain.runner.options import Environment, PreemptionOptions, WatchdogOptions

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "clusters"


def test_every_job_file_is_named_in_the_documentation() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    files = sorted(path.name for path in FOLDER.iterdir() if path.is_file())
    assert len(files) == 7
    assert [name for name in files if f"(../examples/clusters/{name})" not in text] == []


def test_what_the_documentation_gives_is_taken() -> None:
    """Keys and values of env_cfg, with the defaults that the text says."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    exec(block, found)
    assert validate(Environment, found["env_cfg"], "env_cfg").preemption == PreemptionOptions(max_time="23:50:00")
    (watchdog,) = re.findall(
        r"env_cfg=(dict\(watchdog=dict\(stall_s=.*?\)\))\)  # the defaults", (ROOT / "docs" / "hangs.md").read_text()
    )
    given = eval(watchdog, {"dict": dict})
    assert validate(Environment, given, "env_cfg").watchdog == WatchdogOptions()
    assert f"| `margin_s` | `{PreemptionOptions().margin_s}` |" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_run.sbatch", "mpi.sh", "ssh.sh"])
def test_scripts_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_pytorchjob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are those of Kubeflow's types, and flextrain run takes its command with what the operator sets."""
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    spec = job["spec"]
    elastic, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert isinstance(spec["nprocPerNode"], str)
    assert elastic["minReplicas"] <= worker["replicas"] == elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]

    program, command, *rest = container["command"]
    assert (program, command) == ("flextrain", "run")
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}")
    monkeypatch.setenv("PET_RDZV_BACKEND", elastic["rdzvBackend"])
    monkeypatch.setenv("PET_MAX_RESTARTS", str(elastic["maxRestarts"]))
    options = read_options(rest)
    assert options.is_elastic
    assert options.for_torchrun() == ["train.py", "--work-dir", "/runs/digits"], "the rest is in the variables"
