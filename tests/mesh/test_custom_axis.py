"""An axis that is written outside the package trains, evaluates and is saved as the built-in ones are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flextrain import STRATEGIES, Axis, MeshStrategy
from flextrain.strategies.mesh import MeshConfig
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

from ..device import DEVICE
from .parity import RECIPES, compare, data, started

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


class MembersConfig(MeshConfig):
    members: int = 1


class MembersAxis(Axis):
    name = "members"


class MembersMesh(MeshStrategy):
    Config = MembersConfig
    axes = (MembersAxis, *MeshStrategy.axes)
    short_names: ClassVar[dict[str, Any]] = {"members": {}}


def test_a_size_follows_a_registered_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STRATEGIES, "_modules", dict(STRATEGIES._modules))
    STRATEGIES.register_module(module=MembersMesh)
    found = STRATEGIES.expand("members:dp2xmembers2", "strategy")
    assert found == dict(type="MembersMesh", dp_shard=2, members=2)
    assert STRATEGIES.expand("MembersMesh:members2", "strategy") == dict(type="MembersMesh:members2"), "no short name"


def test_parity(workers2: WorkerGroup) -> None:
    workers2.run(trained, "plain")


def drawn() -> tuple[list[float], float]:
    """In a worker: numbers drawn in updates of an axis whose processes draw apart, and one drawn after them."""
    inside: list[float] = []

    class Members(Axis):
        name = "members"
        folds = True

        def run_window(self, window: Any, step: Any, inner: Any) -> Any:
            for _ in range(2):  # with nothing drawn between them
                with self.own_random_numbers():
                    inside.append(float(torch.rand((), device=DEVICE)))
            return inner(window, step)

    class MembersConfig(MeshConfig):
        members: int = 1

    class MembersMesh(MeshStrategy):
        Config = MembersConfig
        axes = (Members, *MeshStrategy.axes)

    recipe = RECIPES["sgd"]
    torch.manual_seed(5)
    with started(dict(type=MembersMesh, members=2), "plain", recipe) as session:
        torch.manual_seed(5)
        train(session.strategy, session.model, session.optim, data("plain", recipe, 2))
    return inside, float(torch.rand((), device=DEVICE))


def test_own_random_numbers(workers2: WorkerGroup) -> None:
    (one, one_after), (two, two_after) = workers2.run(drawn)
    assert len({*one, *two}) == 2 * 2 * 2
    assert one_after == two_after
