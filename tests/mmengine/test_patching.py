"""Scripts that import MMEngine's runners, unchanged."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mmengine.runner
import pytest
from mmengine.registry import RUNNERS
from mmengine.runner.runner import Runner

import flextrain
from flextrain.mmengine import FlexibleRunner, patch, unpatch


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    unpatch()
    assert mmengine.runner.Runner is Runner


def script() -> ModuleType:
    """The script, loaded again as a program would be."""
    spec = importlib.util.spec_from_file_location("patched_script", Path(__file__).with_name("script.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_script_trains_as_before(tmp_path: Path) -> None:
    runner, expected = script().main(str(tmp_path / "theirs"))
    assert type(runner) is Runner
    with patch():
        runner, found = script().main(str(tmp_path / "ours"))
    assert isinstance(runner, FlexibleRunner)
    assert isinstance(runner, flextrain.FlexibleRunner)
    assert found == pytest.approx(expected)
    assert (tmp_path / "ours" / "epoch_3").is_dir()


def test_it_is_undone_and_says_that_it_is_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from mmengine.runner import _flexible_runner

    theirs = _flexible_runner.FlexibleRunner
    with caplog.at_level("WARNING", "flextrain"):
        made = patch()
    assert "flextrain.mmengine.patch() is on" in caplog.text
    assert patch() is made
    assert issubclass(_flexible_runner.FlexibleRunner, FlexibleRunner)
    assert RUNNERS.get("Runner") is mmengine.runner.Runner
    assert issubclass(mmengine.runner.Runner, FlexibleRunner)
    runner = mmengine.runner.Runner(model=dict(type=script().Net), work_dir=str(tmp_path), log_level="WARNING")
    assert "gets flextrain's" in Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    made.undo()
    made.undo()
    assert _flexible_runner.FlexibleRunner is theirs
    assert RUNNERS.get("Runner") is Runner


def test_classes_that_exist_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Runner):
        pass

    with caplog.at_level("WARNING", "flextrain"), patch():
        assert not issubclass(Own, Runner)  # this module's name is flextrain's meanwhile
    assert "Own was derived from MMEngine's runner before" in caplog.text


LATE = """
from mmengine.runner import FlexibleRunner as Flexible, Runner
from mmengine.runner import Runner as Other

class Own(Runner):
    pass
"""


def test_modules_that_are_imported_meanwhile_get_the_originals_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mmengine.runner import _flexible_runner

    theirs = _flexible_runner.FlexibleRunner
    (tmp_path / "imported_late.py").write_text(LATE)
    (tmp_path / "gone_early.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    gone: Any = importlib.import_module("gone_early")
    with patch():
        late: Any = importlib.import_module("imported_late")
        assert issubclass(late.Runner, FlexibleRunner)
        assert issubclass(late.Flexible, FlexibleRunner)
        assert issubclass(gone.Runner, FlexibleRunner)
        del sys.modules["gone_early"]
        gone.Other = int
        caplog.clear()
    del sys.modules["imported_late"]
    for module in (late, gone):
        assert module.Runner is Runner
        assert module.Flexible is theirs
    assert gone.Other is int, "what was given another value meanwhile keeps it"
    assert issubclass(late.Own, FlexibleRunner)
    assert "imported_late.Own was derived from flextrain's runner meanwhile" in caplog.text
