"""AmpOptimWrapper: autocast, loss scaling for float16 alone, and an honest word on skipped updates; all on the CPU."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flextrain.core.base.errors import ConfigError
from flextrain.optim import AmpOptimWrapper, OptimWrapper, build_optim_wrapper
from flextrain.optim.gradients import ModelGroup
from flextrain.strategies import DDPStrategy, SingleDeviceStrategy
from flextrain.testing import WorkerGroup

SGD = dict(type="SGD", lr=0.1)
START = 2.0**16  # torch's first loss scale


class Net(nn.Module):
    """Notes the dtype that its forward computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.computed: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.computed = out.dtype
        return out.float().square().mean()


def prepared(**cfg: Any) -> tuple[Net, AmpOptimWrapper, SingleDeviceStrategy]:
    """A model and its wrapper after a strategy's set-up on the CPU."""
    wrapper = AmpOptimWrapper(**{"optimizer": SGD, **cfg})
    strategy = SingleDeviceStrategy(device="cpu")
    model = Net()
    strategy.setup(model, wrapper)
    return model, wrapper, strategy


def update(model: Net, wrapper: AmpOptimWrapper, times: float = 1.0) -> None:
    with wrapper.optim_context(model):
        loss = model(torch.ones(4, 3))
    wrapper.update_params(loss * times)


@pytest.mark.parametrize(
    "dtype, computed, scaled",
    [("bfloat16", torch.bfloat16, False), ("float16", torch.float16, True), (None, torch.bfloat16, False)],
)
def test_dtypes(dtype: Any, computed: torch.dtype, scaled: bool) -> None:
    model, wrapper, strategy = prepared(dtype=dtype)
    before = model.linear.weight.detach().clone()
    update(model, wrapper)
    assert model.computed is computed
    assert model.linear.weight.dtype is torch.float32
    assert not torch.equal(model.linear.weight, before)
    assert wrapper.last_step.skipped is False
    assert bool(wrapper.plain_values()) is scaled
    assert strategy.precision.compute is computed
    assert (strategy.precision.loss_scale is not None) is scaled
    with strategy.autocast():
        model(torch.ones(1, 3))
    assert model.computed is computed


def test_scaling_changes_no_gradient() -> None:
    _, plain_wrapper, _ = plain = prepared(dtype="bfloat16", clip_grad=dict(max_norm=100.0))
    _, scaled_wrapper, _ = scaled = prepared(dtype="float16", clip_grad=dict(max_norm=100.0))
    for model, wrapper, _ in (plain, scaled):
        update(model, wrapper)
    torch.testing.assert_close(plain_wrapper.last_step.grad_norm, scaled_wrapper.last_step.grad_norm, rtol=0.02, atol=0)
    torch.testing.assert_close(plain[0].linear.weight, scaled[0].linear.weight, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    "optimizer", [SGD, dict(type="AdamW", lr=0.1), dict(type="AdamW", lr=0.1, fused=True)], ids=str
)
@pytest.mark.parametrize("clip_grad", [None, dict(max_norm=1.0)])
def test_an_overflow_skips_the_update_and_halves_the_scale(optimizer: dict[str, Any], clip_grad: Any) -> None:
    model, wrapper, _ = prepared(optimizer=optimizer, dtype="float16", clip_grad=clip_grad)
    update(model, wrapper)
    assert (wrapper.last_step.skipped, wrapper.plain_values()["scaler"]["scale"]) == (False, START)
    before = model.linear.weight.detach().clone()
    update(model, wrapper, times=math.inf)
    assert (wrapper.last_step.skipped, wrapper.plain_values()["scaler"]["scale"]) == (True, START / 2)
    assert torch.equal(model.linear.weight, before)
    assert model.linear.weight.grad is None
    update(model, wrapper)
    assert (wrapper.last_step.skipped, wrapper.plain_values()["scaler"]["scale"]) == (False, START / 2)
    assert not torch.equal(model.linear.weight, before)


def overflows_on_one() -> list[tuple[bool, bool, float]]:
    """In a worker: three updates of processes that hold different parts of a model, of which rank 1 overflows in the second."""
    strategy = DDPStrategy(device="cpu")
    strategy.setup_environment()
    try:
        model, wrapper = Net(), AmpOptimWrapper(SGD, dtype="float16")
        wrapper.attach(strategy.device, lambda: torch.autocast("cpu", torch.float16))
        wrapper.build(model)
        wrapper.spread(ModelGroup(None, (), torch.float32, strategy.device))
        found = []
        for number in range(3):
            before = model.linear.weight.detach().clone()
            update(model, wrapper, times=math.inf if (number, strategy.rank) == (1, 1) else 1.0)
            is_still = torch.equal(model.linear.weight, before)
            found.append((wrapper.last_step.skipped, is_still, wrapper.plain_values()["scaler"]["scale"]))
        return found
    finally:
        strategy.teardown()


@pytest.mark.distributed
def test_an_overflow_of_one_part_of_a_model_skips_the_update_of_all(workers2: WorkerGroup) -> None:
    expected = [(False, False, START), (True, True, START / 2), (False, False, START / 2)]
    assert workers2.run(overflows_on_one) == [expected, expected]


