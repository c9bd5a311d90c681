"""The command behind ``make test-gpu``: it installs nothing, says at once what is missing, and survives what it runs."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.tags import sys_tags

from .waiting import wait_until

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "gpu" / "run.py"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    module.BUILD.mkdir()
    return module


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    """Write a wheel with one module, which holds its version."""

    def write(name: str, version: str, *requires: str, tags: str = "py3-none-any", python: str = ">=3.8") -> Path:
        path = tmp_path / "wheels" / f"{name}-{version}-{tags}.whl"
        path.parent.mkdir(exist_ok=True)
        said = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
        said += [f"Requires-Dist: {each}" for each in requires]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}.py", f"version = '{version}'")
            archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(said) + "\n")
        return path

    return write


def test_what_is_missing_is_said_in_one_line(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.bundle, "needed", lambda: ["torch>=2", "no_such_one", "pytest>=1", "numpy>=999"])
    assert run.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "lacks no_such_one, numpy>=999; give --wheels" in line


def test_what_is_needed_is_what_the_project_says(run: ModuleType) -> None:
    names = [text.partition(">")[0] for text in run.bundle.needed()]
    assert {"torch", "pydantic", "xxhash", "tomli", "pytest"} <= set(names)


def test_what_the_interpreter_lacks_is_unpacked(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Callable[..., Path]
) -> None:
    """The newest that fits, with what it needs itself; what is there stays as it is."""
    (own, *_) = (tag for tag in sys_tags() if tag.abi.startswith("cp"))
    wheel("lacking_one", "1.0", tags=str(own))
    wheel(
        "lacking_one", "2.0", "lacking_two==3.1", "tomli; python_version < '3'", "pytest; extra == 'x'", tags=str(own)
    )
    wheel("lacking_one", "3.0", tags="cp36-cp36m-win32")
    wheel("lacking_one", "4.0", python=">=9")
    wheel("lacking_two", "3.1")
    wheel("lacking_two", "3.2")
    wheel("numpy", "999.0")
    monkeypatch.setattr(run.bundle, "needed", lambda: ["lacking_one>=1", "numpy>=1", "nowhere>=5"])
    assert run.bundle.unpack(tmp_path / "wheels", tmp_path / "into") == ["nowhere>=5"]
    found = {path.stem: path.read_text() for path in (tmp_path / "into").glob("*.py")}
    assert found == {"lacking_one": "version = '2.0'", "lacking_two": "version = '3.1'"}


def test_packaging_itself_may_come_from_a_wheel(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Callable[..., Path]
) -> None:
    monkeypatch.setattr(run.bundle.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run.bundle, "needed", list)
    assert run.bundle.unpack(None, tmp_path / "into") == ["packaging"]
    path = wheel("packaging", "26.0")
    assert run.bundle.unpack(path.parent, tmp_path / "into") == []
    assert sys.path[-1] == str(path)


@pytest.mark.processes
def test_the_package_is_found_by_its_path(run: ModuleType) -> None:
    run.link_package()
    code = "import flextrain.core.base.errors, flextrain.strategies, flextrain.runner, flextrain.optim, flextrain.testing; print(flextrain.core.base.errors.__file__)"
    alone = {**os.environ, "PYTHONPATH": str(run.BUILD)}
    found = subprocess.run([sys.executable, "-c", code], env=alone, cwd=run.BUILD, capture_output=True, text=True)
    assert found.stdout.strip() == str(run.BUILD / "flextrain" / "core" / "base" / "errors.py"), found.stderr


@pytest.mark.processes
def test_a_command_that_does_not_end_is_ended(run: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    code = "print('x'); import time; time.sleep(600)"
    assert run.run([sys.executable, "-c", code], tmp_path / "log", 3.0, take=said.append) is None
    assert said == ["x"]
    assert run.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", 60.0) == 3


# Tests of which one does not end.
TESTS = """
import os, sys, time, pytest

def test_passes():
    assert not {"", os.getcwd()} & set(sys.path)  # the folder flextrain there is a part of the package

def test_fails():
    assert 1 + 1 == 3, "arithmetic"

@pytest.mark.skip(reason="no such thing")
def test_is_left_out():
    pass

def test_does_not_end(tmp_path):
    print("begun", os.getpid(), flush=True)
    time.sleep(600)

