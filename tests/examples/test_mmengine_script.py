"""A script written for MMEngine's FlexibleRunner runs when its imports are changed, and logs the lines its user knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import forked

SCRIPT = Path(__file__).with_name("mmengine_script.py")
LOG_LINE = re.compile(
    r"\d\d/\d\d \d\d:\d\d:\d\d - flextrain - INFO - Epoch\(train\) +"
    r"\[(?P<epoch>\d+)\]\[(?P<step>[ \d]+)/(?P<steps>\d+)\]  lr: (?P<lr>\d\.\d{4}e[+-]\d\d)  eta: \d:\d\d:\d\d  "
    r"time: \d+\.\d{4}  data_time: \d+\.\d{4}  memory: \d+  loss: \d+\.\d{4}"
)


@pytest.mark.slow
def test_runs_with_other_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    text = SCRIPT.read_text()
    for module, name in (
        ("mmengine.evaluator", "BaseMetric"),
        ("mmengine.model", "BaseModel"),
        ("mmengine.runner._flexible_runner", "FlexibleRunner"),
    ):
        assert f"from {module} import {name}\n" in text
        text = text.replace(f"from {module} import {name}\n", f"from flextrain import {name}\n")
    # Ten epochs show no more than two.
    text = text.replace("max_epochs=10", "max_epochs=2")
    (tmp_path / "script.py").write_text(text)
    monkeypatch.chdir(tmp_path)

    done = forked(tmp_path / "script.py")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [match.groupdict() for line in done.stdout.splitlines() if (match := LOG_LINE.fullmatch(line))]
    places = [(line["epoch"], line["step"], line["steps"]) for line in lines]
    assert places == [("1", "10", "12"), ("2", "10", "12")], done.stdout
    assert lines[0]["lr"] == "3.3333e-04"
    assert re.search(r"Epoch\(val\) +\[2\]\[3/3\] +accuracy: \d+\.\d{4}", done.stdout), done.stdout
