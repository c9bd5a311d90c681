"""The job files of examples/clusters, as far as they can be read without a cluster; tests/cluster/test_job_files.py runs them."""

from __future__ import annotations

import re
import shlex
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


def test_trainjob(monkeypatch: pytest.MonkeyPatch) -> None:
    """flextrain run takes its command with what Kubeflow Trainer sets; the plug-in's tests compare it with schemas."""
    yaml = pytest.importorskip("yaml")
    runtime, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]

    shell, option, text = trainer["command"]
    assert (shell, option) == ("sh", "-c")
    said = text.removeprefix("exec ").replace("\\\n", " ").replace("$$((JOB_COMPLETION_INDEX == 0))", "0")
    program, command, *rest = shlex.split(said)
    assert (program, command) == ("flextrain", "run")
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("PET_NNODES", str(trainer["numNodes"]))
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "digits-node-0-0.digits")
    options = read_options(rest)
    assert options.is_elastic
    assert (options.script, options.arguments) == ("train.py", ["--work-dir", "/runs/digits"])
    assert options.given["--rdzv-endpoint"] == "digits-node-0-0.digits:29400"
    assert "--rdzv-backend=c10d" in options.for_torchrun(), "also where the variables would mean static"
