"""Parameters that an optimizer gets after set-up: refused where their gradients would be those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, MeshStrategy, OptimWrapper
from flextrain.core.base.errors import StrategyError
from flextrain.core.comm import collectives as dist
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train

pytestmark = pytest.mark.distributed


class Growing(nn.Module):
    """One layer, and another one that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.later: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.later(self.first(x)).pow(2).mean()}


class Stepping(Growing):
    """The same with a ``train_step`` of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        loss = self(**data)["loss"]
        optim_wrapper.update_params(loss)
        return {"loss": loss}


STRATEGIES: dict[str, tuple[type, dict[str, Any]]] = {
    "ddp": (DDPStrategy, {}),
    "fsdp": (FSDPStrategy, {}),
    "mesh": (MeshStrategy, dict(dp_shard=2)),
}
ENGINES = {f"zero{stage}": (DeepSpeedStrategy, dict(zero_optimization=dict(stage=stage))) for stage in (0, 1, 3)}


def grown(
    kind: str, model: type[Growing], into_model: bool, into_optimizer: bool = True, frozen: bool = False
) -> tuple[str, list[float]]:
    """In a worker: what is raised when the optimizer gets a new layer after an update, and its bias in the end."""
    make, options = {**STRATEGIES, **ENGINES}[kind]
    strategy: Any = make(device="cpu", **options)
    strategy.join()
    torch.manual_seed(0)
    called, optim = strategy.setup(model(), OptimWrapper(dict(type="SGD", lr=0.1)))
    assert optim is not None
    torch.manual_seed(1)
    layer = nn.Linear(4, 4).requires_grad_(not frozen)
    windows = [[dict(x=torch.randn(4, 4))] for _ in range(2)]
    try:
        train(strategy, called, optim, windows[:1])  # type: ignore[arg-type]
        if into_model:
            strategy.module.later = layer
        if into_optimizer:
            optim.optimizer.add_param_group(dict(params=[*layer.parameters()]))
        train(strategy, called, optim, windows)  # type: ignore[arg-type]
    except StrategyError as error:
        return str(error), []
    finally:
        strategy.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
    return "", layer.bias.tolist()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_it_is_refused(workers2: WorkerGroup, kind: str) -> None:
    for into_model, name in ((True, "later.weight"), (False, "a parameter that it does not have")):
        found = workers2.run(grown, kind, Growing, into_model)
        expected = f"model: {name} was given to the optimizer after set-up (add_param_group), so its gradients are averaged over no"
        assert [text[: len(expected)] for text, _ in found] == [expected] * 2


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_an_engine_refuses_it(workers2: WorkerGroup, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
    found = workers2.run(grown, f"zero{stage}", Growing, True)
    expected = (
        "model: later.weight was given to the optimizer after set-up (add_param_group), and the engine keeps what it"
    )
    assert [text[: len(expected)] for text, _ in found] == [expected] * 2


def test_a_train_step_of_its_own_averages_it(workers2: WorkerGroup) -> None:
    (first, own), (second, other) = workers2.run(grown, "ddp", Stepping, True)
    assert (first, second) == ("", "")
    assert own == other


@pytest.mark.parametrize("frozen", [False, True])
def test_stage_3_refuses_a_layer_of_no_optimizer(workers2: WorkerGroup, frozen: bool) -> None:
    pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
    found = workers2.run(grown, "zero3", Growing, True, into_optimizer=False, frozen=frozen)
    assert [text for text, _ in found] == [
        "model: later.weight was added when training was set up already, and stage 3 divides all parameters at set-up; make it in the "
        "model's __init__ or in a transform"
    ] * 2
