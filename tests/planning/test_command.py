"""`flextrain plan` from the command line."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from flextrain.cli import main
from flextrain.plan.per_strategy import size_in_bytes
from flextrain.plan.plan import read_plan

from ..waiting import wait_until
from .conftest import PLANS
from .real_runs import SCRIPT


@pytest.mark.processes
def test_one_of_1024_ranks(capsys, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("rich.status.Status.update", lambda self, text: shown.append(str(text)))
    arguments = ["--world-size", "1024", "--nodes", "128", "--strategies", "fsdp", "--json", "--", "mlp"]
    assert main(["plan", SCRIPT, *arguments]) == 0
    captured = capsys.readouterr()
    (tmp_path / "plan.json").write_text(captured.out)
    assert re.fullmatch(r"Planning: fsdp\nfsdp: planned in \d+ s, [\d.]+ .iB at the peak\n", captured.err)
    assert shown[0] == "fsdp: starting a process, 0 s"
    assert len({text.split(",")[0] for text in shown}) > 1, "what the process does now"
    fsdp = read_plan(tmp_path / "plan.json").strategies[0]
    # 1,000 rows on 1,024 processes: each has one row at most, and collectives send 1,024.
    rows = 4 * (1000 * 256 + 1000)
    assert fsdp.whole_parameters == rows + 4 * (256 * 1000 + 256)
    gathered = sum(one.payload for one in fsdp.ranks[0].traffic if one.collective == "reduce_scatter")
    assert gathered == 4 * 4 * (1024 * 256 + 1024 + 1024 * 1000 + 1024)


OWN_AXIS = """
from flextrain import STRATEGIES, Axis, MeshStrategy
from flextrain.strategies.mesh import MeshConfig

class Members(Axis):
    name = "members"
    folds = True

class MembersConfig(MeshConfig):
    members: int = 1

@STRATEGIES.register_module()
class MembersMesh(MeshStrategy):
    Config, axes = MembersConfig, (Members, *MeshStrategy.axes)
    short_names = {"mesh": {}}
"""


@PLANS
@pytest.mark.processes
def test_an_axis_that_the_script_registers(capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{OWN_AXIS}\nimport runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n")
    strategies = "mesh:members2,mesh:foo2"
    assert main(["plan", str(script), "--world-size", "2", "--strategies", strategies, "--json", "--", "mlp"]) == 1
    first, second = json.loads(capsys.readouterr().out)["strategies"]
    assert (first["status"], second["status"]) == ("planned", "refused")
    assert 'strategies: "mesh:foo2" has "foo", choose dp, ' in second["message"]
    assert "members" in second["message"]


NO_CUDA = """
import torch

def called(*_):
    raise SystemExit("CUDA was called")

torch.cuda._lazy_init = called
for name in ("_cuda_init", "_cuda_setDevice", "_cuda_getDevice"):
    if hasattr(torch._C, name):  # wheels without CUDA have none
        setattr(torch._C, name, called)
