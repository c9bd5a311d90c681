"""An axis that is written outside the package trains, evaluates and is saved as the built-in ones are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from flextrain import MeshStrategy
from flextrain.testing import WorkerGroup

from .parity import RECIPES, compare

pytestmark = pytest.mark.distributed
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_axis.py"


def trained(model: str) -> None:
    if "custom_axis" not in sys.modules:
        spec = importlib.util.spec_from_file_location("custom_axis", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["custom_axis"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    example: Any = sys.modules["custom_axis"]

    class DividedDicts(example.DividedBatches):
        def split(self, batch: Any) -> Any:
            return {name: part.tensor_split(self.size)[self.index] for name, part in batch.items()}

    class DividingMesh(example.DividingMesh):
        axes = (DividedDicts, *MeshStrategy.axes)

    compare(dict(type=DividingMesh, divide=2), model, RECIPES["accumulate-clip"])


def test_parity(workers2: WorkerGroup) -> None:
    workers2.run(trained, "plain")
