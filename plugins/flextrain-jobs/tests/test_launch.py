"""Job files fit the schemas of those who read them, say what the script says, and start what they should."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from flextrain_jobs import command as launch_command

from flextrain import ConfigError, StrategyError, read_events

jsonschema = pytest.importorskip("jsonschema")
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
ON_KUBERNETES = ("--image", "registry.example.org/train:1", "--volume", "runs:/runs")


SCRIPT = """\
import argparse

from torch import nn, rand
from torch.utils.data import TensorDataset

from flextrain import FlexibleRunner


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, y):
        return {"loss": (self.layer(x) - y).square().mean()}


parser = argparse.ArgumentParser()
parser.add_argument("--work-dir", default="/runs/digits")
parser.add_argument("--note", default="")
given = parser.parse_args()
x = rand(32, 8)
FlexibleRunner(
    model=Net,
    train_dataloader=dict(dataset=TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, collate_fn="default_collate"),
    optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    train_cfg=dict(max_epochs=2),
    default_hooks=dict(logger=dict(interval=2), checkpoint=CHECKPOINT),
    work_dir=given.work_dir,
    experiment_name=given.note or None,
    resume=RESUME,
    strategy=STRATEGY,
    env_cfg=ENV_CFG,
).train()
"""


class Scripts:
    """Writes scripts to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(
        self,
        *,
        resume: str = "True",
        strategy: str = "None",
        env_cfg: str = "{}",
        checkpoint: str = "{}",
        name: str = "train.py",
    ) -> str:
        text = SCRIPT.replace("RESUME", resume).replace("STRATEGY", strategy).replace("CHECKPOINT", checkpoint)
        (self.folder / name).write_text(text.replace("ENV_CFG", env_cfg))
        return name


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """In the folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return Scripts(tmp_path)


def launch(*words: str) -> None:
    """What `flextrain launch` does; errors are raised."""
    import argparse

    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser()
    launch_command.add(parser.add_subparsers())
    given = parser.parse_args(["launch", *words[:end]])
    assert launch_command.run(argparse.Namespace(**vars(given), script_arguments=list(words[end + 1 :]))) == 0


def text_of(*words: str, ending: str = ".yaml") -> str:
    path = Path(f"job{ending}")
    path.unlink(missing_ok=True)
    end = words.index("--") if "--" in words else len(words)
    launch(*words[:end], "--write", str(path), *words[end:])
    return path.read_text()


def check(document: Any, ref: str) -> None:
    jsonschema.Draft202012Validator({**SCHEMAS, "$ref": ref}).validate(document)


def documents(on: str, *words: str) -> list[dict[str, Any]]:
    """What is written for Kubernetes, after the check of its schema."""
    found = list(yaml.safe_load_all(text_of("train.py", "--on", on, *ON_KUBERNETES, *words)))
    for document in found:
        check(document, f"#/$defs/{SCHEMAS['roots'][document['kind']]}")
    return found


def job_set_spec(on: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = found[0]["spec"]
    return spec if on == "jobset" else spec["template"]["spec"]


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("on", ["kubeflow", "jobset"])
def test_kubernetes(scripts: Any, on: str) -> None:
    """Statuses, grace period and probe are those of the script's own preemption and watchdog."""
    scripts.write(env_cfg="dict(watchdog=dict(stall_s=60, first_s=600), preemption=dict(max_time=9000, status=99))")
    words = ("--nodes", "2", "--gpus", "8", "--cpus", "64", "--memory", "512G", "--time", "3d", "--grace", "600")
    found = documents(on, *words, "--max-restarts", "5")
    spec = job_set_spec(on, found)
    assert spec["failurePolicy"]["maxRestarts"] == 5
    taken_away, for_ever = spec["failurePolicy"]["rules"]
    assert taken_away["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (pattern,) = taken_away["onJobFailureMessagePatterns"]
    assert re.search(
        pattern, "Pod default/train-node-0-1-x has condition DisruptionTarget matching FailJob rule at index 0"
    )
    assert not re.search(
        pattern, "Container node for pod default/x failed with exit code 2 matching FailJob rule at index 1"
    )
    assert for_ever["action"] == "FailJobSet"
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2, 99], "the run ends as it wished"
    pod = pod_of(spec)
    assert pod["terminationGracePeriodSeconds"] == 600
    (container,) = pod["containers"]
    assert container["livenessProbe"]["exec"]["command"][-1] == 'test -z "$(find /tmp/alive -mmin +15)"'
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    own = found[-1]["spec"]["trainer"] if on == "kubeflow" else container
    asked = own["resourcesPerNode" if on == "kubeflow" else "resources"]
    assert asked == {
        "limits": {"nvidia.com/gpu": 8, "memory": "512Gi"},
        "requests": {"cpu": "64", "memory": "512Gi"},
    }
    deadline = found[-1]["spec"] if on == "kubeflow" else job
    assert deadline["activeDeadlineSeconds"] == 3 * 86400
    assert "--shutdown-timeout=570 " in own["command"][-1]


