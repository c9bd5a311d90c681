"""Words of other libraries in errors."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch import nn

from flextrain import HOOKS, ConfigError, FlexibleRunner
from flextrain.cli import main
from flextrain.core.base.registry import NAMES, RUNNER
from flextrain.reference.catalogue import find


def test_they_are_no_names_of_ours_and_mean_one() -> None:
    assert not RUNNER.keys() & inspect.signature(FlexibleRunner.__init__).parameters.keys()
    for word, meant in NAMES.items():
        assert word not in HOOKS
        assert find(meant), word


def test_an_argument_of_another_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks: unknown key, give custom_hooks=\[\.\.\.\]$"):
        FlexibleRunner(nn.Linear(1, 1), str(tmp_path), callbacks=[])  # type: ignore[call-arg]


def test_a_class_of_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r'^hook.type: "ModelCheckpoint" is no known hook, did you mean "CheckpointHook"\?$'
    ):
        HOOKS.build(dict(type="ModelCheckpoint"), "hook")
    assert main(["show", "LightningModule"]) != 0
    assert 'did you mean "BaseModel"?' in capsys.readouterr().err
