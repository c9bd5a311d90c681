"""bfloat16 has float32's range: nothing scales the loss, which would show in no loss and no weight, scaled by powers of two."""

from __future__ import annotations

from typing import Any

import pytest

from flextrain import AmpOptimWrapper, OptimWrapper
from flextrain.optim import gradients
from flextrain.testing import WorkerGroup
from flextrain.testing.loop import train
from flextrain.testing.models import TinyTransformer
from flextrain.testing.sessions import started

from ..device import DEVICE

pytestmark = pytest.mark.distributed

SGD = dict(type="SGD", lr=0.02)
ZERO = [dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=stage)) for stage in (1, 2, 3)]


def norm_before_the_update(strategy: dict[str, Any], optim: OptimWrapper) -> tuple[float, dict[str, Any]]:
    """Of the gradients as backward leaves them, and the state of the wrapper after the update."""
    norms: list[float] = []
    with started({**strategy, "device": DEVICE}, optim, TinyTransformer) as session:
        session.optim.register_step_pre_hook(
            lambda wrapper: norms.append(float(gradients.total_norm(gradients.gradients(wrapper.param_groups))))
        )
        # Two micro-batches: gradients may be looked at when all of a window are there, and not before.
        train(session.strategy, session.model, session.optim, [[TinyTransformer.sample(8, seed) for seed in (0, 1)]])
        return norms[0], session.optim.plain_values()


def both(strategy: dict[str, Any]) -> tuple[float, float, dict[str, Any]]:
    expected, _ = norm_before_the_update(strategy, OptimWrapper(SGD))
    found, state = norm_before_the_update(strategy, AmpOptimWrapper(SGD, dtype="bfloat16"))
    return found, expected, state


@pytest.mark.parametrize("strategy", [dict(type="DDPStrategy"), dict(type="FSDPStrategy")], ids=["ddp", "fsdp"])
def test_gradients_are_not_scaled(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    for found, expected, state in workers2.run(both, strategy):
        assert found == pytest.approx(expected, rel=0.02)
        assert state == {}


def reported(strategy: dict[str, Any]) -> tuple[float, float]:
    """The engine's gradient norms in bfloat16 and float32."""
    norms = []
    for optim in (
        AmpOptimWrapper(SGD, dtype="bfloat16", clip_grad=dict(max_norm=1e3)),
        OptimWrapper(SGD, clip_grad=dict(max_norm=1e3)),
    ):
        with started({**strategy, "device": DEVICE}, optim, TinyTransformer) as session:
            trace = train(session.strategy, session.model, session.optim, [[TinyTransformer.sample(8, seed=0)]])
            assert session.optim.plain_values() == {}
            # A scale that the engine divides by itself does not show in the norm.
            assert session.model.optimizer.loss_scale == 1
            norms += trace.grad_norms
    return norms[0], norms[1]  # type: ignore[return-value]


@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", ZERO, ids=["zero1", "zero2", "zero3"])
def test_an_engine_scales_nothing_either(workers2: WorkerGroup, strategy: dict[str, Any]) -> None:
    for found, expected in workers2.run(reported, strategy):
        assert found == pytest.approx(expected, rel=0.02)
