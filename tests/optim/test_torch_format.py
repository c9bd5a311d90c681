"""OptimWrapper.state_dict without a runner: the optimizer's own state, in torch's format, or an error that says where it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain import (
    AmpOptimWrapper,
    CheckpointError,
    ConfigError,
    FlexibleRunner,
    OptimWrapper,
    OptimWrapperDict,
    StrategyError,
)
from flextrain.strategies import SingleDeviceStrategy
from flextrain.testing import WorkerGroup
from flextrain.testing.models import Mlp
from flextrain.testing.sessions import started

ADAMW = dict(type="AdamW", lr=0.1)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def alone(kind: Any = OptimWrapper, model: nn.Module | None = None, **cfg: Any) -> tuple[nn.Module, OptimWrapper]:
    model = model or net()
    return model, kind(torch.optim.AdamW(model.parameters(), lr=0.1), **cfg)


def train(model: nn.Module, wrapper: OptimWrapper, updates: range) -> None:
    for update in updates:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(update))
        with wrapper.optim_context(model):
            loss = model(x).float().square().mean()
        wrapper.update_params(loss)


@pytest.mark.parametrize(
    "kind, cfg",
    [(OptimWrapper, {}), (AmpOptimWrapper, dict(dtype="float16")), (AmpOptimWrapper, dict(dtype="bfloat16"))],
    ids=["float32", "float16", "bfloat16"],
)
def test_a_loop_of_ones_own_continues_exactly(tmp_path: Path, kind: Any, cfg: dict[str, Any]) -> None:
    model, wrapper = alone(kind, **cfg)
    train(model, wrapper, range(2))
    torch.save(dict(model=model.state_dict(), optim=wrapper.state_dict()), tmp_path / "mine.pth")
    train(model, wrapper, range(2, 4))

    resumed, own = alone(kind, **cfg)
    saved = torch.load(tmp_path / "mine.pth", weights_only=True)
    resumed.load_state_dict(saved["model"])
    own.load_state_dict(saved["optim"])
    train(resumed, own, range(2, 4))
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_the_format_is_torchs_and_the_scale_is_beside_it() -> None:
    model, wrapper = alone(AmpOptimWrapper, dtype="float16", loss_scale=dict(init_scale=512.0))
    train(model, wrapper, range(1))
    state = wrapper.state_dict()
    assert state.pop("loss_scaler")["scale"] == 512.0
    assert state.keys() == wrapper.optimizer.state_dict().keys()
    assert float(state["state"][0]["step"]) == 1.0


def test_states_of_torch_and_of_mmengine_are_loaded() -> None:
    model, wrapper = alone()
    train(model, wrapper, range(2))
    packed = copy.deepcopy(wrapper.optimizer.state_dict())
    for given in (packed, {**packed, "base_param_settings": {"lr": 0.1}, "loss_scaler": {"scale": 2.0}}):
        _, other = alone()
        other.load_state_dict(given)
        assert torch.equal(other.optimizer.state_dict()["state"][0]["exp_avg"], packed["state"][0]["exp_avg"])


def test_a_scale_that_is_loaded_before_the_first_forward_is_used() -> None:
    model, wrapper = alone(AmpOptimWrapper, dtype="float16")
    wrapper.load_state_dict({**wrapper.state_dict(), "loss_scaler": {"scale": 32.0, "_growth_tracker": 3}})
    assert (wrapper.loss_scaler.get_scale(), wrapper.loss_scaler._get_growth_tracker()) == (32.0, 3)
    SingleDeviceStrategy(device="cpu").setup(model, wrapper)
    assert wrapper.plain_values()["scaler"]["scale"] == 32.0


def test_settings_of_the_scale_that_the_checkpoint_has_otherwise_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """They hold, as those of an optimizer do; nobody would see it in the results."""
    _, wrapper = alone(AmpOptimWrapper, dtype="float16", loss_scale=dict(growth_interval=100))
    state = wrapper.plain_values()
    for growth, said in ((100, ""), (7, "_interval 100 instead of 7")):
        _, other = alone(AmpOptimWrapper, dtype="float16", loss_scale=dict(growth_interval=growth))
        other.load_plain_values(state)
        assert other.loss_scaler.get_growth_interval() == 100
        assert caplog.text == "" if not said else said in caplog.text


def test_a_strategy_may_still_choose_another_dtype() -> None:
    _, wrapper = alone(AmpOptimWrapper)
    assert (wrapper.loss_scaler, wrapper.cast_dtype) == (None, torch.bfloat16)
    with pytest.raises(ConfigError, match="loss_scale"):
        AmpOptimWrapper(ADAMW, loss_scale="dynamical")


def test_several_by_name() -> None:
    one, other = alone()[1], alone()[1]
    both = OptimWrapperDict(one=one, other=other)
    train(net(), one, range(0))
    state = both.state_dict()
    assert state.keys() == {"one", "other"}
    assert "param_groups" in state["one"]
    both.load_state_dict(state)
    with pytest.raises(CheckpointError, match="the checkpoint's optimizers are one"):
        both.load_state_dict({"one": state["one"]})


@pytest.mark.parametrize(
    "state, message",
    [
        ({}, "has nothing, give what state_dict"),
        ({"scaler": {}}, "has scaler, give what state_dict"),
        (torch.optim.AdamW([torch.zeros(1)]).state_dict(), "doesn't match the size"),
    ],
    ids=["nothing", "plain", "other"],
)
def test_what_is_no_such_state_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        alone()[1].load_state_dict(state)


def test_before_it_is_built() -> None:
    wrapper = OptimWrapper(ADAMW)
    for call in (wrapper.state_dict, lambda: wrapper.load_state_dict({})):
        with pytest.raises(StrategyError, match="not built yet"):
            call()


class Adds(OptimWrapper):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}


def test_a_runner_says_what_to_override_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Adds.state_dict is never called here.* override plain_values"):
        FlexibleRunner(
            net(),
            tmp_path,
            train_dataloader=[torch.zeros(1, 3)],
            optim_wrapper=Adds(ADAMW),
            train_cfg=dict(max_epochs=1),
        )


def refusals(strategy: Any) -> list[str]:
    with started(strategy, OptimWrapper(ADAMW), Mlp) as session:
        found = []
        for call in (session.optim.state_dict, lambda: session.optim.load_state_dict({})):
            with pytest.raises(StrategyError) as caught:
                call()
            found.append(str(caught.value))
        return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy, reason",
    [
        ("FSDPStrategy", "this process holds a part"),
        pytest.param("DeepSpeedStrategy", "DeepSpeed's engine holds", marks=[pytest.mark.deepspeed, pytest.mark.full]),
    ],
)
def test_shards_are_refused(workers2: WorkerGroup, strategy: str, reason: str) -> None:
    for lines in workers2.run(refusals, dict(type=strategy)):
        assert all(reason in line and "runner.save_checkpoint" in line and "\n" not in line for line in lines)
