"""The command behind ``make test-gpu``: it installs nothing, says at once what is missing, and survives what it runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUILD", tmp_path)
    return module


def test_what_is_missing_is_said_in_one_line(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "NEEDED", ("torch", "no_such_one", "pytest", "nor_this"))
    assert run.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "lacks no_such_one, nor_this;" in line


@pytest.mark.processes
def test_the_package_is_found_by_its_path(run: ModuleType, tmp_path: Path) -> None:
    run.link_package()
    code = "import flextrain.core.base.errors, flextrain.strategies, flextrain.runner, flextrain.optim, flextrain.testing; print(flextrain.core.base.errors.__file__)"
    alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=alone, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == str(tmp_path / "flextrain" / "core" / "base" / "errors.py"), found.stderr


@pytest.mark.processes
def test_a_step_that_does_not_end_is_ended(run: ModuleType, tmp_path: Path) -> None:
    assert run.run([sys.executable, "-c", "print('x'); import time; time.sleep(60)"], tmp_path / "log", 1.0) is None
    assert run.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", 20.0) == 3


def test_what_pytest_said_is_read_as_far_as_it_came(run: ModuleType) -> None:
    outcome = run.read(
        "==== test session starts ====\n"
        "tests/gpu/test_a.py::test_one[averaged and scheduled] PASSED   [ 10%]\n"
        "tests/gpu/test_a.py::test_two FAILED [ 20%]\n"
        "tests/gpu/test_a.py::test_three SKIPPED (none here) [ 30%]\n"
        "tests/gpu/test_a.py::test_four "
    )
    assert outcome.counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert outcome.notes == ["ended in tests/gpu/test_a.py::test_four"]


def test_every_file_of_tests_is_a_step(run: ModuleType) -> None:
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {target for target, _ in run.STEPS.values()} == {*files, "benchmarks/gpu.py"}
    assert all((ROOT / target).is_file() for target, _ in run.STEPS.values())