def test_a_train_job_has_the_runtime_s_name_and_trainer_s_own_names(scripts: Any) -> None:
    scripts.write()
    runtime, job = documents("kubeflow", "--nodes", "4", "--processes", "2", "--name", "digits")
    assert job["spec"]["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", "kind": runtime["kind"], "name": "digits"}
    assert (job["spec"]["trainer"]["numNodes"], job["spec"]["trainer"]["numProcPerNode"]) == (4, 2)
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert "digits-node-0-0.digits:29400" in job["spec"]["trainer"]["command"][-1], "the name that JobSet gives to pods"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: spec["failurePolicy"].update(restartStrategy="Blocking"),
        lambda spec: spec["failurePolicy"]["rules"][0].update(action="Restart"),
        lambda spec: pod_of(spec)["containers"][0].update(liveness={}),
        lambda spec: pod_of(spec).update(restartPolicy="OnFailure"),
        lambda spec: pod_of(spec)["containers"][0]["livenessProbe"].update(periodSeconds="60"),
    ],
)
def test_the_schema_finds_what_is_wrong(scripts: Any, wrong: Any) -> None:
    scripts.write()
    (job_set,) = documents("jobset")
    wrong(job_set["spec"])
    with pytest.raises(jsonschema.ValidationError):
        check(job_set, f"#/$defs/{SCHEMAS['roots']['JobSet']}")