def test_is_never_run():
    pass
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run
run.BUILD = Path(sys.argv[2])
run.STEPS = {"odd": (str(run.BUILD / "test_odd.py"), 400.0), "next": ("tests/gpu/test_device.py", 90.0)}
sys.exit(run.main(["--steps", "odd", "next", "--report", *sys.argv[3:], "-p", "tests.gpu.conftest"]))
"""


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """``started(*arguments)`` begins run.py over ``TESTS``, and returns the process and its report."""
    (tmp_path / "test_odd.py").write_text(TESTS)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], Path]:
        report = tmp_path / "report.md"
        command = [sys.executable, "-c", DRIVER, str(SCRIPT.parent), str(tmp_path), str(report), *arguments]
        environ = {**os.environ, "FLEXTRAIN_TEST_DEVICE": "cpu", "PYTHONPATH": str(tmp_path)}
        begun.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return begun[-1], report

    yield start
    for process in begun:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.processes
def test_the_report_is_whole_when_the_process_is_killed(started: Any, tmp_path: Path) -> None:
    process, report = started("--seconds", "500", "-s")
    wait_until(lambda: report.exists() and "under way: " in report.read_text(), 120)
    wait_until(lambda: "test_does_not_end" in report.read_text().partition("under way: ")[2], 120)
    log = tmp_path / "odd.log"
    wait_until(lambda: "begun " in log.read_text(), 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    text = report.read_text()
    assert "| odd | 1 | 1 | 1 | " in text
    assert "| under way, 2 of 5 not run |" in text
    for line in ("passed, ", "failed, ", "`test_is_left_out: no such thing`", "AssertionError: arithmetic"):
        assert line in text
    pid = int(log.read_text().partition("begun ")[2].split()[0])
    wait_until(lambda: not is_alive(pid), 30)  # nobody would end it


@pytest.mark.processes
def test_it_ends_by_itself_and_says_where(started: Any) -> None:
    process, report = started("--seconds", "30")
    said, _ = process.communicate(timeout=170)
    assert process.returncode == 1
    text = report.read_text()
    if "test_fails" in text:  # a busy machine may come no further than the imports
        assert "its limit, in test_does_not_end, 2 of 5 not run |" in text
        assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == [
            "passed",
            "failed",
            "skipped",
        ]
    assert "| next | 0 | 0 | 0 | 0 | not begun, the time is over |" in text


def test_a_report_becomes_a_table_of_the_page(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = tmp_path / "benchmarks.md", tmp_path / "results"
    results.mkdir()
    page.write_text("before\n<!-- accelerators begin -->\nnone yet\n<!-- accelerators end -->\nafter\n")
    monkeypatch.setattr(run, "PAGE", page)
    monkeypatch.setattr(run, "RESULTS", results)
    for name, passed in (("8 x NVIDIA H200", "ok"), ("1 x AMD MI300", "FAILED"), ("1 x AMD MI300", "ok")):
        report = run.Report(tmp_path / "out" / "report.md", f"Tests on cuda: {name}", "torch 2.11.0, Linux")
        report.path.parent.mkdir(exist_ok=True)
        report.steps += [run.Step("device", tests={"test_a": ("passed", 1.0)}, verdict=passed)]
        report.write()
        for figures in ("gpu_figures.json", "llama_figures.md"):
            (report.path.parent / figures).write_text("{}")
        assert run.main(["--record", str(report.path)]) == 0
    names = {path.name for path in results.iterdir()}
    figures = {"gpu_figures.json", "llama_figures.md"}
    assert names == {"tests_cuda-8-x-nvidia-h200.md", "tests_cuda-1-x-amd-mi300.md", *figures}
    text = page.read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter\n")
    assert "none yet" not in text
    assert text.count("| device | 1 | 0 | 0 | 0 | ok |") == 2
    assert (
        "cuda: 8 x NVIDIA H200, torch 2.11.0, Linux ([report](../benchmarks/results/tests_cuda-8-x-nvidia-h200.md))."
        in text
    )
    assert "## device" not in text


def test_every_file_of_tests_is_a_step(run: ModuleType) -> None:
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {target for target, _ in run.STEPS.values() if target.startswith("tests/")} == files
    assert all((ROOT / target).is_file() for target, _ in run.STEPS.values())
    assert "<!-- accelerators begin -->" in run.PAGE.read_text()
