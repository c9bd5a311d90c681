"""Processes whose samples use different parameters: as on one device with all samples, or refused before the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.comm import collectives as dist
from flextrain.optim import OptimWrapper
from flextrain.strategies import FSDPStrategy, MeshStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train, windows
from flextrain.testing.models import Batch, SmallModel
from flextrain.testing.sessions import single_device, started, whole_state

pytestmark = pytest.mark.distributed

# The expert that the samples of rank 0 and those of rank 1 go to, in each micro-batch. The third is idle at first, the last
# is always.
ROUTES = ((0, 1), (1, 0), (0, 0), (1, 1), (2, 0), (1, 2), (0, 1), (2, 2))


class Expert(nn.Sequential):
    """A layer that some samples go through."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


class Experts(SmallModel):
    """Samples go to one of four layers, of which two are equal in shape; one that no sample goes to does not compute."""

    widths: Sequence[int] = (5, 5, 7, 3)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList([Expert(width) for width in self.widths])
        self.head = nn.Linear(6, self.num_classes)
        self.double()

    def forward(self, x: Tensor, y: Tensor, route: Tensor, mode: str = "loss") -> Any:
        """See SmallModel."""
        self.route = route
        return super().forward(x, y, mode)

    def logits(self, x: Tensor) -> Tensor:
        """See SmallModel."""
        x = torch.tanh(self.first(x))
        for number, expert in enumerate(self.experts):
            if len(rows := (self.route == number).nonzero()[:, 0]):
                x = x.index_add(0, rows, expert(x[rows]))
        found: Tensor = self.head(x)
        return found


def batches(routes: Sequence[tuple[int, ...]] = ROUTES) -> list[Batch]:
    found = []
    for seed, route in enumerate(routes):
        batch = SmallModel.sample(4 * len(route), seed)
        found.append({"x": batch["x"].double(), "y": batch["y"], "route": torch.tensor(route).repeat_interleave(4)})
    return found


def wrapper(accumulate: int = 1) -> OptimWrapper:
    return OptimWrapper(dict(type="AdamW", lr=1e-2, weight_decay=0.1), accumulate, dict(max_norm=0.5))


def trained(session: Any, accumulate: int) -> tuple[Any, dict[str, Any]]:
    trace = train(session.strategy, session.model, session.optim, windows(batches(), accumulate))
    return trace, whole_state(session.strategy)


def difference(spec: dict[str, Any], accumulate: int) -> float:
    """How far losses, norms, weights and the optimizer's state, all of it in float64, are from those of one device."""
    with single_device(wrapper(accumulate), Experts) as session:
        expected, state = trained(session, accumulate)
    with started(spec, wrapper(accumulate), Experts) as session:
        found, own = trained(session, accumulate)
    assert own.keys() == state.keys(), own.keys() ^ state.keys()
    pairs = [*zip(found.losses, expected.losses, strict=True), *zip(found.grad_norms, expected.grad_norms, strict=True)]
    pairs += [(own[key], value) for key, value in state.items() if "optim.group" not in key]
    return max(float((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max()) for a, b in pairs)


FSDP: dict[str, Any] = dict(type=FSDPStrategy, device="cpu")
MESH: dict[str, Any] = dict(type=MeshStrategy, device="cpu")
UNITS = dict(wrap=["Expert"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(FSDP, id="fsdp"),
        pytest.param(FSDP | UNITS, id="units"),
        pytest.param(MESH | dict(dp_replicate=2), id="dp_replicate"),
    ],
)
def test_as_one_device(workers2: WorkerGroup, spec: dict[str, Any], accumulate: int) -> None:
    assert max(workers2.run(difference, spec, accumulate)) < 1e-12
