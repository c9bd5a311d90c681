"""What a plan says against real runs: memory, collectives, floating-point operations."""

import pytest

from .real_runs import both, sent

MODELS = ["mlp", "llama", "llama ac", "resnet", "vit", "mixtral"]


def check(pairs, tolerance):
    for planned, real in pairs:
        assert planned.peak.total == pytest.approx(real.peak.total, rel=tolerance)
        assert (planned.peak.phase, planned.peak.module) == (real.peak.phase, real.peak.module) or tolerance > 0.01
        assert sent(planned) == sent(real)
        assert planned.flops == real.flops > 0
        assert planned.repeated_flops == real.repeated_flops
        # A parameter of which a rank has no row keeps a row of padding, which is one kind or the other.
        kinds = (("parameters", "communication"), ("optimizer_state",), ("gradients",))
        for several in kinds:
            held, kept = (sum(one.between_updates.get(kind, 0) for kind in several) for one in (planned, real))
            assert held == kept


def test_a_perceptron_under_ddp(workers2):
    pairs = workers2.run(both, "ddp", 2, "mlp", "accumulate")
    check(pairs, 0.01)
    planned, _ = pairs[0]
    assert {traffic.axis for traffic in planned.traffic} == {"data"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "model"),
    [("mesh:tp2", "llama"), ("mesh:cp2", "llama"), ("mesh:pp2", "llama"), ("mesh:ep2", "mixtral")],
)
def test_model_parallelism(workers2, strategy, model):
    pairs = workers2.run(both, strategy, 2, model)
    check(pairs, 0.05)
    axis = strategy[len("mesh:") : -1]
    assert all(axis in {traffic.axis for traffic in planned.traffic} for planned, _ in pairs)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("strategy", "tolerance"), [("ddp", 0.01), ("fsdp", 0.05)])
def test_data_parallelism(workers2, strategy, tolerance, model):
    changes = {}
    if strategy == "ddp" and "ac" in model:
        changes = {"strategy.activation_checkpointing": {"classes": ["LlamaDecoderLayer"]}}
    pairs = workers2.run(both, strategy, 2, *model.split(), changes=changes)
    check(pairs, tolerance)
    assert ("ac" in model) == (pairs[0][0].repeated_flops > 0)
