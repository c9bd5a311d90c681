"""An update of many micro-batches, reckoned from a few: the same to the byte as if all of them were executed."""

import dataclasses

import pytest
import torch

from flextrain.plan.ledger import EXECUTED, Books, are_alike, reckoned
from flextrain.plan.plan import Moment

from .conftest import PLANS
from .real_runs import planned, planned_whole
from .test_refusals import AMP, FSDP, MESH

COUNT = 11
ZERO = "DeepSpeedStrategy"


def check(workers, strategy, model, changes=None):
    changes = {**(changes or {}), "optim_wrapper.accumulative_counts": COUNT}
    found, whole = (workers.run(run, strategy, 8, model, changes=changes)[0] for run in (planned, planned_whole))
    assert not found.problem
    assert [note for note in found.facts.notes if note not in whole.facts.notes] == [
        f"of the {COUNT} micro-batches of an update, {EXECUTED[-1]} were executed: each of the others adds as many operations "
        "and bytes as the last one of them, and memory for its inputs and its loss alone"
    ]
    plan, other = found.plan, whole.plan
    if (
        plan.peak.phase == "update"
    ):  # of equal peaks the later one: the first update has yet to say what its new state is
        assert plan.peak.by_kind["optimizer_state"] == plan.between_updates["optimizer_state"]
    assert (plan.micro_batches, plan.samples) == (COUNT, 8 * COUNT)
    for key in ("peak", "between_updates", "samples", "parameters", "index"):
        assert getattr(plan, key) == getattr(other, key), key
    for key in ("traffic", "work"):
        mine, all_executed = (
            {repr(dataclasses.replace(row, **dict.fromkeys(zeros, 0))): row for row in getattr(one, key)}
            for one in (plan, other)
            for zeros in [
                ("count", "payload", "inside", "between") if key == "traffic" else ("operations", "flops", "moved")
            ]
        )
        assert mine == all_executed


@PLANS
@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param({**FSDP, "wrap": ["Sequential"]}, marks=pytest.mark.full)], ids=["ddp", "fsdp"]
)
def test_an_update_of_many_micro_batches(workers1, strategy):
    check(workers1, strategy, "mlp")


ALL = {
    "llama-mesh": ("mesh:tp2", "llama", {}),
    "llama-cp": ("mesh:cp2", "llama", {}),
    "llama-recomputed": (
        {**FSDP, "activation_checkpointing": {"classes": ["LlamaDecoderLayer"]}, "wrap": "blocks"},
        "llama",
        {},
    ),
    "mixtral-ep": ("mesh:ep2", "mixtral", {}),
    "resnet-fsdp": ("fsdp", "resnet", {}),
    "resnet-ddp": ("ddp", "resnet", {}),
    "reduced": ({**FSDP, "wrap": "blocks", "reduce_every_micro_batch": True}, "mlp", {}),
    "kept": ({**FSDP, "wrap": "blocks", "reshard_after_forward": False}, "mlp", {}),
    "hybrid": ({**FSDP, "wrap": "blocks", "replicate_size": 2}, "mlp", {}),
    "scaled": ("ddp", "mlp", {**AMP, "optim_wrapper.dtype": "float16"}),
    "bfloat16": ({**FSDP, "wrap": "blocks", "mixed_precision": {"param_dtype": "bfloat16"}}, "vit", {}),
    "mesh": ({**MESH, "dp_replicate": 2, "tp": 2}, "mlp", {}),
    **{f"zero{stage}": ({"type": ZERO, "zero_optimization": {"stage": stage}}, "mlp", {}) for stage in range(4)},
}


@PLANS
@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_an_update_of_many_micro_batches_of_every_strategy(workers1, name):
    check(workers1, *ALL[name])


@PLANS
@pytest.mark.full
def test_micro_batches_of_a_pipeline_are_executed(workers1):
    changes = {"optim_wrapper.accumulative_counts": COUNT}
    found = workers1.run(planned, "mesh:pp2", 8, "mlp", changes=changes)[0]
    assert not any("were executed" in note for note in found.facts.notes)
    assert found.plan.micro_batches == COUNT


def books(count, *, each=4, calls=3, activations=50, between=5):
    """Of an update of micro-batches that leave a loss of 4 bytes each."""
    memory = {"activations": activations + each * count, "inputs": 1000}
    peak = Moment("backward", "", "", sum(memory.values()), memory)
    return Books(
        {("all_reduce", "data", 8, "backward"): [calls * count, 7 * count, 1.5 * count, 0]},
        {("forward", "float32", True): [5 + 2 * count, 9 * count, 4 * count]},
        [peak],
        peak,
        {"parameters": between, "inputs": 1000},
    )


def test_what_grows_evenly_goes_on():
    first, *few = (books(count) for count in (EXECUTED[0], *EXECUTED))
    assert reckoned(first, few, 100) == books(100)
    higher = reckoned(books(EXECUTED[0], activations=60), few, 100)  # when the optimizer's state was created
    assert higher.peak == books(100, activations=60).peak
    assert higher.moments == books(100).moments


@pytest.mark.parametrize("change", [{"calls": 4}, {"each": 5}, {"activations": 51}, {"between": 6}])
@pytest.mark.parametrize("index", range(3))
def test_what_does_not_grow_evenly_is_not_reckoned(change, index):
    few = [books(count, **(change if i == index else {})) for i, count in enumerate(EXECUTED)]
    assert reckoned(books(EXECUTED[0]), few, 100) is None


def test_what_stays_of_every_micro_batch_is_not_reckoned():
    first, *few = (books(count, each=2000) for count in (EXECUTED[0], *EXECUTED))
    assert reckoned(first, few, 100) is None


def test_micro_batches_that_are_alike():
    one = {"x": torch.zeros(2, 3), "n": 2}
    assert are_alike([one, {"x": torch.ones(2, 3), "n": 2}])
    for other in (
        {"x": torch.zeros(2, 4), "n": 2},
        {"x": torch.zeros(2, 3).double(), "n": 2},
        {"x": torch.zeros(2, 3), "n": 3},
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 3), "n": 2.0},
    ):
        assert not are_alike([one, other])
    assert not are_alike([{"x": object()}] * 2)
