"""DeepSpeedStrategy on the simulated device: what is where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.core.base.errors import FlexTrainError
from flextrain.optim import AmpOptimWrapper
from flextrain.runner.hooks.ema import WeightAverage
from flextrain.strategies import DeepSpeedStrategy
from flextrain.testing.loop import windows
from flextrain.testing.models import HalfFrozen
from flextrain.testing.sessions import load, run, save, started, whole_model

from .training import ADAMW

pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
pytestmark = [pytest.mark.npu, pytest.mark.distributed, pytest.mark.deepspeed]


def frozen_weights(folder: Path, stage: int) -> tuple[dict[str, set[str]], bool]:
    """Where trained and frozen weights in full precision are, and whether another run takes them over bit for bit."""
    states = []
    for seed in (3, 4):
        strategy = dict(type="DeepSpeedStrategy", device="npu", zero_optimization=dict(stage=stage))
        with started(strategy, AmpOptimWrapper(ADAMW, dtype="bfloat16"), HalfFrozen, seed=seed) as session:
            (save if seed == 3 else load)(session, folder)
            state = session.strategy.model_state()
            places: dict[str, set[str]] = {"trained": set(), "frozen": set()}
            for name, parameter in session.strategy.module.named_parameters():
                kind = "trained" if parameter.requires_grad else "frozen"
                places[kind].add(
                    f"{state[name].dtype} on {state[name].device.type}, {parameter.dtype} on {parameter.device.type}"
                )
            states.append({key: value.cpu() for key, value in whole_model(session.strategy).items()})
    return places, all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights_in_full_precision_take_no_room_on_the_device(npu2: Any, tmp_path: Path, stage: int) -> None:
    for places, same in npu2.run(frozen_weights, tmp_path / "c", stage):
        assert places == {
            "trained": {"torch.float32 on npu, torch.bfloat16 on npu"},
            "frozen": {"torch.float32 on cpu, torch.bfloat16 on npu"},
        }
        assert same


def refused(**options: Any) -> str:
    """What setting up raises, on a chip whose overflow is no inf and without CANN's variable."""
    utils, home = torch.npu.utils, os.environ.pop("ASCEND_HOME_PATH")  # type: ignore[attr-defined]
    before, utils.is_support_inf_nan = utils.is_support_inf_nan, lambda: False
    strategy = DeepSpeedStrategy(device="npu", **options)
    try:
        strategy.join()
    except FlexTrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        utils.is_support_inf_nan = before
        os.environ["ASCEND_HOME_PATH"] = home
        strategy.leave()
    return "nothing"


def test_what_the_engine_lacks_is_named(npu1: Any) -> None:
    (found,) = npu1.run(refused, fp16=dict(enabled=True))
    assert found.startswith(
        "StrategyError: strategy.fp16: DeepSpeed's loss scaling looks for inf, and this npu stops at"
    )
    (found,) = npu1.run(refused)
    assert found == (
        "StrategyError: strategy.device: DeepSpeed needs 'ASCEND_HOME_PATH' in the environment for npu; flextrain doctor says "
        "where it comes from"
    )


def averaged_weights(stage: int) -> tuple[bool, bool]:
    """Whether averages of weights that are in several places take their places, and give them back."""
    strategy = dict(type="DeepSpeedStrategy", device="npu", zero_optimization=dict(stage=stage))
    with started(strategy, AmpOptimWrapper(ADAMW, dtype="bfloat16"), HalfFrozen) as session:
        live = {name: tensor for name, tensor in session.strategy.model_state().items() if tensor.is_floating_point()}
        average = WeightAverage(live)
        before = whole_model(session.strategy)
        run(session, windows([HalfFrozen.sample(8, seed=0)], 1))
        trained = whole_model(session.strategy)
        average.lerp_to_model(0.5)
        average.swap_in()
        middle = whole_model(session.strategy)
        average.swap_out()
        after = whole_model(session.strategy)
    between = all(
        torch.allclose(middle[f"model.{key}"], before[f"model.{key}"].lerp(trained[f"model.{key}"], 0.5))
        for key in live
    )
    return between, all(torch.equal(after[key], trained[key]) for key in after)


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_follow_weights_in_both_places(npu2: Any, stage: int) -> None:
    assert npu2.run(averaged_weights, stage) == [(True, True)] * 2