def test_the_example_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line is the command."""
    pytest.importorskip("sklearn")
    folder = Path(__file__).parents[3] / "examples" / "clusters"
    comment, _, text = (folder / "trainjob.yaml").read_text().partition("\n")
    words = shlex.split(comment.removeprefix("# flextrain launch "))
    monkeypatch.chdir(folder)
    end = words.index("--")
    launch(*words[:end], "--write", str(tmp_path / "job.yaml"), *words[end:])
    assert (tmp_path / "job.yaml").read_text() == text


def test_skypilot(scripts: Any) -> None:
    scripts.write()
    words = ("--on", "skypilot", "--gpus", "H100:8", "--cpus", "16", "--memory", "64Gi", "--volume", "s3://runs:/runs")
    found = yaml.safe_load(text_of("train.py", *words, "--image", "train:1"))
    check(found, "#/skypilot/task")
    assert found["resources"]["accelerators"] == "H100:8"
    assert found["resources"]["memory"] == "64+"
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [143]}
    assert found["file_mounts"] == {"/runs": {"source": "s3://runs", "mode": "MOUNT_CACHED"}}
    scripts.write(env_cfg="dict(preemption=dict(max_time=60))")
    found = yaml.safe_load(text_of("train.py", "--on", "skypilot", "--nodes", "2", "--volume", "runs:/runs"))
    check(found, "#/skypilot/task")
    assert found["volumes"] == {"/runs": "runs"}
    assert found["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}, "143 is also the end of its time"


def test_slurm(scripts: Any) -> None:
    scripts.write()
    words = ("train.py", "--on", "slurm", "--nodes", "2", "--gpus", "h100:4", "--memory", "64Gi", "--time", "90m")
    text = text_of(*words, ending=".sbatch")
    options = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    wanted = {"--nodes=2", "--gpus-per-node=h100:4", "--mem=64G", "--time=90", "--signal=TERM@300", "--requeue"}
    assert wanted <= set(options)
    assert '[[ " 75 143 " ==' in text
    subprocess.run(["bash", "-n", "job.sbatch"], check=True)
    scripts.write(env_cfg="dict(preemption=dict(requeue=True, max_time='slurm'))")
    assert '[[ " 75 " ==' in text_of(*words, ending=".sbatch"), "the run hands the job in itself after a signal"
    scripts.write(env_cfg="dict(preemption=dict(max_time=60, status=99))")
    assert '[[ " 75 143 " ==' in text_of(*words, ending=".sbatch"), "99 is the end of its time"
    scripts.write(resume="False")
    text = text_of(*words, "--max-restarts", "0", ending=".sbatch")
    assert "scontrol requeue" not in text
    assert "#SBATCH --no-requeue" in text


def test_ray(scripts: Any) -> None:
    scripts.write()
    text = text_of("train.py", "--on", "ray", "--nodes", "2", "--gpus", "H100:8", "--cpus", "32", ending=".py")
    compile(text, "job.py", "exec")
    assert (
        'ScalingConfig(num_workers=16, use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 1}, accelerator_type="H100")'
        in text
    )
    assert 'storage_path="/runs/digits/ray"' in text
    with pytest.raises(ConfigError, match='work_dir "x" is relative, and workers of Ray'):
        launch("train.py", "--on", "ray", "--", "--work-dir", "x")


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "0"), "launch.nodes: 0 is not allowed, give 1 or more"),
        (("--gpus", "H100"), 'launch.gpus: "H100" is not allowed, give a number, or KIND:N'),
        (("--gpus", "4", "--processes", "8"), "launch.processes: 8 share 4 GPUs, give one for each, or --gpus 0"),
        (("--gpus", "H100:8"), "launch.on: kubeflow has no use for a kind of --gpus, leave it out"),
        (("--memory", "512MB"), 'launch.memory: "512MB" is not allowed, give whole GiB'),
        (("--time", "1:30"), 'launch.time: "1:30" is not allowed'),
        (("--volume", "runs"), 'launch.volume: "runs" is not allowed, give NAME:/PATH'),
        (("--name", "My_job"), 'launch.name: "My_job" is not allowed'),
        (("--max-restarts", "-1"), "launch.max_restarts: -1 is not allowed, give 0 or more"),
        (("--volume", "Data:/data"), 'launch.volume: "Data:/data" is not allowed, give the name of a claim'),
        (("--volume", "shm:/data"), 'launch.volume: "shm:/data" is not allowed'),
        (("--volume", "s3://runs:/data"), 'launch.volume: "s3://runs:/data" is not allowed'),
        (("--volume", "other:/runs"), "launch.volume: /runs is given 2 times, give another path"),
        (("--grace", "0"), "launch.grace: 0 is not allowed, give 10 or more"),
        (("--", "--work-dir", "work_dirs/x"), 'checkpoints go to "work_dirs/x", which is in no volume (/runs)'),
        (("--", "--work-dir", "/runs2/x"), 'checkpoints go to "/runs2/x", which is in no volume (/runs)'),
        (("--", "--work-dir", "/runs/../x"), 'checkpoints go to "/x", which is in no volume (/runs)'),
        (("--", "--unknown"), "script: train.py ended before it made a FlexibleRunner"),
    ],
)
def test_bad_options(scripts: Any, words: tuple[str, ...], message: str) -> None:
    scripts.write()
    with pytest.raises(ConfigError) as caught:
        launch("train.py", "--on", "kubeflow", *ON_KUBERNETES, *words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ({"resume": "False"}, (), "launch.max_restarts: train.py has resume=False, so that a restart would begin anew"),
        ({"strategy": "'single'"}, ("--nodes", "2"), "SingleDeviceStrategy"),
        (
            {"strategy": "dict(type='ddp', device='cpu')"},
            ("--gpus", "2"),
            "launch.gpus: 2 do not fit the strategy of train.py",
        ),
        ({"strategy": "dict(type='ddp', device='cuda')"}, (), "launch.gpus: 0 do not fit the strategy of train.py"),
        ({"checkpoint": "dict(out_dir='/lost')"}, (), 'checkpoints go to "/lost"'),
        ({"strategy": "dict(type='mesh', tp=3)"}, ("--nodes", "2"), "needs a multiple of 3 processes, not 2"),
        (
            {"env_cfg": "dict(preemption=dict(status=0))"},
            (),
            "a job that was taken away seems to be complete; give 143",
        ),
        ({"env_cfg": "dict(watchdogg=1)"}, (), "watchdog"),
    ],
)
def test_what_the_script_says_does_not_fit(
    scripts: Any, script: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    scripts.write(**script)
    with pytest.raises((ConfigError, StrategyError)) as caught:
        launch("train.py", "--on", "jobset", *ON_KUBERNETES, *words)
    assert message in str(caught.value)
    if "resume" in script:
        (job_set,) = documents("jobset", "--max-restarts", "0")
        assert [rule["action"] for rule in job_set["spec"]["failurePolicy"]["rules"]] == ["FailJobSet"]


def test_names_and_arguments_with_odd_characters(scripts: Any) -> None:
    """The name of the job is made of the script's, and words arrive as they are."""
    scripts.write(name="My train_v2.1.py")
    odd = ("--note", "naïve\n'x' \"y\" $(z): #\t\\")
    (job_set,) = yaml.safe_load_all(text_of("My train_v2.1.py", "--on", "jobset", *ON_KUBERNETES, "--", *odd))
    assert job_set["metadata"]["name"] == "my-train-v2-1"
    command = as_kubernetes(pod_of(job_set["spec"])["containers"][0]["command"], {"z": "wrong"})[-1]
    assert shlex.split(command)[-3:] == ["My train_v2.1.py", *odd]
    text_of("My train_v2.1.py", "--on", "slurm", "--nodes", "2", "--", *odd, ending=".sbatch")
    Path("srun").write_text('#!/bin/bash\nexec "${@:2}"\n')
    Path("python").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    Path("scontrol").write_text("#!/bin/bash\necho first\n")
    for name in ("srun", "python", "scontrol"):
        Path(name).chmod(0o755)
    env = {**os.environ, "PATH": f"{Path.cwd()}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NODEID": "1"}
    done = subprocess.run(["bash", "job.sbatch"], env=env, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said[-3:] == ["My train_v2.1.py", *odd]
    assert {"--rdzv-endpoint=first:29400", "--rdzv-id=7.0"} <= set(said)
    scripts.write(name="2.py")
    with pytest.raises(ConfigError, match=r'launch\.name: "2" is not allowed, give at most 50'):
        launch("2.py", "--on", "slurm")


def test_what_is_printed_is_the_file(scripts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What the script prints goes elsewhere, and nothing is wrapped or replaced."""
    path = Path(scripts.write())
    path.write_text(f"print('hello')\n{path.read_text()}")
    words = ("train.py", "--on", "slurm", "--", "--note", "a\tb " + 200 * "c")
    launch(*words)
    said = capsys.readouterr()
    assert said.out == text_of(*words, ending=".sbatch")
    assert "hello" in said.err


def test_a_configuration_is_trained_by_its_command(scripts: Any) -> None:
    (scripts.folder / "parts.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\nclass Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return {'loss': super().forward(x).sum()}\n"
        "def data():\n    return TensorDataset(torch.rand(8, 4))\n"
    )
    config = {
        "model": {"type": "parts:Net", "in_features": 4, "out_features": 1},
        "train_dataloader": {"dataset": {"type": "parts:data"}, "batch_size": 8, "collate_fn": "default_collate"},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
        "train_cfg": {"max_epochs": 1},
        "work_dir": "/runs/x",
        "resume": True,
    }
    (scripts.folder / "config.yaml").write_text(yaml.safe_dump(config))
    written = text_of("config.yaml", "--on", "slurm", "--", "--cfg-options", "train_cfg.max_epochs=3", ending=".sbatch")
    assert "--module flextrain train config.yaml --cfg-options train_cfg.max_epochs=3\n" in written
    with pytest.raises(ConfigError, match="--strategy is none of its options"):
        launch("config.yaml", "--on", "slurm", "--", "--strategy", "fsdp")


def test_a_bucket_is_not_shared_by_machines(scripts: Any) -> None:
    scripts.write()
    with pytest.raises(ConfigError, match="is a bucket, in which 2 machines see late"):
        launch("train.py", "--on", "skypilot", "--nodes", "2", "--volume", "s3://runs:/runs")


def test_no_file_is_overwritten(scripts: Any) -> None:
    scripts.write()
    for on, name in (("slurm", "train.sbatch"), ("ray", "train_ray.py")):
        launch("train.py", "--on", on, "--write")
        before = Path(name).read_bytes()
        with pytest.raises(ConfigError, match=f"launch.write: {name} exists and nothing is overwritten"):
            launch("train.py", "--on", on, "--write")
        assert Path(name).read_bytes() == before
    with pytest.raises(ConfigError, match=r"launch\.write: none/x cannot be written, No such file or directory"):
        launch("train.py", "--on", "slurm", "--write", "none/x")


# The commands, run as they are written


def as_kubernetes(words: list[str], env: dict[str, str]) -> list[str]:
    """``$(NAME)`` as Kubernetes expands it: known names are replaced, unknown ones stay, ``$$`` is ``$``."""

    def expand(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else env.get(found[1], found[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", expand, word) for word in words]


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def finished(work_dir: Path) -> list[int]:
    return [event["iter"] for event in read_events(work_dir) if event["event"] == "finished"]


NOTE = "it's $(HOSTNAME) $HOME"


@pytest.mark.full
@pytest.mark.processes
def test_the_command_of_a_container(scripts: Any) -> None:
    """Two processes in one pod; what a shell or Kubernetes would replace arrives as it is, and the probe has its file."""
    scripts.write()
    work_dir = scripts.folder / "runs" / "x"
    words = (
        "--volume",
        f"runs:{work_dir.parent}",
        "--processes",
        "2",
        "--max-restarts",
        "0",
        "--",
        "--work-dir",
        str(work_dir),
    )
    (job_set,) = documents("jobset", *words, "--note", NOTE)
    container = pod_of(job_set["spec"])["containers"][0]
    alive = scripts.folder / "alive"
    command = [
        word.replace("/tmp/alive", str(alive)) for word in as_kubernetes(container["command"], {"HOSTNAME": "x"})
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert finished(work_dir) == [4]
    assert [event["processes"] for event in read_events(work_dir) if event["event"] == "launched"] == [2]
    assert any(NOTE in path.read_text() for path in work_dir.rglob("*.log"))
    probe = [word.replace("/tmp/alive", str(alive)) for word in container["livenessProbe"]["exec"]["command"]]
    assert subprocess.run(probe).returncode == 0
    os.utime(alive, (0, 0))
    assert subprocess.run(probe).returncode == 1
    alive.unlink()
    assert subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0, "a machine that has not begun is alive"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("on", ["kubeflow", "skypilot"])
def test_two_machines_find_each_other(scripts: Any, on: str) -> None:
    """The variables are those that pods and machines have; the first one's name is replaced by that of this machine."""
    scripts.write()
    work_dir = scripts.folder / "runs" / "x"
    words = ("--volume", f"runs:{work_dir.parent}", "--nodes", "2", "--", "--work-dir", str(work_dir))
    if on == "kubeflow":
        command = documents(on, *words)[1]["spec"]["trainer"]["command"]
        command = [word.replace("train-node-0-0.train", "localhost") for word in as_kubernetes(command, {})]
    else:
        command = ["bash", "-c", yaml.safe_load(text_of("train.py", "--on", on, *words))["run"]]
    command[-1] = command[-1].replace("29400", str(free_port()))
    of_trainer = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "nowhere",
        "PET_MASTER_PORT": "29500",
    }
    of_sky = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_TASK_ID": "sky-1"}
    started = [
        subprocess.Popen(
            command,
            env=environment(
                **(of_trainer if on == "kubeflow" else of_sky),
                **{name: str(rank) for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")},
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    for process in started:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said[-3000:]
    assert finished(work_dir) == [4]
    (launched,) = [event for event in read_events(work_dir) if event["event"] == "launched"]
    assert (launched["processes"], launched["machines"]) == (2, 2)


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
