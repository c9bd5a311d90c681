"""What reads values, or asks other processes, in a real run is planned without."""

import pytest
import torch

from flextrain.plan.update import samples_in

from .conftest import PLANS
from .real_runs import planned, refusal, waiting
from .test_refusals import AMP, FSDP, MESH

pytestmark = PLANS


def test_a_plan_found_by_tracing_divides_the_matrices(workers1):
    plan = workers1.run(planned, {**MESH, "tp": 4, "dp_shard": 1}, 4, "mlp")[0].plan
    # Of each block, columns of the first matrix with its bias, and rows of the second.
    assert plan.parameters == 4 * ((256 * 1000 + 1000) // 4 + 1000 * 256 // 4 + 256)
    (row,) = [row for row in plan.traffic if row.axis == "tp" and row.phase == "forward"]
    assert (row.collective, row.payload) == ("all_reduce", 4 * 8 * 256 * 4)


def test_parameters_that_stay_sharded_over_groups_are_planned(workers1):
    given = {**FSDP, "wrap": ["Sequential"], "reshard_after_forward": 4}
    found = workers1.run(planned, given, 8, "mlp")[0]
    assert not found.problem
    gathered = {(row.phase, row.ranks) for row in found.plan.traffic if row.collective == "all_gather"}
    assert gathered == {("forward", 8), ("backward", 4)}


def test_stages_keep_gathered_units_for_their_window(workers1):
    """Otherwise every micro-batch gathers them again."""
    calls = {}
    for reshards in (None, True):
        given = {**MESH, "pp": 2, "dp_shard": 2, "wrap": ["Sequential"], "reshard_after_forward": reshards}
        plan = workers1.run(planned, given, 4, "mlp", "accumulate")[0].plan
        calls[reshards] = sum(row.count for row in plan.traffic if row.collective == "all_gather")
        assert plan.micro_batches == 2
    assert calls[None] == 3  # the stage's units, once
    assert calls[True] > 2 * calls[None]


def test_what_a_plan_has_no_values_for_is_said_or_tried_with_values(workers1):
    whole = {"optim_wrapper.optimizer": {"type": f"{__name__.rpartition('.')[0]}.zoo:NormedSGD", "lr": 0.1}}
    found = workers1.run(planned, "fsdp", 8, "mlp", changes=whole)[0]
    assert found.facts.notes == [
        "optim_wrapper.optimizer: NormedSGD was not tried on shards; a real run tries it before training, and may refuse it"
    ]
    for strategy in ({**MESH, "tp": 2, "dp_shard": 4}, "zero1"):
        (says,) = workers1.run(refusal, strategy, 8, "mlp", changes=whole)
        assert says.startswith("optim_wrapper.optimizer: NormedSGD computes with a parameter as a whole"), says
    assert not workers1.run(refusal, "ddp", 8, "mlp", changes=whole)[0]


def test_waiting_for_a_collective_makes_no_tensor(workers1):
    assert workers1.run(waiting) == [(400, 400, True)]


def test_a_batch_that_is_a_list_of_tensors_has_their_samples(workers1):
    changes = {"train_dataloader.collate_fn": f"{__name__.rpartition('.')[0]}.zoo:as_list"}
    plan = workers1.run(planned, "ddp", 8, "mlp", "accumulate", changes=changes)[0].plan
    assert (plan.samples, plan.micro_batches) == (16, 2)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(3, 7), "y": torch.zeros(3)},
        {"scale": torch.tensor(1.0), "x": torch.zeros(3, 7)},
        [torch.zeros(3, 7), torch.zeros(3)],
        (torch.zeros(3, 7), torch.zeros(3)),
        torch.zeros(3, 7),
        [{"x": torch.zeros(7)}] * 3,
        {"inputs": [torch.zeros(7)] * 3, "data_samples": [None] * 3},
    ],
    ids=["dict", "scalar", "list", "tuple", "tensor", "samples", "unstacked"],
)
def test_samples_of_a_batch(batch):
    assert samples_in(batch) == 3


def test_hooks_that_are_left_out_are_named(workers1):
    changes = {"custom_hooks": [{"type": "EMAHook"}]}
    found = workers1.run(planned, "fsdp", 8, "mlp", changes=changes)[0]
    says = "custom_hooks of the script: EMAHook is left out, and so is what it keeps in memory and in checkpoints"
    assert found.facts.notes == [says]


def test_what_is_compared_in_a_real_run_is_said(workers1):
    given = {**MESH, "tp": 2, "tp_kind": "local", "plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}}
    found = workers1.run(planned, given, 8, "mlp")[0]
    assert not found.problem
    assert [note.partition(" was not compared")[0] for note in found.facts.notes] == ['strategy.tp_kind: "local"']


def test_a_refusal_of_another_rank_than_0_is_told(workers1):
    (found,) = workers1.run(refusal, "mesh:tp512", 1024, "mlp", rank=700)
    assert found.startswith(
        "strategy.plan: tracing Perceptron found no two matrices that follow each other and that tp=512"
    )


def test_scaled_losses_are_planned(workers1):
    (found,) = workers1.run(planned, "ddp", 1024, "mlp", changes={**AMP, "optim_wrapper.dtype": "float16"})
    assert {row.dtype for row in found.plan.work if row.kind == "matrix"} == {"float16"}
    assert found.plan.between_updates["optimizer_state"] > 2 * found.plan.between_updates["parameters"]  # the steps too


LAYERS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


@pytest.mark.full
def test_a_later_stage_of_a_given_plan_gets_dtensors(workers1):
    """In a real run the stage before says so; its activations and their gradients are sent as ordinary tensors."""
    plan = {f"model.layers.*.{name}": style for name, style in LAYERS.items()}
    found = workers1.run(planned, {**MESH, "tp": 2, "pp": 2, "plan": plan}, 8, "llama", rank=4)[0]
    assert not found.problem
    sent = {(row.collective, row.payload) for row in found.plan.traffic if row.axis == "pp"}
    assert {("receive", 8 * 64 * 128 * 4), ("send", 8 * 64 * 128 * 4)} <= sent


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "model"), [("mesh:tp2", "resnet"), ("mesh:tp2", "vit"), ("mesh:ep2xtp2", "mixtral")]
)
def test_meshes_of_1024(workers1, strategy, model):
    found = workers1.run(planned, strategy, 1024, model)[0]
    assert not found.problem
    assert {"dp_shard", "tp"} <= {row.axis for row in found.plan.traffic}
