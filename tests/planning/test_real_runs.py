"""What a plan says against real runs: memory, collectives, floating-point operations."""

import pytest

from .accuracy import GRID, LIMIT, LIMITS, MODELS, changes_for, run
from .allocator import COMPILER
from .conftest import PLANS
from .real_runs import both, counted_by_torch, kept, sent
from .zoo import LENGTH

pytestmark = PLANS
DAILY = "ddp", "all on the host"


def check(planned, real, tolerance):
    assert planned.peak.total == pytest.approx(real.peak.total, rel=tolerance)
    assert (planned.peak.phase, planned.peak.module) == (real.peak.phase, real.peak.module) or tolerance > 0.01
    assert sent(planned) == sent(real)
    assert planned.flops == real.flops > 0
    assert planned.repeated_flops == real.repeated_flops
    assert (planned.samples, planned.micro_batches) == (real.samples, real.micro_batches)
    # A parameter of which a rank has no row keeps a row of padding, which is one kind or the other.
    kinds = (("parameters", "communication"), ("optimizer_state",), ("gradients",))
    for several in kinds:
        held, kept = (sum(one.between_updates.get(kind, 0) for kind in several) for one in (planned, real))
        assert held == kept


def test_a_perceptron_under_ddp(workers2):
    pairs = workers2.run(both, "ddp", 2, "mlp", "accumulate")
    for planned, real in pairs:
        check(planned, real, 0.01)
    assert {traffic.axis for traffic in pairs[0][0].traffic} == {"data"}


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.full)])
def test_adapters(workers2, strategy):
    """peft moves what it adds to the device of the base, which a plan cannot and need not."""
    pytest.importorskip("peft", reason="needs pip install flextrain[peft]")
    for planned, real in workers2.run(both, strategy, 2, "mlp", "adapters"):
        check(planned, real, 0.0 if strategy == "ddp" else 0.01)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mesh:tp2"])
def test_logits_by_chunks(workers2, strategy):
    changes = dict(transforms=[dict(type="ChunkedLoss", chunk=8)])
    for planned, real in workers2.run(both, strategy, 2, "llama", changes=changes):
        check(planned, real, 0.01)
        assert planned.repeated_flops > 0


@pytest.mark.full
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, to count what torch's allocator gives out")
@pytest.mark.parametrize(("strategy", "model"), GRID)
def test_every_strategy_and_model(workers2, strategy, model):
    of_ledger, of_allocator = LIMITS.get(strategy, LIMIT)
    for planned, real, peak in run(workers2, strategy, model):
        check(planned, real, of_ledger)
        assert planned.peak.total == pytest.approx(peak, rel=of_allocator)
        assert ("ac" in model.split()) == (planned.repeated_flops > 0)
        if strategy.startswith("mesh:"):
            axis = strategy[len("mesh:") : -1]
            assert axis in {traffic.axis for traffic in planned.traffic}


@pytest.mark.full
@pytest.mark.parametrize("model", [model for model in MODELS if model != "mixtral"])
def test_operations_are_those_of_torchs_own_counter(workers2, model):
    """It counts no grouped products, which mixtures of experts have; whole DTensors; and what pipelines try at set-up."""
    found = workers2.run(counted_by_torch, "fsdp", 2, *model.split(), changes=changes_for("fsdp", model))
    for counted, planned in found:
        assert planned == counted > 0


@pytest.mark.full
def test_operations_of_experts_are_added_to_torchs(workers2):
    rows, hidden, inner = 8 * LENGTH * 4, 64, 128  # each token goes to 4 experts, in 2 layers
    experts = 2 * 3 * 2 * rows * (hidden * 2 * inner + inner * hidden)  # forward, and twice as much in backward
    for counted, planned in workers2.run(counted_by_torch, "fsdp", 2, "mixtral"):
        assert planned == counted + experts


SAVED = {
    "without": None,
    "attention": "attention",
    "matmuls": "matmuls",
    "every other": dict(every=2),
    "inputs on the host": dict(offload=True),
    "all on the host": dict(offload=True, recompute=False),
    "matmuls on the host": dict(offload=True, policy="matmuls"),
}


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, to count what torch's allocator gives out")
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=() if (strategy, name) == DAILY else pytest.mark.full)
        for strategy in ("ddp", "fsdp", "mesh:tp2")
        for name in SAVED
    ],
)
def test_saved_activations(workers2, strategy, name):
    changes = {"strategy.activation_checkpointing": SAVED[name], "train_dataloader.batch_size": 32}
    for planned, real, saved, peak, host in workers2.run(kept, strategy, 2, "llama", changes=changes):
        assert planned.peak.total == pytest.approx(real.peak.total, rel=0.01)
        assert planned.peak.total == pytest.approx(peak, rel=0.05)
        assert (planned.flops, planned.repeated_flops) == (real.flops, real.repeated_flops)
        assert planned.host == real.host == host
        assert (host > 0) == ("host" in name)
        if strategy == "ddp":  # FSDP gathers parameters in forward too
            assert saved[0] == pytest.approx(saved[1], rel=0.05)
