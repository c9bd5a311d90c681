"""The result of planning as JSON."""

import json

import pytest

from flextrain.core.base.errors import ConfigError
from flextrain.plan.child import arguments_for
from flextrain.plan.plan import Moment, PlannedJob, RankPlan, StrategyPlan, Traffic, TrainingPlan, Work, read_plan

GIB = 2**30


def a_plan(**changes):
    peak = Moment("backward", "layers.3", "aten.mm", 5 * GIB, {"parameters": 2 * GIB, "activations": 3 * GIB})
    traffic = Traffic("all_gather", "dp_shard", 8, 12, GIB, GIB // 2, GIB // 4, "forward")
    work = [
        Work("forward", "bfloat16", "matrix", 3, 100, 50),
        Work("recompute", "bfloat16", "matrix", 3, 70, 50),
        Work("backward", "bfloat16", "other", 9, 0, 20),
    ]
    high = RankPlan(7, {"pp": 1}, peak, {"parameters": 2 * GIB}, [peak], [traffic], work, samples=4)
    low = RankPlan(0, {"pp": 0}, Moment("update", "", "", GIB, {"gradients": GIB}), {})
    planned = StrategyPlan("mesh:pp2", "planned", ranks=[low, high], axes={"pp": 2, "dp_shard": 4})
    refused = StrategyPlan("ddp", "refused", "strategy.type: is not possible")
    return TrainingPlan(
        **{"script": "train.py", "world_size": 8, "nodes": 2, "device_memory": 6 * GIB, "torch": "2.15", **changes},
        strategies=[planned, refused],
    )


def test_a_plan_is_read_back_as_it_was_written(tmp_path):
    plan, file = a_plan(), tmp_path / "plan.json"
    file.write_text(json.dumps(plan.as_json()))
    assert read_plan(file) == plan
    assert [each["fits"] for each in plan.as_json()["strategies"]] == [True, None]


def test_a_plan_fits_with_what_is_not_seen():
    assert a_plan().strategies[0].highest.rank == 7
    for unseen, fits in [(GIB, True), (GIB + 1, False)]:
        plan = a_plan(unseen=unseen)
        assert plan.fits(plan.strategies[0]) is fits
        assert plan.fits(plan.strategies[1]) is None
    assert a_plan(device_memory=None).fits(a_plan().strategies[0]) is None


def test_the_sums_of_a_rank():
    rank = a_plan().strategies[0].highest
    assert (rank.flops, rank.repeated_flops) == (170, 70)
    assert (rank.sent("inside"), rank.sent("between")) == (GIB // 2, GIB // 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 7}, "plan: has version 7, this flextrain reads 1; plan again"),
        ({"world_size": "many"}, "plan: is no plan, world_size: "),
    ],
    ids=["version", "value"],
)
def test_what_is_no_plan_is_refused(change, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        read_plan({**a_plan().as_json(), **change})


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read, No such file"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("import torch")
    with pytest.raises(ConfigError, match=r"text\.json: is no plan, Invalid JSON: "):
        read_plan(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"list\.json: is no plan"):
        read_plan(str(tmp_path / "list.json"))


OPTIMIZER = {"type": "SGD", "lr": 0.1}
FSDP_IN_HALF = {"type": "FSDPStrategy", "mixed_precision": {"param_dtype": "bfloat16"}}
ZERO_IN_HALF = {"type": "DeepSpeedStrategy", "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
OF_MMENGINE = {"type": "FSDPStrategy", "model_wrapper": {"mixed_precision": {"param_dtype": "bfloat16"}}}


@pytest.mark.parametrize(
    "own, name, dtype",
    [
        (FSDP_IN_HALF, "ddp", "bfloat16"),
        (OF_MMENGINE, "ddp", "bfloat16"),
        (FSDP_IN_HALF, "zero2", "bfloat16"),
        (ZERO_IN_HALF, "fsdp", "bfloat16"),
        (FSDP_IN_HALF, "fsdp", None),
        (FSDP_IN_HALF, "mesh:tp2", None),
        ({"type": "FSDPStrategy"}, "ddp", None),
    ],
)
def test_all_strategies_compute_in_the_dtype_of_the_scripts_own(own, name, dtype):
    given = dict(strategy=own, optim_wrapper=dict(optimizer=OPTIMIZER, accumulative_counts=2))
    found, notes = arguments_for(PlannedJob("train.py", name, 8, 1), given)
    expected = {} if dtype is None else dict(type="AmpOptimWrapper", dtype=dtype)
    assert found["optim_wrapper"] == {**given["optim_wrapper"], **expected}
    assert any("AmpOptimWrapper with dtype=bfloat16, because the script's own" in note for note in notes) is bool(dtype)


def test_a_wrapper_that_cannot_be_changed_is_told_of():
    own = dict(strategy=FSDP_IN_HALF, optim_wrapper=dict(type="TheirWrapper", optimizer=OPTIMIZER))
    found, notes = arguments_for(PlannedJob("train.py", "ddp", 8, 1), own)
    assert found["optim_wrapper"] == own["optim_wrapper"]
    assert "NOT comparable with a plan in bfloat16" in notes[-1]
