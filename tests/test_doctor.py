"""flextrain doctor: on this machine, and on set-ups that are made to be broken; torch and DeepSpeed are the real ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flextrain.cli import main
from flextrain.core.base import errors as horovod
from flextrain.doctor.machine import OPTIONAL, REQUIRED, Machine
from flextrain.doctor.package_probe import strategy_facts
from flextrain.doctor.report import INSTALL_CANN, Diagnosis, count_devices, examine

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from flextrain.cli import main
status = main(["doctor", "--json"])
assert "torch" not in sys.modules, "the doctor itself must not import torch"
sys.exit(status)
"""
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
needs_no_torch_npu = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="it is installed")


def doctor(python: str = sys.executable, **variables: str) -> tuple[int, dict[str, Any]]:
    """The exit status and what was printed, in a process of its own with these variables."""
    # Not here, where the folder flextrain is found before the installed package.
    done = subprocess.run(
        [python, "-c", PROGRAM], env={**os.environ, **variables}, cwd="/", capture_output=True, text=True, timeout=300
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def strategies(report: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {status["name"]: (status["usable"], status["reason"]) for status in report["strategies"]}


def said(report: dict[str, Any]) -> list[str]:
    return [f"{finding['level']}: {finding['what']}; {finding['advice']}" for finding in report["findings"]]


def package(folder: Path, name: str, version: str, source: str, metadata: str = "", entry_points: str = "") -> Path:
    """An installed package; its folder is to be put on PYTHONPATH."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


AUTOLOADED = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"


@pytest.fixture
def without_cann(tmp_path: Path) -> str:
    return str(package(tmp_path, "torch_npu", "99.0", NO_CANN, entry_points=AUTOLOADED))


@pytest.mark.full
@pytest.mark.processes
@needs_no_torch_npu
def test_torch_npu_without_cann_keeps_torch_from_being_imported(without_cann: str) -> None:
    importing = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**os.environ, "PYTHONPATH": without_cann}, capture_output=True
    )
    assert importing.returncode, "the set-up is not the broken one that it is meant to be"
    status, report = doctor(PYTHONPATH=without_cann)
    assert status == 1
    (finding,) = [line for line in said(report) if line.startswith("error: import torch fails")]
    assert finding.startswith(
        "error: import torch fails because of torch_npu: ImportError: libhccl.so: cannot open shared object file"
    )
    assert f"{INSTALL_CANN}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without it" in finding
    assert "pip uninstall torch_npu" in finding
    assert not any(usable for usable, _ in strategies(report).values())
    assert report["versions"]["torch_npu"] == "99.0"


@pytest.mark.full
@pytest.mark.processes
@needs_no_torch_npu
def test_the_way_out_works(without_cann: str) -> None:
    _, report = doctor(PYTHONPATH=without_cann, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    found = strategies(report)
    assert found["DDPStrategy"][0]
    assert found["NPUStrategy"] == (
        False,
        "torch_npu cannot be used: ImportError: libhccl.so: cannot open shared object file: No such file or directory",
    )
    assert not any("import torch fails" in line for line in said(report))


@pytest.mark.full
@pytest.mark.processes
@needs_no_torch_npu
def test_a_torch_npu_for_an_older_torch(tmp_path: Path) -> None:
    source = "class npu:\n    is_available = staticmethod(lambda: False)\n__version__ = '2.1.0'\n"
    folder = package(tmp_path, "torch_npu", "2.1.0", source, metadata="Requires-Dist: torch==2.1.0\n")
    status, report = doctor(PYTHONPATH=str(folder))
    version = report["versions"]["torch"]
    release = version.partition("+")[0]
    assert status == 1
    assert (
        f"error: torch_npu 2.1.0 requires torch==2.1.0, but torch {version} is installed; "
        f"pip install torch_npu=={release} if there is one, or torch==2.1.0"
    ) in said(report)


def site_without(folder: Path, *names: str) -> str:
    """All that is installed here, and flextrain, but without these packages; for a Python that has nothing installed."""
    for kind in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(kind)).iterdir():
            left_out = entry.name.startswith((*names, "__editable__", "flextrain")) or entry.suffix == ".pth"
            if not left_out and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    library = folder / "flextrain"
    library.mkdir()
    for entry in (ROOT / "flextrain").iterdir():
        (library / entry.name).symlink_to(entry)
    for layer in ("core", "optim", "strategies", "runner"):
        (library / layer).symlink_to(ROOT / layer)
    return str(folder)


@pytest.fixture
def bare_python() -> str:
    """The interpreter behind this virtual environment, if there is one and it has no torch of its own."""
    base = getattr(sys, "_base_executable", sys.executable)
    has = subprocess.run([base, "-c", "import torch"], capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    if sys.prefix == sys.base_prefix or has.returncode == 0:
        pytest.skip("needs a virtual environment over a Python without torch")
    return str(base)


@pytest.mark.processes
def test_deepspeed_missing(tmp_path: Path, bare_python: str) -> None:
    status, report = doctor(bare_python, PYTHONPATH=site_without(tmp_path, "deepspeed"), CUDA_VISIBLE_DEVICES="")
    assert status == 0
    assert report["versions"]["deepspeed"] is None
    found = strategies(report)
    assert found["DeepSpeedStrategy"] == (False, "deepspeed is not installed: pip install 'flextrain[deepspeed]'")
    assert found["DDPStrategy"][0]


THEIRS = """
from flextrain import DDPStrategy
from flextrain.strategies.config import Needs

class Theirs(DDPStrategy):
    short_names = {"theirs": {}, "theirs-static": {"static_graph": True}}
    needs = Needs(packages={"their_engine": "pip install their-engine"}, others=("patience",))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a third party's strategies, whose engine is not there."""
    points = "[flextrain.strategies]\nTheirs = theirs:Theirs\nBroken = theirs:Missing\n"
    return package(tmp_path_factory.mktemp("theirs"), "theirs", "1.0", THEIRS, entry_points=points)


@pytest.fixture(scope="module")
def without_accelerators(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """The doctor, on a machine without accelerators and compilers: once, because it takes seconds."""
    empty = str(tmp_path_factory.mktemp("empty"))
    bare = dict(PATH=empty, TORCH_EXTENSIONS_DIR=empty)
    bare |= dict(HOROVOD_CYCLE_TIME="1")
    return doctor(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", PYTHONPATH=str(theirs), **bare)


@pytest.mark.processes
@needs_no_torch_npu
def test_a_machine_without_accelerators(without_accelerators: tuple[int, dict[str, Any]]) -> None:
    status, report = without_accelerators
    assert status == 0
    assert [line for line in said(report) if "orovod" in line] == [
        f"warning: no strategy uses Horovod (HOROVOD_CYCLE_TIME is set): {horovod.WHY}; {horovod.INSTEAD}"
    ]
    assert report["broken"] is False
    found = strategies(report)
    assert found["SingleDeviceStrategy"] == (True, "on the CPU")
    assert found["DDPStrategy"] == found["FSDPStrategy"] == (True, "on the CPU, any number of processes")
    usable, reason = found["NPUStrategy"]
    assert not usable
    assert reason.startswith("torch_npu is not installed: pip install 'flextrain[npu]'")
    assert report["versions"]["torch"]
    assert report["versions"]["torch_npu"] is None


@pytest.mark.full
@pytest.mark.processes
@needs_deepspeed
def test_deepspeed_is_asked_where_it_works_and_what_it_lacks(without_accelerators: tuple[int, dict[str, Any]]) -> None:
    usable, reason = strategies(without_accelerators[1])["DeepSpeedStrategy"]
    assert usable
    assert reason.startswith('on cpu; offloading to device="nvme" lacks a C++ compiler (apt-get install g++)')


@pytest.mark.full
@pytest.mark.processes
@needs_no_torch_npu
def test_a_strategy_of_a_third_party_says_what_it_needs(without_accelerators: tuple[int, dict[str, Any]]) -> None:
    _, report = without_accelerators
    (theirs,) = [status for status in report["strategies"] if status["name"] == "Theirs"]
    assert theirs["short_names"] == ["theirs", "theirs-static"]
    assert theirs["needs"] == "torch, their_engine (pip install their-engine), patience"
    assert strategies(report)["Theirs"] == (False, "their_engine is not installed: pip install their-engine")
    usable, reason = strategies(report)["Broken"]
    assert not usable
    assert reason.startswith("it cannot be loaded: AttributeError")


@pytest.mark.full
@pytest.mark.processes
@needs_no_torch_npu
def test_what_appears_is_found(theirs: Path, tmp_path: Path) -> None:
    """A third party's engine, and CANN's version in its folder."""
    package(tmp_path, "their_engine", "2.0", "")
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text("Version=8.2.RC1\ntimestamp=20250101\n")
    path = os.pathsep.join([str(theirs), str(tmp_path)])
    _, report = doctor(PYTHONPATH=path, ASCEND_TOOLKIT_HOME=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert strategies(report)["Theirs"] == (True, "on the CPU")
    assert report["versions"]["their_engine"] == "2.0"
    assert report["versions"]["CANN"] == "8.2.RC1"


@pytest.mark.processes
def test_rich_missing(tmp_path: Path, bare_python: str) -> None:
    path = site_without(tmp_path, "torch", "functorch", "rich")
    done = subprocess.run(
        [bare_python, "-m", "flextrain", "doctor"],
        env={**os.environ, "PYTHONPATH": path}, cwd="/", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "rich: not installed" in lines
    assert "DDPStrategy does not run here: torch cannot be imported; it needs torch" in lines
    assert "error: rich is not installed; pip install 'rich>=13'" in lines


@pytest.mark.processes
def test_torch_missing(tmp_path: Path, bare_python: str) -> None:
    status, report = doctor(bare_python, PYTHONPATH=site_without(tmp_path, "torch", "functorch"))
    assert status == 1
    assert said(report)[0] == "error: torch is not installed; pip install torch, in the build for this machine"
    found = strategies(report)
    assert found["DDPStrategy"] == found["FSDPStrategy"] == (False, "torch cannot be imported")
    assert not any(usable for usable, _ in found.values())


# What follows from what was found, where it cannot be brought about here

HERE = Machine(
    versions={"torch": "2.15.0", "torch_npu": None, "deepspeed": None},
    probes={"torch": {"version": "2.15.0", "cuda": None, "distributed": True, "devices": {}}},
    strategies=strategy_facts()["strategies"],
)


NPU = {**HERE.probes, "torch_npu": {"version": "own", "devices": {"npu": ["Ascend910B"]}}}


def findings(**changes: Any) -> tuple[Diagnosis, list[str]]:
    report = examine(dataclasses.replace(HERE, **changes))
    return report, [f"{finding.level}: {finding.what}; {finding.advice}" for finding in report.findings]


def reasons(report: Diagnosis) -> dict[str, str]:
    return {status.name: status.reason for status in report.strategies}


def test_nothing_to_say() -> None:
    report, lines = findings()
    assert (report.exit_status, lines) == (0, [])


def test_versions_that_are_too_old() -> None:
    report, lines = findings(versions={**HERE.versions, "torch": "2.5.1", "pydantic": "1.10.2"})
    assert lines == [
        "error: torch 2.5.1 is too old for flextrain; pip install 'torch>=2.6'",
        "error: pydantic 1.10.2 is too old for flextrain; pip install 'pydantic>=2.5'",
    ]
    assert report.exit_status == 1


def test_horovod_is_installed() -> None:
    report, lines = findings(horovod="version 0.28.1 is installed")
    assert report.exit_status == 0
    assert lines == [
        f"warning: no strategy uses Horovod (version 0.28.1 is installed): {horovod.WHY}; {horovod.INSTEAD}"
    ]


def test_hardware_that_torch_does_not_see() -> None:
    report, lines = findings(hardware=("nvidia", "davinci"))
    assert lines == [
        "warning: there is an NVIDIA GPU that torch does not find, torch is a build without CUDA; install a matching build of torch",
        "warning: there is an Ascend NPU and torch_npu is not installed; pip install 'flextrain[npu]'",
    ]
    assert report.exit_status == 0


def test_a_machine_that_lacks_a_device_fails_its_check() -> None:
    assert count_devices({"cuda": ["H100"] * 8}, 8) == []
    seven, none = count_devices({"cuda": ["H100"] * 7}, 8), count_devices({}, 8)
    assert [finding.level for finding in (*seven, *none)] == ["error", "error"]
    assert seven[0].what == "torch finds 7 accelerators (7 x cuda) and --devices says 8"
    assert none[0].what == "torch finds 0 accelerators (none) and --devices says 8"


def test_the_command_counts_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flextrain.commands.doctor.diagnose", lambda: Diagnosis({}, {"cuda": ["H100"] * 7}))
    assert main(["doctor", "--json"]) == 0
    assert main(["doctor", "--json", "--devices", "7"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--json", "--devices", "8"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["level"] == "error"


def test_accelerators_are_named() -> None:
    report, _ = findings(
        probes={"torch": {**HERE.probes["torch"], "cuda": "13.2", "devices": {"cuda": ["H100", "H100"]}}}
    )
    assert reasons(report)["SingleDeviceStrategy"] == "on 2 x cuda"
    assert reasons(report)["DDPStrategy"] == "on 2 x cuda, one per process"


def test_deepspeed_on_an_npu_needs_to_know_where_cann_is() -> None:
    _, lines = findings(
        versions={**HERE.versions, "deepspeed": "0.19.8"},
        probes={**HERE.probes, "deepspeed": {"error": "KeyError: 'ASCEND_HOME_PATH'"}},
    )
    assert lines == ["error: DeepSpeed needs ASCEND_HOME_PATH, which is not set; source CANN's set_env.sh"]


def test_what_flextrain_cannot_do_without() -> None:
    report, lines = findings(versions={**HERE.versions, "xxhash": None, "numpy": None, "torchmetrics": None})
    assert lines == [
        "error: numpy is not installed; pip install 'numpy>=1.24'",
        "error: xxhash is not installed; pip install 'xxhash>=3'",
    ]
    assert report.exit_status == 1


@pytest.mark.processes
@pytest.mark.parametrize("name", REQUIRED)
def test_it_starts_where_a_requirement_is_missing(name: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; from flextrain.cli import main; main(['doctor', '--help'])"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True)
    assert done.stdout.startswith("usage: flextrain doctor"), done.stderr


def test_it_knows_the_oldest_versions_that_pyproject_names() -> None:
    needed, _, extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    named = dict(re.findall(r'^    "([a-z]+)>=([0-9.]+)",', needed, flags=re.MULTILINE))
    assert named == REQUIRED
    for name, oldest in OPTIONAL.items():
        assert f'"{name}>={oldest}"' in extras or (oldest == "0" and f'"{name}"' in extras)


def test_a_version_of_a_numbering_of_its_own_is_not_judged() -> None:
    report, lines = findings(versions={**HERE.versions, "torch": "2.9-company-build", "torch_npu": "own"}, probes=NPU)
    assert (report.exit_status, lines) == (0, [])


def test_torchvision_for_another_torch() -> None:
    versions = {**HERE.versions, "torchvision": "0.28.0"}
    assert findings(versions=versions, torchvision_wants="==2.15.0")[1] == []
    report, lines = findings(versions=versions, torchvision_wants="==2.14.0")
    assert lines == [
        "warning: torchvision 0.28.0 requires torch==2.14.0, but torch 2.15.0 is installed; "
        "pip install torch and torchvision together, in one command"
    ]
    assert report.exit_status == 0


def test_a_device_of_another_package() -> None:
    probes = {"torch": {**HERE.probes["torch"], "devices": {"mlu": ["mlu:0", "mlu:1"]}}}
    report, lines = findings(probes=probes)
    assert lines == [
        "warning: torch finds a device of type mlu, which flextrain does not know: flextrain uses the CPU; "
        "call flextrain.register_device, see docs/devices.md"
    ]
    assert reasons(report)["SingleDeviceStrategy"] == "on the CPU"
    report, lines = findings(probes=probes, plug_ins=("mlu",))
    assert lines == []
    assert reasons(report)["SingleDeviceStrategy"] == "on 2 x mlu"


def test_no_command_is_cut_off_on_a_narrow_screen() -> None:
    report, _ = findings()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report)
    assert "'flextrain[deepspeed]'" in console.export_text()


@pytest.mark.parametrize(
    "torch_npu, wants, torch, fits",
    [
        ("2.14.0", "==2.14.0.*", "2.14.0+cpu", True),
        ("2.14.0", "==2.14.0.*", "2.14.1", False),
        ("2.6.0.post1", None, "2.6.0", True),
        ("2.6.0.post1", None, "2.7.0", False),
        ("unknown", None, "2.7.0", True),
    ],
)
def test_torch_npu_and_torch_belong_together(torch_npu: str, wants: str | None, torch: str, fits: bool) -> None:
    report, _ = findings(
        versions={**HERE.versions, "torch": torch, "torch_npu": torch_npu},
        probes={**HERE.probes, "torch_npu": {"version": torch_npu, "devices": {"npu": ["Ascend910B"]}}},
        torch_npu_wants=wants,
    )
    assert report.exit_status == int(not fits)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "machines may join a job (--nnodes MIN:MAX) only under `flextrain run`, or with TORCH_DISABLE_SHARE"),
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "restarts processes, and machines may join and leave"),
    ],
)
def test_restarts_under_torchrun(variables: dict[str, str], says: str) -> None:
    report = examine(HERE, variables)
    assert says in report.restarts
    assert f"restarts: {report.restarts}" in str(report)
    assert report.as_json()["restarts"] == report.restarts
