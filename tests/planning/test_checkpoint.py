"""What a plan says of a checkpoint, against what is written."""

import dataclasses

import pytest

from flextrain.core.base.errors import ConfigError
from flextrain.core.checkpoint.chunks import Cut
from flextrain.core.checkpoint.save_plan import Kind, Mesh, Offer, Offered, OnMesh, Range, Whole, plan_save
from flextrain.plan.checkpoint import Share, plan_checkpoint, with_checkpoint, with_seconds
from flextrain.plan.per_strategy import plan_strategy, rate_in_bytes
from flextrain.plan.plan import CheckpointPlan, Moment, PlannedJob, RankPlan, StrategyPlan

from .real_runs import SCRIPT, save

FLOAT = 4


def share(rank, ranks, offer, alone=()):
    return Share(rank, ranks, offer, frozenset(alone), 1000, 100, "FSDPStrategy", 8)


def on_two_axes(prefix, first):
    """A matrix that dp_shard=4 and tp=2 cut, and statistics that one rank saves."""
    cut = OnMesh(0, (Cut(0, 2), Cut(0)))
    tensors = (
        Offered(f"model.{prefix}.weight", "F32", (10, 6), cut),
        Offered(f"model.{prefix}.norm", "F32", (6,), OnMesh(0, (Cut(0), None))),
        Offered(f"model.{prefix}.mean", "F32", (5,), Whole()),
    )
    return Offer(tensors, (Mesh((4, 2), None, (2, 1)),), (first,))


def test_stages_are_planned_together_as_a_save_does():
    shares = [
        share(rank, range(rank, rank + 8), on_two_axes(name, rank), [f"model.{name}.mean"])
        for rank, name in ((0, "first"), (8, "other"))
    ]
    plan, sizes = plan_checkpoint(shares, 2, 16)

    def kinds(name, first):
        offer = on_two_axes(name, first)
        yield Kind([first], offer, [[first]])
        yield Kind([*range(first + 1, first + 8)], Offer(offer.tensors[:2], offer.meshes, ()), [[first]])

    together = plan_save([*kinds("first", 0), *kinds("other", 8)], 16)
    most = max(sum(FLOAT * part.box[1][0] * (*part.box[1], 1)[1] for part in together.parts_of(r)) for r in range(16))
    assert most < plan.largest < most + 500  # the header
    assert plan.files == 2 + sum(bool(together.parts_of(rank)) for rank in range(16)) == 2 + 12
    assert plan.values == 2 * 1000 + 8 * 100
    assert set(sizes) == {0, 8}
    assert plan.whole > 2 * FLOAT * (60 + 6 + 5) + plan.index + plan.values


def test_stages_between_are_as_the_second():
    def named(stage):
        return share(stage * 8, range(stage * 8, stage * 8 + 8), on_two_axes(f"layers.{stage}", stage * 8))

    every, _ = plan_checkpoint([named(stage) for stage in range(6)], 6, 48)
    rank = RankPlan(0, {}, Moment("forward", "", "", 0, {}), {})
    some, ranks, notes = with_checkpoint([rank], [named(0), named(1), named(5)], 6, 48)
    assert some == every
    assert ranks[0].checkpoint > 0
    assert notes == ["checkpoint: stages 2 to 4 are taken to write what stage 1 does"]


def test_a_tensor_of_which_a_part_is_missing_is_a_note():
    offer = Offer((Offered("model.weight", "F32", (10,), Range(0, 5)),), (), ())
    plan, _, notes = with_checkpoint([], [share(0, range(4), offer)], 1, 4)
    assert plan is None
    assert notes[0].startswith("a checkpoint cannot be written: model.weight: its chunks are not all there")


def test_seconds_are_those_of_the_slowest():
    plan = StrategyPlan("fsdp", "planned", checkpoint=CheckpointPlan(10, 1000, 300, 0, 10, 10))

    def seconds(*rates):
        return with_seconds(plan, *rates).checkpoint.seconds

    assert seconds(100, None) == 3
    assert seconds(None, 100) == 10
    assert seconds(1, 100) == 300
    assert seconds(1000, 100) == 10
    assert seconds(None, None) is None
    refused = dataclasses.replace(plan, checkpoint=None)
    assert with_seconds(refused, 1, 1) == refused


def test_rates():
    assert rate_in_bytes("2GB/s", "plan.disk") == 2 * 10**9
    for wrong in ("2GB", "2GB/h", "fast/s"):
        with pytest.raises(ConfigError, match=r"^plan\.disk: .* is not allowed, give "):
            rate_in_bytes(wrong, "plan.disk")


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "model"),
    [("fsdp", "mlp"), ("ddp", "resnet"), ("mesh:tp2", "llama"), ("mesh:pp2", "llama"), ("mesh:ep2", "mixtral")],
)
def test_files_have_the_planned_sizes(workers2, tmp_path, strategy, model):
    folder = tmp_path / "saved"
    workers2.run(save, str(folder), strategy, 2, model)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    found = plan_strategy(PlannedJob(SCRIPT, strategy, 2, 1, (model,)))
    planned, index, values = found.checkpoint, sizes.pop("manifest.json"), sizes.pop("values.json")
    assert planned.files == len(sizes) + 2
    assert {f"rank-{rank.rank:05d}.safetensors": rank.checkpoint for rank in found.ranks}.items() <= sizes.items()
    assert (planned.largest, f"rank-{planned.largest_rank:05d}.safetensors") == max(
        (size, name) for name, size in sizes.items()
    )
    # The digits of random states, and of sizes, differ.
    assert planned.values == pytest.approx(values, rel=0.1)
    assert planned.index == pytest.approx(index, abs=10)
    assert planned.whole == pytest.approx(sum(sizes.values()) + index + values, rel=1e-3)