def test_a_fixed_scale_stays() -> None:
    model, wrapper, strategy = prepared(dtype="float16", loss_scale=512)
    assert strategy.precision.loss_scale == 512
    for times, skipped in ((1.0, False), (math.inf, True), (1.0, False)):
        update(model, wrapper, times)
        assert (wrapper.last_step.skipped, wrapper.plain_values()["scaler"]["scale"]) == (skipped, 512.0)


def test_arguments_of_the_scaler() -> None:
    model, wrapper, _ = prepared(
        dtype="float16", loss_scale=dict(init_scale=64.0, growth_interval=2, backoff_factor=0.25)
    )
    scales = []
    for times in (1.0, 1.0, 1.0, math.inf):
        update(model, wrapper, times)
        scales.append(wrapper.plain_values()["scaler"]["scale"])
    assert scales == [64.0, 128.0, 128.0, 32.0]


def test_the_scaler_can_be_asked_for_its_scale() -> None:
    _, wrapper, _ = prepared(dtype="float16", loss_scale=512)
    assert wrapper.loss_scaler is not None
    assert wrapper.loss_scaler.get_scale() == 512
    assert prepared(dtype="bfloat16")[1].loss_scaler is None
    assert AmpOptimWrapper(dict(type="SGD", lr=0.1), dtype="float16").loss_scaler is None  # set-up makes it


def test_the_state_continues_and_is_plain() -> None:
    model, wrapper, _ = prepared(dtype="float16")
    update(model, wrapper, math.inf)
    update(model, wrapper)
    saved = json.dumps(wrapper.plain_values(), allow_nan=False)
    _, other, _ = prepared(dtype="float16")
    other.load_plain_values(json.loads(saved))
    assert other.plain_values() == wrapper.plain_values()
    assert other.plain_values()["scaler"]["_growth_tracker"] == 1


@pytest.mark.parametrize("dtype, warns", [(None, True), ("bfloat16", False)], ids=["chosen", "given"])
def test_float16_does_not_become_another_dtype_unsaid(
    dtype: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved = prepared(dtype="float16")[1].plain_values()
    prepared(dtype=dtype)[1].load_plain_values(saved)
    assert ('in float16 and goes on in torch.bfloat16; dtype="float16" keeps it' in caplog.text) == warns


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_state_without_a_scaler_starts_afresh(dtype: Any) -> None:
    _, wrapper, _ = prepared(dtype=dtype)
    fresh = wrapper.plain_values()
    wrapper.load_plain_values({})
    wrapper.load_plain_values({"scaler": {}})
    assert wrapper.plain_values() == fresh


def test_accumulation_is_scaled_once() -> None:
    model, wrapper, _ = prepared(dtype="float16", accumulative_counts=2)
    plain = Net()
    reference = OptimWrapper(SGD, accumulative_counts=2)
    reference.build(plain)
    for _ in range(4):
        update(model, wrapper)
        with torch.autocast("cpu", torch.float16):
            loss = plain(torch.ones(4, 3))
        reference.update_params(loss)
    torch.testing.assert_close(model.linear.weight, plain.linear.weight, rtol=1e-3, atol=1e-5)


def test_alone_it_finds_the_device_of_the_model() -> None:
    model = Net()
    wrapper = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")
    update(model, wrapper)
    assert model.computed is torch.float16
    update(model, wrapper, math.inf)
    assert wrapper.last_step.skipped


def test_alone_and_without_its_context_losses_are_scaled_all_the_same() -> None:
    model = Net()
    wrapper = AmpOptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")
    wrapper.backward(model(torch.ones(4, 3)))
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.abs().max() > 1000
    assert not wrapper.step().skipped
    assert model.linear.weight.abs().max() < 10


@pytest.mark.parametrize(
    "cfg, message",
    [
        (dict(dtype="float8"), 'dtype: "float8" is not allowed'),
        (dict(dtype="bfloat16", loss_scale=2.0), "loss_scale: has no meaning with bfloat16, which needs no loss scaling"),
        (dict(dtype="float16", loss_scale=0), "loss_scale: 0 is not allowed"),
        (dict(dtype="float16", loss_scale="dynamc"), 'loss_scale: "dynamc" is not allowed'),
        (dict(dtype="float16", loss_scale=dict(init_scal=2.0)), 'loss_scale.init_scal: unknown key, did you mean "init_scale"?'),
        (dict(dtype="float16", loss_scale=dict(init_scale="2")), 'loss_scale.init_scale: "2" is not allowed, give a number'),
    ],
)  # fmt: skip
def test_wrong_configurations(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optim_wrapper(dict(type="AmpOptimWrapper", optimizer=SGD, **cfg))
    assert str(caught.value).startswith(f"optim_wrapper.{message}")


def test_a_loss_scale_without_float16_is_refused_when_the_device_is_known() -> None:
    wrapper = AmpOptimWrapper(SGD, loss_scale=2.0)
    message = "^optim_wrapper.loss_scale: has no meaning with torch.bfloat16, the default on cpu$"
    with pytest.raises(ConfigError, match=message):
        wrapper.attach(torch.device("cpu"), nullcontext)