"""


@pytest.mark.full
@pytest.mark.processes
def test_cuda_is_not_called(capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{NO_CUDA}\nimport runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n")
    strategies = "ddp,fsdp,zero2,zero3,mesh:tp2,mesh:pp2,mesh:cp2"
    arguments = ["--world-size", "8", "--machine", "h100", "--disk", "2GB/s", "--strategies", strategies, "--json"]
    main(["plan", str(script), *arguments, "--", "llama"])
    plans = json.loads(capsys.readouterr().out)["strategies"]
    assert {plan["strategy"]: plan["message"] for plan in plans} == dict.fromkeys(strategies.split(","), "")


@pytest.mark.full
@pytest.mark.processes
def test_a_refused_strategy_is_one_line(capsys):
    assert main(["plan", SCRIPT, "--world-size", "1024", "--strategies", "single", "--json", "--", "mlp"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["strategies"]
    says = 'strategy.type: "SingleDeviceStrategy" runs in one process and 1024 were started'
    assert (found["status"], found["message"][: len(says)]) == ("refused", says)
    assert "\n" not in found["message"]


@pytest.mark.full
@pytest.mark.processes
def test_a_pipeline_is_timed_with_its_schedule(capsys):
    arguments = ["--world-size", "16", "--machine", "h100", "--strategies", "mesh:pp2", "--json"]
    assert main(["plan", SCRIPT, *arguments, "--", "llama", "accumulate"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["strategies"]
    assert found["pipeline"] == {"schedule": "1f1b", "stages_per_process": 1}
    assert [rank["micro_batches"] for rank in found["ranks"]] == [2, 2]
    assert found["fits"] is True  # in the memory of the machine
    # Two micro-batches over two equal stages would wait a third of the time; the last one has the head as well.
    assert 0.3 < found["time"]["waiting"] < 0.5
    assert 0 < found["time"]["computing"] < found["time"]["lower"] < found["time"]["upper"]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_such", "ModuleNotFoundError: No module named 'nothing_such' ({script}:1)"),
        ("x = 1\ndef f(:", "SyntaxError: invalid syntax ({script}:2)"),
        (
            "x = 1",
            "script: script.py makes no FlexibleRunner and has no dict cfg or function config() that returns one",
        ),
    ],
    ids=["fails", "syntax", "none"],
)
def test_a_script_that_makes_no_runner_is_told_once(capsys, tmp_path, text, says):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert main(["plan", str(script), "--world-size", "8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == f"flextrain: {says.format(script=script)}"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"])
def test_a_signal_ends_the_process_that_plans_too(tmp_path, number, status):
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    script.write_text(f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "flextrain", "plan", str(script), "--world-size", "2", "--strategies", "ddp"]
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    ask = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # whoever runs in the background ignores it
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=ask)
    wait_until(lambda: begun.exists() and begun.read_text())
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert said.splitlines() == ["Planning: ddp", *(["flextrain: interrupted"] if number == signal.SIGINT else [])]
    wait_until(lambda: _has_ended(begun.read_text()))
    assert [*folder.glob("flextrain-plan-*")] == []


def _has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("1.5 MB", 1_500_000), ("12B", 12)])
def test_sizes(text, size):
    assert size_in_bytes(text, "plan.device_memory") == size


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--device-memory '80 gigs'", 'plan.device_memory: "80 gigs" is not allowed'),
        ("--device-memory 80", 'plan.device_memory: "80" is not allowed, give a number with a unit'),
        ("--nodes 3", "plan.world_size: 8 with 3 nodes is not allowed, 3 nodes do not share"),
        ("--world-size 0", "plan.world_size: 0 with 1 nodes is not allowed, give 1 or more"),
        ("--strategies ,", "plan.strategies: is empty"),
        ("--strategies ddp,fsdp,ddp", 'plan.strategies: "ddp" is there twice, leave one out'),
        ("--timeout 0", "plan.timeout: 0 is not allowed, give more than 0 seconds"),
        ("--calibrate ddp=1s", "plan.calibrate: has no meaning without a machine, give --machine"),
        ("--machine h100 --calibrate fsd=1s", 'plan.calibrate: "fsd" is not planned, choose ddp or fsdp, did you'),
        (
            "--world-size 24 --machine h100 --nodes 2",
            "plan.nodes: 2 with 12 processes each is not allowed, a node of h100 has 8",
        ),
        ("--world-size 20 --machine h100", "plan.nodes: missing, 20 processes"),
        ("--machine v99", 'plan.machine: "v99" is not known'),
        ("--fit tp --strategies fsdp", "plan.fit: tp was given with --strategies, give one of them"),
        ("--fit-limit 3", "plan.fit_limit: 3 has no effect without --fit, leave it out"),
        ("--fit tp", "plan.fit: what has to fit is not known, give --device-memory"),
        ("--fit tq", 'plan.fit: "tq" is not allowed, choose '),
    ],
)
def test_wrong_arguments_are_one_line_before_anything_is_planned(capsys, arguments, says):
    assert main(["plan", SCRIPT, "--world-size", "8", *shlex.split(arguments)]) == 2
    assert f"flextrain: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--from plan.json train.py", "plan.script: train.py has no effect with --from, the plan is made already"),
        ("--from plan.json --world-size 8", "plan.world_size: 8 has no effect with --from"),
        ("--from plan.json --strategies ddp", "plan.strategies: ddp has no effect with --from"),
        ("train.py", "plan.world_size: missing, give --world-size"),
        ("", "plan.script: missing, give a script, or --from with a saved plan"),
    ],
)
def test_a_script_or_a_saved_plan(capsys, arguments, says):
    assert main(["plan", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"flextrain: {says}")
