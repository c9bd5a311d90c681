"""float16 under a loss scale: every strategy makes the losses that a single device makes, and skips the same updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain import AmpOptimWrapper
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_numbers
from flextrain.testing.loop import Trace, train, windows
from flextrain.testing.models import Batch, Mlp, SmallModel, TinyTransformer
from flextrain.testing.sessions import run, single_device, started, whole_model

from ..device import DEVICE

pytestmark = pytest.mark.distributed

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": dict(type="DDPStrategy"),
    "fsdp": dict(type="FSDPStrategy"),
    "fsdp-units": dict(type="FSDPStrategy", wrap=["Linear"], reshard_after_forward=True),
    "fsdp-hybrid": dict(type="FSDPStrategy", replicate_size=2),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum-foreach": dict(type="SGD", lr=0.02, momentum=0.9, foreach=True),
    "adamw-fused": dict(type="AdamW", lr=2e-3, fused=True),
}
UPDATES = 30
# As for bfloat16 in test_parity.py, with the 11 bits that float16 keeps: four roundings by 2^-12.
FLOAT16 = 2.0**-10
SCALE = 256.0


def wrapper(**options: Any) -> AmpOptimWrapper:
    # Small enough that no gradient overflows by itself: with half of the batch on each process, they would elsewhere.
    return AmpOptimWrapper(dtype="float16", loss_scale=dict(init_scale=SCALE), **options)


def compare(strategy: dict[str, Any], model: type[SmallModel], options: dict[str, Any]) -> Trace:
    """In a worker: train under the strategy and alone, and hold one against the other."""
    epoch = windows([model.sample(8, seed) for seed in range(6)], options.get("accumulative_counts", 1))
    data = (epoch * UPDATES)[:UPDATES]
    with single_device(wrapper(**options), model, device=DEVICE) as single:
        before = whole_model(single.strategy)
        expected = train(single.strategy, single.model, single.optim, data)
        weights = whole_model(single.strategy)
    with started({**strategy, "device": DEVICE}, wrapper(**options), model) as session:
        found = train(session.strategy, session.model, session.optim, data)
        found_weights = whole_model(session.strategy)
    same_numbers(found.losses, expected.losses, "the loss", FLOAT16)
    same_numbers(found.grad_norms, expected.grad_norms, "the gradient norm", FLOAT16)
    for key, value in weights.items():
        way, off = (float(torch.dist(value.double(), other[key].double())) for other in (before, found_weights))
        assert off <= FLOAT16 * way, f"{key}: off by {off:.2e}, it went {way:.2e}"
    return found


@pytest.mark.parametrize("model", [Mlp, TinyTransformer])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parity(workers2: WorkerGroup, strategy: str, model: type[SmallModel]) -> None:
    options = dict(optimizer=OPTIMIZERS["momentum-foreach"], clip_grad=dict(max_norm=0.1), accumulative_counts=4)
    first, second = workers2.run(compare, STRATEGIES[strategy], model, options)
    assert first == second
    assert first.skipped == [False] * UPDATES
    assert sum(first.losses[-10:]) < sum(first.losses[:10])


class Strained(Mlp):
    """``strain`` (batch, 2) is added to the loss times the scalar, and times a row that one process alone may have."""

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss", strain: Tensor | None = None) -> Any:
        result = super().forward(x, y, mode)
        if mode == "loss" and strain is not None:
            scalar, row = strain.mean(0)
            # Called, not looked at: a unit has its parameters during its forward only.
            result["loss"] = result["loss"] + self.temperature * scalar + self.layers[0](torch.ones_like(x))[0, 0] * row
        return result


def strained_batches(kind: int) -> list[list[Batch]]:
    """Four windows of two; a sample of the second window's first batch and one of the last's make a gradient overflow."""
    batches = [{**Strained.sample(8, seed), "strain": torch.zeros(8, 2)} for seed in range(8)]
    batches[2]["strain"][1, kind] = torch.inf
    batches[7]["strain"][6, kind] = -torch.inf
    return windows(batches, 2)


def overflow(strategy: dict[str, Any] | None, optimizer: dict[str, Any], kind: int) -> tuple[Any, ...]:
    """In a worker: which updates were skipped, which of them left all weights as they were, and the scale at the end."""
    made = wrapper(optimizer=optimizer, accumulative_counts=2, clip_grad=dict(max_norm=10.0))
    alone = single_device(made, Strained, device=DEVICE)
    with alone if strategy is None else started({**strategy, "device": DEVICE}, made, Strained) as session:
        found = run(session, strained_batches(kind))
        pairs = zip(found.weights, found.weights[1:], strict=False)
        still = [all(torch.equal(old[key], new[key]) for key in old) for old, new in pairs]
        return found.trace.skipped, still, session.optim.plain_values()["scaler"]["scale"], found.weights[-1]


def alone_and_together(strategy: dict[str, Any], optimizer: dict[str, Any], kind: int) -> tuple[Any, Any]:
    return overflow(strategy, optimizer, kind), overflow(None, optimizer, kind)


@pytest.mark.parametrize("where", ["scalar", "row"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_is_skipped_on_all_processes(
    workers2: WorkerGroup, strategy: str, optimizer: str, where: str
) -> None:
    kind = ["scalar", "row"].index(where)
    for found, expected in workers2.run(alone_and_together, STRATEGIES[strategy], OPTIMIZERS[optimizer], kind):
        skipped, still, scale, weights = found
        assert skipped == still == [False, True, False, True]
        assert scale == SCALE / 4
        assert found[:3] == expected[:3]
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[3][key], rtol=FLOAT16, atol=1e-4, msg=key)
