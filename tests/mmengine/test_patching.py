"""Scripts that import MMEngine's runners, unchanged."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
    logging.getLogger("flextrain").propagate = True
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

    logging.getLogger("flextrain").propagate = True
    with caplog.at_level("WARNING", "flextrain"), patch():
        assert not issubclass(Own, Runner)  # this module's name is flextrain's meanwhile
    assert "Own was derived from MMEngine's runner before" in caplog.text
