"""What reads values, or asks other processes, in a real run is planned without."""

import pytest

from .real_runs import planned, refusal
from .test_refusals import AMP, MESH


def test_a_plan_found_by_tracing_divides_the_matrices(workers1):
    plan = workers1.run(planned, {**MESH, "tp": 4, "dp_shard": 1}, 4, "mlp")[0].plan
    # Of each block, columns of the first matrix with its bias, and rows of the second.
    assert plan.parameters == 4 * ((256 * 1000 + 1000) // 4 + 1000 * 256 // 4 + 256)
    (row,) = [row for row in plan.traffic if row.axis == "tp" and row.phase == "forward"]
    assert (row.collective, row.payload) == ("all_reduce", 4 * 8 * 256 * 4)


def test_a_refusal_of_another_rank_than_0_is_told(workers1):
    (found,) = workers1.run(refusal, "mesh:tp512", 1024, "mlp", rank=700)
    assert found.startswith(
        "strategy.plan: tracing Perceptron found no two matrices that follow each other and that tp=512"
    )


def test_scaled_losses_are_planned(workers1):
    (found,) = workers1.run(planned, "ddp", 1024, "mlp", changes={**AMP, "optim_wrapper.dtype": "float16"})
    assert {row.dtype for row in found.plan.work if row.kind == "matrix"} == {"float16"}
    assert found.plan.between_updates["optimizer_state"] > 2 * found.plan.between_updates["parameters"]  # the steps too


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "model"), [("mesh:tp2", "resnet"), ("mesh:tp2", "vit"), ("mesh:ep2xtp2", "mixtral")]
)
def test_meshes_of_1024(workers1, strategy, model):
    found = workers1.run(planned, strategy, 1024, model)[0]
    assert not found.problem
    assert {"dp_shard", "tp"} <= {row.axis for row in found.plan.traffic}
