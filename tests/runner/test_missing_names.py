"""What MMEngine's runner has and this one does not: the error says what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from flextrain import ConfigError
from flextrain.runner.runner_names import INSTEAD

from .training import make_runner

pytestmark = pytest.mark.usefixtures("quick")


def test_names_of_mmengine_say_what_to_use(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    for name, instead in INSTEAD.items():
        assert not hasattr(runner, name)
        with pytest.raises(ConfigError, match="^runner.") as raised:
            getattr(runner, name)
        assert str(raised.value) == f"runner.{name}: is not here, {instead}"


def test_an_error_in_building_a_part_keeps_its_own_words(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer.weight  # noqa: B018 - there is none

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'layer'"):
        _ = make_runner(tmp_path, model=Broken).model
